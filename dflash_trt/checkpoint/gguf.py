"""Reader of GGUF targets: llama.cpp's names, row order and blocks seen as Hugging Face tensors."""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dflash_trt.checkpoint.gguf_header import GgufHeader, GgufTensor
from dflash_trt.checkpoint.tensors import (
    BF16,
    FloatArray,
    Q4Blocks,
    TensorInfo,
    check_rows,
    missing,
    shown,
    to_float32,
)
from dflash_trt.errors import BadTensor, CheckpointError
from dflash_trt.quantize.floats import FloatCodes

PLAIN_TYPES: dict[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": BF16,
}
BLOCK = 32  # elements in a Q4_0 or Q4_1 block

TOP_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
ROPE_TABLE = "rope_freqs.weight"
_LAYER = re.compile(r"blk\.(0|[1-9]\d{0,5})\.([a-z_]+)\.(weight|bias)")
_ROTATED = re.compile(r"\.self_attn\.([qk])_proj\.(weight|bias)$")


@dataclass(frozen=True)
class RotatedRows:
    """How architecture `llama` stores q and k: per head, rows in interleaved rotary order."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


class GgufSource:
    """`TensorSource` over one GGUF file under Hugging Face names.

    `rope_freqs` keeps its own name: it is a fact of the rotary embedding, not a weight.
    """

    def __init__(self, header: GgufHeader, rotated: RotatedRows | None) -> None:
        self._path = header.file.path
        self._file = header.file
        self._quants = _import_quants(self._path)
        self._tensors = {hf_name(name): tensor for name, tensor in header.tensors.items()}
        if len(self._tensors) != len(header.tensors):
            raise BadTensor(f"{self._path}: two tensors have the same meaning")
        self._rotated = rotated

    @property
    def path(self) -> Path:
        """The file, for messages."""
        return self._path

    def names(self) -> list[str]:
        """All tensors under Hugging Face names, in file order; unknown ones keep their own."""
        return list(self._tensors)

    def info(self, name: str) -> TensorInfo:
        """Shape and type of one tensor. Raises `MissingTensor`."""
        tensor = self._find(name)
        return TensorInfo(name, tensor.shape, tensor.type_name, self._path)

    def read(self, name: str) -> FloatArray:
        """The tensor as float32, dequantized if need be."""
        return self._decode(name, self._find(name), self._rows(name))

    def read_rows(self, name: str, start: int, stop: int) -> FloatArray:
        """Rows `start:stop` of the first axis, as float32; only these are dequantized."""
        check_rows(self.info(name), start, stop)
        return self._decode(name, self._find(name), self._rows(name, start, stop))

    def raw(self, name: str) -> npt.NDArray[Any]:
        """The tensor in its stored type; `BadTensor` for quantized types."""
        tensor = self._find(name)
        if tensor.type_name not in PLAIN_TYPES:
            raise BadTensor(
                f"{self._path}: tensor {shown(name)} is stored as {tensor.type_name} blocks",
                "read it as float32 or as 4-bit blocks",
            )
        rows = self._rows(name)
        return rows.view(PLAIN_TYPES[tensor.type_name]).reshape(tensor.shape)

    def q4_blocks(self, name: str) -> Q4Blocks | None:
        """The 4-bit blocks of a Q4_0 or Q4_1 matrix, as stored but for the nibble order."""
        tensor = self._find(name)
        if tensor.type_name not in ("Q4_0", "Q4_1") or len(tensor.shape) != 2:
            return None
        num_rows, num_blocks = tensor.shape[0], tensor.shape[1] // BLOCK
        blocks = self._rows(name).reshape(num_rows, num_blocks, -1)
        heads = np.ascontiguousarray(blocks[:, :, :-16]).view("<f2").astype(np.float32)
        scales = np.ascontiguousarray(heads[:, :, 0])
        # Q4_1 is scale*code + minimum, and scale*code = scale*(code-8) + 8*scale.
        offsets = heads[:, :, 1] + np.float32(8) * scales if tensor.type_name == "Q4_1" else None
        return Q4Blocks(_pair_nibbles(blocks[:, :, -16:]), scales, offsets)

    def float_codes(self, name: str) -> FloatCodes | None:
        """None: GGUF's own NVFP4 is not read."""
        self._find(name)
        return None

    def _find(self, name: str) -> GgufTensor:
        try:
            return self._tensors[name]
        except KeyError:
            raise missing(self._path, name) from None

    def _rows(self, name: str, start: int = 0, stop: int | None = None) -> npt.NDArray[np.uint8]:
        """The bytes of rows start:stop of the first axis [rows, bytes], q and k in NeoX order."""
        tensor = self._find(name)
        num_rows = tensor.shape[0]
        table = self._file.view(
            np.dtype("u1"), tensor.offset, (num_rows, tensor.num_bytes // num_rows)
        )
        match = _ROTATED.search(name) if self._rotated else None
        if self._rotated is None or match is None:
            return table[start:stop]
        rotated = self._rotated
        num_heads = rotated.num_heads if match[1] == "q" else rotated.num_kv_heads
        order = unpermute(num_heads, rotated.head_dim)
        if len(order) != num_rows:
            raise BadTensor(
                f"{self._path}: tensor {shown(name)} has {num_rows} rows, expected {len(order)}"
            )
        gathered: npt.NDArray[np.uint8] = table[order[start:stop]]
        return gathered

    def _decode(self, name: str, tensor: GgufTensor, rows: npt.NDArray[np.uint8]) -> FloatArray:
        shape = (rows.shape[0], *tensor.shape[1:])
        if tensor.type_name in PLAIN_TYPES:
            plain = rows.view(PLAIN_TYPES[tensor.type_name]).reshape(shape)
            return to_float32(plain, TensorInfo(name, shape, tensor.type_name, self._path))
        kind = self._quants.GGMLQuantizationType[tensor.type_name]
        with np.errstate(invalid="ignore", over="ignore"):  # whoever reads checks the values
            values = self._quants.dequantize(rows, kind)
        return np.ascontiguousarray(values, dtype=np.float32).reshape(shape)


def hf_name(name: str) -> str:
    """llama.cpp's tensor name as Hugging Face spells it; a name not in the tables stays."""
    stem, _, suffix = name.rpartition(".")
    if stem in TOP_NAMES:
        return f"{TOP_NAMES[stem]}.{suffix}"
    match = _LAYER.fullmatch(name)
    if match and match[2] in LAYER_NAMES:
        return f"model.layers.{match[1]}.{LAYER_NAMES[match[2]]}.{match[3]}"
    return name


def unpermute(num_heads: int, head_dim: int) -> npt.NDArray[np.intp]:
    """For each row in half-split (NeoX) order, its row in llama.cpp's interleaved order."""
    stored = np.arange(num_heads * head_dim, dtype=np.intp)
    return stored.reshape(num_heads, head_dim // 2, 2).swapaxes(1, 2).reshape(-1)


def _pair_nibbles(codes: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """From half-block order (byte i = elements i, i+16) to pairs (byte i = elements 2i, 2i+1)."""
    low, high = codes & np.uint8(15), codes >> np.uint8(4)
    element = np.concatenate([low, high], axis=-1)
    packed: npt.NDArray[np.uint8] = element[..., 0::2] | (element[..., 1::2] << np.uint8(4))
    return packed


def _import_quants(path: Path) -> Any:
    try:
        return importlib.import_module("gguf.quants")
    except ImportError as error:
        raise CheckpointError(
            f"{path}: reading GGUF needs the gguf package", "pip install 'dflash-trt[gguf]'"
        ) from error
