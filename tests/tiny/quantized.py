"""Quantized copies of checkpoints, as ModelOpt, compressed-tensors and transformers write them.

Written from the formats' descriptions with ml_dtypes, independent of the package. Each copy comes
with the float32 values that its codes and scales stand for.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save_file

F32 = npt.NDArray[np.float32]
Array = npt.NDArray[Any]

E4M3, E2M1 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float4_e2m1fn)
BLOCK = (32, 20)  # of the FP8 forms in blocks: neither divides what it is used on
WEIGHTS = "model.safetensors"


@dataclass(frozen=True)
class Encoded:
    """One weight: its tensors by the last part of their names, and the values it stands for."""

    tensors: dict[str, Any]
    floats: F32


@dataclass(frozen=True)
class Form:
    """How a tool stores weights, and what it writes beside them."""

    encode: Callable[[F32], Encoded]
    config: dict[str, Any] | None = None  # config.json's quantization_config
    modelopt: dict[str, Any] | None = None  # hf_quant_config.json's quantization


def e4m3(codes: Array) -> torch.Tensor:
    """An array of ml_dtypes' float8_e4m3fn as PyTorch's."""
    return torch.from_numpy(np.ascontiguousarray(codes).view(np.uint8)).view(torch.float8_e4m3fn)


def fp8(weight: F32, steps: F32) -> tuple[Array, F32]:
    """Codes of a weight whose values are multiples of `steps`, and those values."""
    codes = np.clip(weight / steps, -448, 448).astype(E4M3)
    return codes, codes.astype(np.float32) * steps


def _fp8_tensor(weight: F32, shape: tuple[int, ...] = (), leaf: str = "weight_scale") -> Encoded:
    scale = np.float32(np.abs(weight).max() / 448)
    codes, floats = fp8(weight, scale)
    stored = torch.full(shape, float(scale), dtype=torch.float32)
    return Encoded({"weight": e4m3(codes), leaf: stored, "input_scale": torch.ones(())}, floats)


def _fp8_channel(weight: F32, shape: tuple[int, ...], dtype: torch.dtype) -> Encoded:
    peaks = torch.from_numpy(np.abs(weight).max(1, keepdims=True) / np.float32(448)).to(dtype)
    codes, floats = fp8(weight, peaks.float().numpy())
    return Encoded({"weight": e4m3(codes), "weight_scale": peaks.reshape(shape)}, floats)


def _fp8_block(weight: F32, leaf: str, dtype: torch.dtype, powers: bool = False) -> Encoded:
    rows, width = weight.shape
    grid = np.zeros((-(-rows // BLOCK[0]), -(-width // BLOCK[1])), np.float32)
    steps = np.empty_like(weight)
    for i in range(grid.shape[0]):
        for j in range(grid.shape[1]):
            part = np.s_[i * BLOCK[0] : (i + 1) * BLOCK[0], j * BLOCK[1] : (j + 1) * BLOCK[1]]
            least = float(np.abs(weight[part]).max()) / 448
            scale = torch.tensor(2.0 ** np.ceil(np.log2(least)) if powers else least).to(dtype)
            grid[i, j] = steps[part] = float(scale)
    codes, floats = fp8(weight, steps)
    return Encoded({"weight": e4m3(codes), leaf: torch.from_numpy(grid).to(dtype)}, floats)


def _nvfp4_blocks(weight: F32, scale: np.float32) -> tuple[Array, Array, F32]:
    """Bytes, block scales, and the codes' own values in blocks [out, in / 16, 16]."""
    blocks = weight.reshape(len(weight), -1, 16)
    scales = (np.abs(blocks).max(-1) / np.float32(6) / scale).astype(E4M3)
    steps = scales.astype(np.float32) * scale
    ratio = np.divide(
        blocks, steps[..., None], out=np.zeros_like(blocks), where=steps[..., None] > 0
    )
    codes = np.clip(ratio, -6, 6).astype(E2M1)
    bits = codes.view(np.uint8).reshape(len(weight), -1) & 15
    return bits[:, ::2] | bits[:, 1::2] << 4, scales, codes.astype(np.float32)


def _modelopt_nvfp4(weight: F32, with_inputs: bool = True) -> Encoded:
    scale = np.float32(np.abs(weight).max() / (6 * 448))
    packed, scales, values = _nvfp4_blocks(weight, scale)
    floats = values * (scales.astype(np.float32) * scale)[..., None]
    tensors = {
        "weight": torch.from_numpy(packed),
        "weight_scale": e4m3(scales),
        "weight_scale_2": torch.tensor(scale),
        **({"input_scale": torch.tensor(0.01)} if with_inputs else {}),
    }
    return Encoded(tensors, floats.reshape(weight.shape))


def _compressed_nvfp4(weight: F32) -> Encoded:
    inverse = np.float32(6 * 448 / np.abs(weight).max())
    packed, scales, values = _nvfp4_blocks(weight, np.float32(1) / inverse)
    floats = values * (scales.astype(np.float32) / inverse)[..., None]
    tensors = {
        "weight_packed": torch.from_numpy(packed),
        "weight_scale": e4m3(scales),
        "weight_global_scale": torch.tensor([inverse]),
        "input_global_scale": torch.tensor([100.0]),
    }
    return Encoded(tensors, floats.reshape(weight.shape))


def group(num_bits: int, strategy: str, **more: Any) -> dict[str, Any]:
    """A config group of compressed-tensors: float weights, and inputs of as many bits."""
    weights = {"num_bits": num_bits, "type": "float", "strategy": strategy, "symmetric": True}
    inputs = {"num_bits": num_bits, "type": "float", "strategy": "token", "dynamic": True}
    return {
        "targets": ["Linear"], "weights": weights | {"dynamic": False} | more,
        "input_activations": inputs,
    }  # fmt: skip


def compressed(form: str, *groups: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A quantization_config of compressed-tensors."""
    return {
        "quant_method": "compressed-tensors", "format": form, "ignore": ["lm_head"],
        "config_groups": {f"group_{i}": each for i, each in enumerate(groups)},
        "kv_cache_scheme": None, "quantization_status": "compressed", **more,
    }  # fmt: skip


def modelopt(algorithm: str | None, **more: Any) -> dict[str, Any]:
    """ModelOpt's keys, in both of its files."""
    return {"quant_algo": algorithm, **more}


def whole_file(quantization: Any) -> dict[str, Any]:
    """What hf_quant_config.json holds; ModelOpt's exporter of drafters puts it in config.json."""
    return {"producer": {"name": "modelopt", "version": "0.1"}, "quantization": quantization}


FINEGRAINED = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
IN_BLOCKS = FINEGRAINED | {"weight_block_size": list(BLOCK)}
FORMS = {
    "modelopt-fp8": Form(_fp8_tensor, modelopt=modelopt("FP8", exclude_modules=["lm_head"])),
    "modelopt-fp8-both-files": Form(
        lambda w: _fp8_tensor(w, (1,)), modelopt("FP8", quant_method="modelopt"), modelopt("FP8")
    ),
    "modelopt-fp8-channel": Form(
        lambda w: _fp8_channel(w, (-1,), torch.float32),
        modelopt=modelopt("FP8_PER_CHANNEL_PER_TOKEN"),
    ),
    "modelopt-nvfp4": Form(_modelopt_nvfp4, modelopt=modelopt("NVFP4", group_size=16)),
    "compressed-nvfp4-weights-only": Form(
        _compressed_nvfp4,
        compressed("nvfp4-pack-quantized", group(4, "tensor_group") | {"input_activations": None}),
    ),
    "modelopt-w4a16-nvfp4": Form(
        lambda w: _modelopt_nvfp4(w, False), modelopt("W4A16_NVFP4", quant_method="modelopt")
    ),
    "modelopt-drafter-nvfp4": Form(
        lambda w: _modelopt_nvfp4(w, False), whole_file(modelopt("W4A16_NVFP4", group_size=16))
    ),
    "compressed-fp8": Form(
        lambda w: _fp8_tensor(w, (1,)), compressed("float-quantized", group(8, "tensor"))
    ),
    "compressed-fp8-channel": Form(
        lambda w: _fp8_channel(w, (-1, 1), torch.bfloat16),
        compressed("float-quantized", group(8, "channel")),
    ),
    "compressed-fp8-block": Form(
        lambda w: _fp8_block(w, "weight_scale", torch.float32),
        compressed("naive-quantized", group(8, "block", block_structure=list(BLOCK))),
    ),
    "compressed-nvfp4": Form(
        _compressed_nvfp4, compressed("nvfp4-pack-quantized", group(4, "tensor_group"))
    ),
    "transformers-fp8-block": Form(
        lambda w: _fp8_block(w, "weight_scale_inv", torch.bfloat16), IN_BLOCKS
    ),
    "transformers-fp8-powers": Form(
        lambda w: _fp8_block(w, "weight_scale_inv", torch.float32, powers=True),
        IN_BLOCKS | {"scale_fmt": "ue8m0"},
    ),
    "transformers-fp8": Form(
        lambda w: _fp8_tensor(w, (), "weight_scale_inv"), FINEGRAINED | {"weight_block_size": None}
    ),
    "autofp8": Form(
        lambda w: _fp8_tensor(w, (1,)), {"quant_method": "fp8", "activation_scheme": "static"}
    ),
}


def save_quantized(
    source: Path,
    folder: Path,
    form: str | Mapping[str, str],
    *,
    edit: Callable[[dict[str, Any]], None] | None = None,
) -> dict[str, F32]:
    """A copy of `source` with projections in `form`; `edit` changes its tensors before saving.

    `form` may map parts of names to forms; a name with none of the parts stays as it is. Returns
    the float32 values of what was quantized.
    """
    by_part = {"_proj.": form} if isinstance(form, str) else form
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    tensors: dict[str, Any] = {}
    floats: dict[str, F32] = {}
    for name, tensor in load_file(source / WEIGHTS).items():
        chosen = next((f for part, f in by_part.items() if part in name), None)
        if chosen is None or tensor.ndim != 2:
            tensors[name] = tensor
            continue
        made = FORMS[chosen].encode(tensor.float().numpy())
        stem = name.removesuffix("weight")
        tensors |= {stem + leaf: stored for leaf, stored in made.tensors.items()}
        floats[name] = made.floats
    if edit is not None:
        edit(tensors)
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    if isinstance(form, str):
        say(folder, FORMS[form].config, FORMS[form].modelopt)
    return floats


def say(folder: Path, config: Any = None, modelopt_file: Any = None) -> None:
    """Write what a folder's files say of its quantization."""
    path = folder / "config.json"
    data = json.loads(path.read_text())
    data.pop("quantization_config", None)
    path.write_text(json.dumps(data | ({} if config is None else {"quantization_config": config})))
    if modelopt_file is not None:
        (folder / "hf_quant_config.json").write_text(json.dumps(whole_file(modelopt_file)))


def save_dequantized(source: Path, folder: Path, floats: Mapping[str, F32]) -> None:
    """A copy of the unquantized `source` with other values, in float32."""
    shutil.copytree(source, folder)
    tensors = load_file(source / WEIGHTS)
    tensors |= {name: torch.from_numpy(value) for name, value in floats.items()}
    save_file({name: t.float() for name, t in tensors.items()}, folder / WEIGHTS, {"format": "pt"})
