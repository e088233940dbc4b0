"""FP8 and NVFP4 weights of a safetensors checkpoint under their plain names, as float32 or codes.

Layouts: ModelOpt's unified Hugging Face export, compressed-tensors, transformers' FP8 in blocks.
A weight is quantized if its type or its tensors' names say so; the JSON files must agree.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dflash_trt.checkpoint.quantized_config import (
    FP8,
    FP8_BLOCK,
    FP8_CHANNEL,
    NVFP4,
    SCHEMES,
    Quantization,
)
from dflash_trt.checkpoint.tensors import (
    UNQUANTIZED,
    FloatArray,
    KeptAs,
    Q4Blocks,
    TensorInfo,
    TensorSource,
    check_rows,
    missing,
    shown,
)
from dflash_trt.errors import BadTensor, CheckpointError
from dflash_trt.quantize.floats import (
    FP4_BLOCK,
    FP4_MAX,
    FP8_MAX,
    FloatCodes,
    Fp8Weight,
    Nvfp4Weight,
    fp4_values,
    fp8_values,
)
from dflash_trt.quantize.pieces import row_pieces

_E4M3_MAX_BITS = 0x7E  # above it NaN, then all negative numbers
_FLOAT32_MAX = float(np.finfo(np.float32).max)
_SCALE_TYPES = ("F32", "F16", "BF16")
# The last part of a name, and a type: what a quantized weight is known by.
_QUANTIZED = {("weight", "F8_E4M3"), ("weight", "U8"), ("weight_packed", "U8")}
# Scales of inputs: engines measure theirs at run time.
_INPUT_SCALES = ("input_scale", "activation_scale", "input_global_scale")
# ModelOpt has them under the projections, compressed-tensors under the attention; older files of
# both as scales of what a projection puts out.
_CACHE_SCALE = re.compile(
    r"\.self_attn\.([qkv]_proj\.output_scale|k_proj\.k_scale|v_proj\.v_scale|(q|k|v|kv)_scale)$"
)


@dataclass(frozen=True)
class _Weight:
    """Where one weight [out, in] is stored: value = code * step, or for NVFP4 with a second scale.

    `block`: outputs and inputs that share a scale. The last block of an axis may be cut off.
    """

    scheme: str
    shape: tuple[int, int]
    block: tuple[int, int]
    codes: str  # float8_e4m3fn [out, in]; NVFP4: uint8 [out, in / 2], low nibble the even input
    scales: str  # above zero, one per block; NVFP4: float8_e4m3fn [out, in / 16]
    second: str = ""  # NVFP4's scale of the whole tensor
    divides: bool = False  # compressed-tensors stores the second one's inverse


def read_quantized(
    source: TensorSource, quantization: Quantization | None, notes: list[str]
) -> TensorSource:
    """The source with quantized weights under their plain names; itself if it has none.

    Checks types and shapes, reads no weight. Raises `BadTensor` or `MissingTensor` naming the
    tensor, `CheckpointError` where `quantization` names a scheme and no weight has one.
    """
    weights: dict[str, _Weight] = {}
    used: set[str] = set()
    names = source.names()
    present = set(names)
    for name in names:
        stem, _, leaf = name.rpartition(".")
        dtype = source.info(name).dtype
        if (leaf, dtype) not in _QUANTIZED:
            continue
        if quantization is None:
            raise BadTensor(
                f"{source.info(name).file}: tensor {shown(name)} is quantized, but no JSON file "
                "beside it says how",
                "the folder must have the checkpoint's own config.json and hf_quant_config.json",
            )
        plain = f"{stem}.weight"
        if name != plain and plain in present:
            raise _both(source, plain, name)
        find = _find_fp8 if dtype == "F8_E4M3" else _find_nvfp4
        weights[plain] = weight = find(source, present, name, quantization)
        used |= {weight.codes, weight.scales, weight.second}
        used |= {f"{stem}.{scale}" for scale in _INPUT_SCALES}
    if quantization is None:
        return source
    if not weights:
        raise CheckpointError(
            f"{quantization.place} says {quantization.words}, but no weight is stored so",
            "the folder mixes files of two checkpoints: download it again",
        )
    cache_scales = [name for name in names if _CACHE_SCALE.search(name)]
    if cache_scales:
        notes.append(
            f"{source.path}: {len(cache_scales)} scales of a quantized KV cache are not used: an "
            "engine's caches are not quantized"
        )
    hidden = used | set(cache_scales)
    plain_names = {weight.codes: plain for plain, weight in weights.items()}
    listed = [plain_names.get(n, n) for n in names if n in plain_names or n not in hidden]
    _check_orphans(source, listed)
    return QuantizedSource(source, listed, weights)


class QuantizedSource:
    """A `TensorSource` whose quantized weights have plain names and float32 values."""

    def __init__(
        self, source: TensorSource, names: list[str], weights: Mapping[str, _Weight]
    ) -> None:
        self._source, self._names, self._weights = source, names, weights
        self._listed = set(names)
        # Where some weights are in 4 bits, those in 8 are the ones that 4 would hurt.
        self._is_mixed = len({weight.scheme == NVFP4 for weight in weights.values()}) == 2

    @property
    def path(self) -> Path:
        """The file or folder, for messages."""
        return self._source.path

    def names(self) -> list[str]:
        """Plain names, in file order, without scales."""
        return list(self._names)

    def info(self, name: str) -> TensorInfo:
        """Shape [out, in] of a quantized weight, its scheme as type. Raises `MissingTensor`."""
        weight = self._weight(name)
        if weight is None:
            return dataclasses.replace(self._source.info(name), kept_as="dense")
        file = self._source.info(weight.codes).file
        kept_as: KeptAs | None = "fp8" if self._is_mixed and weight.scheme != NVFP4 else None
        return TensorInfo(name, weight.shape, weight.scheme, file, kept_as)

    def read(self, name: str) -> FloatArray:
        """The tensor as float32, dequantized in pieces if need be."""
        weight = self._weight(name)
        if weight is None:
            return self._source.read(name)
        values = np.empty(weight.shape, np.float32)
        for rows in row_pieces(*weight.shape):
            values[rows] = self._values(weight, rows)
        return values

    def read_rows(self, name: str, start: int, stop: int) -> FloatArray:
        """Rows `start:stop` of the first axis as float32; only these are dequantized."""
        weight = self._weight(name)
        if weight is None:
            return self._source.read_rows(name, start, stop)
        check_rows(self.info(name), start, stop)
        return self._values(weight, slice(start, stop))

    def raw(self, name: str) -> npt.NDArray[Any]:
        """The tensor in its stored type; `BadTensor` for a quantized one."""
        weight = self._weight(name)
        if weight is None:
            return self._source.raw(name)
        raise BadTensor(
            f"{self._source.info(weight.codes).file}: tensor {shown(name)} is stored as "
            f"{SCHEMES[weight.scheme]}",
            "read it as float32 or as codes",
        )

    def q4_blocks(self, name: str) -> Q4Blocks | None:
        """What the source has of a plain tensor; None for a quantized one."""
        return self._source.q4_blocks(name) if self._weight(name) is None else None

    def float_codes(self, name: str) -> FloatCodes | None:
        """Views of the stored codes and block scales, if it is FP8 with one scale, or NVFP4."""
        weight = self._weight(name)
        if weight is None or weight.scheme not in (FP8, NVFP4):
            return None
        codes = self._source.raw(weight.codes)
        if weight.scheme == FP8:
            steps = self._scales(weight.scales)
            made: FloatCodes = Fp8Weight(codes, float(steps.item()))
        else:
            second = float(self._scales(weight.second).item())
            blocks = self._block_scales(weight, slice(None))
            made = Nvfp4Weight(codes, blocks, 1 / second if weight.divides else second)
            peak = blocks.view(np.uint8).max(initial=0, keepdims=True).view(blocks.dtype)
            steps = self._nvfp4_steps(weight, peak)
        if made.scale > _FLOAT32_MAX:
            raise self._too_large(weight)
        if not _fits(weight, steps):  # then the codes tell, as in `read`
            for rows in row_pieces(*weight.shape):
                self._values(weight, rows)
        return made

    def _weight(self, name: str) -> _Weight | None:
        if name not in self._listed:
            raise missing(self.path, name)
        return self._weights.get(name)

    def _values(self, weight: _Weight, rows: slice) -> FloatArray:
        """Some rows of a weight, one step per block. Whoever reads checks that codes are numbers.

        Raises `BadTensor` for values that float32 does not have.
        """
        codes = self._source.raw(weight.codes)[rows]
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            if weight.scheme == NVFP4:
                values = fp4_values(codes)
                steps = self._nvfp4_steps(weight, self._block_scales(weight, rows))
            else:
                values = fp8_values(codes)
                num_columns = -(-weight.shape[1] // weight.block[1])
                grid = self._scales(weight.scales).reshape(-1, num_columns)
                steps = grid[np.arange(rows.start, rows.stop) // weight.block[0]]
            width = weight.block[1]
            whole = weight.shape[1] // width
            blocks = values[:, : whole * width].reshape(len(values), whole, width)  # a view
            blocks *= steps[:, :whole, None]
            values[:, whole * width :] *= steps[:, whole:]  # what is left of a block
        if not _fits(weight, steps) and (np.isinf(steps).any() or np.isinf(values).any()):
            raise self._too_large(weight)
        return values

    def _nvfp4_steps(self, weight: _Weight, scales: npt.NDArray[Any]) -> FloatArray:
        """Block scales times the second one; infinite where float32 ends."""
        second = np.float32(self._scales(weight.second).item())
        wide = fp8_values(scales)
        with np.errstate(over="ignore", under="ignore"):
            # In the order in which those who write such files multiply or divide.
            return np.asarray(wide / second if weight.divides else wide * second)

    def _scales(self, name: str) -> FloatArray:
        """Scales as float32. Raises `BadTensor` for one that is none."""
        scales = self._source.read(name)
        good = np.isfinite(scales) & (scales > 0)
        if not good.all():
            raise self._bad_scale(name, float(scales[~good].flat[0]))
        return scales

    def _block_scales(self, weight: _Weight, rows: slice) -> npt.NDArray[Any]:
        """NVFP4's scales of blocks [rows, in / 16] as stored.

        Zero is one of them: a block that is tiny beside the tensor's largest weight.
        """
        scales = self._source.raw(weight.scales)[rows]
        worst = scales.view(np.uint8).max(initial=0)
        if worst > _E4M3_MAX_BITS:
            value = float(np.array(worst, np.uint8).view(scales.dtype).astype(np.float32))
            raise self._bad_scale(weight.scales, value)
        return scales

    def _too_large(self, weight: _Weight) -> BadTensor:
        scales = self._scales(name := weight.second or weight.scales)
        worst = float(scales.min() if weight.divides else scales.max())
        return self._bad_scale(name, worst, ", which makes weights infinite")

    def _bad_scale(self, name: str, value: float, why: str = "") -> BadTensor:
        return BadTensor(
            f"{self._source.info(name).file}: tensor {shown(name)} holds a scale of {value:g}{why}",
            "scales are finite and above zero: download the file again",
        )


def _fits(weight: _Weight, steps: FloatArray) -> bool:
    """Whether float32 has the product of these steps and any code."""
    largest = np.float32(FP4_MAX if weight.scheme == NVFP4 else FP8_MAX)
    with np.errstate(over="ignore"):
        return bool(np.isfinite(steps.max(initial=0) * largest))


def _find_fp8(
    source: TensorSource, names: set[str], name: str, quantization: Quantization
) -> _Weight:
    """An FP8 weight and its scales, whose shape tells how many weights share one."""
    shape, stem = _matrix(source, name), name.rpartition(".")[0]
    stated = [scheme for scheme in (FP8, FP8_CHANNEL, FP8_BLOCK) if scheme in quantization.schemes]
    if not stated:
        raise _contradiction(source, name, "FP8", quantization)
    found = [f"{stem}.{leaf}" for leaf in ("weight_scale", "weight_scale_inv")]
    present = [scales for scales in found if scales in names]
    if not present:
        raise missing(source.path, found[stated == [FP8_BLOCK]])
    if len(present) > 1:
        raise _both(source, *present)
    (scales,) = present
    _check_type(source, scales, _SCALE_TYPES)
    dims = source.info(scales).shape
    if len(dims) <= 2 and math.prod(dims) == 1:  # also where a block holds the whole weight
        return _Weight(FP8, shape, shape, name, scales)
    if FP8_CHANNEL in stated and dims in ((shape[0],), (shape[0], 1)):
        return _Weight(FP8_CHANNEL, shape, (1, shape[1]), name, scales)
    block = quantization.block
    if block is not None and dims == tuple(-(-n // b) for n, b in zip(shape, block, strict=True)):
        return _Weight(FP8_BLOCK, shape, block, name, scales)
    raise BadTensor(
        f"{source.info(scales).file}: tensor {shown(scales)} has shape {list(dims)}, which for a "
        f"weight of shape {list(shape)} is not {quantization.words}, as {quantization.place} says"
    )


def _find_nvfp4(
    source: TensorSource, names: set[str], name: str, quantization: Quantization
) -> _Weight:
    """An NVFP4 weight: a scale per 16 inputs, and one for all that multiplies or divides."""
    stem, _, leaf = name.rpartition(".")
    if NVFP4 not in quantization.schemes:
        raise _contradiction(source, name, "packed in bytes", quantization)
    divides = leaf == "weight_packed"
    scales = f"{stem}.weight_scale"
    second = f"{stem}.{'weight_global_scale' if divides else 'weight_scale_2'}"
    for needed in (scales, second):
        if needed not in names:
            raise missing(source.path, needed)
    _check_type(source, scales, ("F8_E4M3",))
    _check_type(source, second, _SCALE_TYPES)
    rows, width = _matrix(source, name)
    shape, blocks = (rows, 2 * width), (rows, 2 * width // FP4_BLOCK)
    for tensor, good in (
        (name, shape[1] % FP4_BLOCK == 0),
        (scales, source.info(scales).shape == blocks),
        (second, math.prod(source.info(second).shape) == 1),
    ):
        if not good:
            raise BadTensor(
                f"{source.info(tensor).file}: tensor {shown(tensor)} has shape "
                f"{list(source.info(tensor).shape)}, which is not NVFP4's for {list(shape)} weights"
            )
    return _Weight(NVFP4, shape, (1, FP4_BLOCK), name, scales, second, divides)


def _matrix(source: TensorSource, name: str) -> tuple[int, int]:
    shape = source.info(name).shape
    if len(shape) != 2:
        raise BadTensor(
            f"{source.info(name).file}: tensor {shown(name)} is quantized and has shape "
            f"{list(shape)}, expected two axes"
        )
    return shape[0], shape[1]


def _check_type(source: TensorSource, name: str, types: tuple[str, ...]) -> None:
    info = source.info(name)
    if info.dtype not in types:
        raise BadTensor(
            f"{info.file}: tensor {shown(name)} has type {info.dtype}, expected {', '.join(types)}",
            UNQUANTIZED,
        )


def _contradiction(
    source: TensorSource, name: str, what: str, quantization: Quantization
) -> BadTensor:
    return BadTensor(
        f"{source.info(name).file}: tensor {shown(name)} is {what}, but {quantization.place} says "
        f"{quantization.words}",
        "the folder mixes files of two checkpoints: download it again",
    )


def _both(source: TensorSource, one: str, other: str) -> BadTensor:
    return BadTensor(f"{source.info(one).file}: has both {shown(one)} and {shown(other)}")


def _check_orphans(source: TensorSource, names: list[str]) -> None:
    """Refuse scales whose weight is not there or not quantized."""
    for name in names:
        stem, _, leaf = name.rpartition(".")
        if leaf not in ("weight_scale", "weight_scale_inv", *_INPUT_SCALES):
            continue
        weight = f"{stem}.weight"
        if weight not in names:
            raise missing(source.path, weight)
        info = source.info(weight)
        raise BadTensor(
            f"{info.file}: tensor {shown(weight)} has type {info.dtype}, although "
            f"{shown(name)} is there",
            "the folder mixes files of two checkpoints: download it again",
        )
