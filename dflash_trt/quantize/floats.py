"""Weights in FP8 and NVFP4, and their round-to-nearest quantizers.

Scales of whole tensors are powers of two: exact in every compute type, and a floating-point code
loses nothing by them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from dflash_trt.quantize.pieces import row_pieces

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]
Array = npt.NDArray[Any]

FP8_MAX = 448.0  # largest E4M3
FP4_MAX = 6.0  # largest E2M1
FP4_BLOCK = 16  # values that share a scale
MIN_SCALE = 2.0**-14  # smallest normal FP16: a scale is stored in the compute type
# Halfway points between the magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6 of E2M1.
_FP4_MIDPOINTS = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], np.float32)
_FP4_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_FP4_SIGNED = np.concatenate([_FP4_VALUES, -_FP4_VALUES])
# The two values of a byte: the low nibble is the first.
_FP4_PAIRS = np.stack([np.tile(_FP4_SIGNED, 16), np.repeat(_FP4_SIGNED, 16)], axis=-1)


@dataclass(frozen=True)
class Fp8Weight:
    """One weight [out, in]: value = code * scale."""

    codes: Array  # float8_e4m3fn [out, in]
    scale: float

    def dequantize(self) -> F32:
        """The weight as float32."""
        return fp8_values(self.codes) * np.float32(self.scale)


@dataclass(frozen=True)
class Nvfp4Weight:
    """One weight [out, in]: value = code * block scale * scale, in blocks of 16 inputs."""

    codes: U8  # [out, in / 2]: two E2M1 codes a byte, the low nibble is the even input
    block_scales: Array  # float8_e4m3fn [out, in / 16]
    scale: float

    def dequantize(self) -> F32:
        """The weight as float32."""
        values = fp4_values(self.codes)
        scales = fp8_values(self.block_scales) * np.float32(self.scale)
        blocks = values.reshape(len(values), -1, FP4_BLOCK)
        return np.asarray(blocks * scales[..., None], np.float32).reshape(values.shape)


FloatCodes = Fp8Weight | Nvfp4Weight


def fp8_values(codes: Array) -> F32:
    """What float8_e4m3fn codes stand for, as float32 of the same shape."""
    return np.asarray(codes.astype(np.float32))


def fp4_values(codes: U8) -> F32:
    """What E2M1 codes [out, in / 2], two a byte, stand for: float32 [out, in]."""
    return np.take(_FP4_PAIRS, codes, axis=0).reshape(len(codes), 2 * codes.shape[1])


def quantize_fp8(weight: F32) -> Fp8Weight:
    """FP8 (E4M3) with one scale; no weight is clipped."""
    scale = _scale_above(_peak(weight) / FP8_MAX)
    codes = np.empty(weight.shape, ml_dtypes.float8_e4m3fn)
    for rows in row_pieces(*weight.shape):
        codes[rows] = (weight[rows] * np.float32(1 / scale)).astype(codes.dtype)
    return Fp8Weight(codes, scale)


def quantize_nvfp4(weight: F32) -> Nvfp4Weight:
    """NVFP4: each block's scale maps its largest weight to 6; `in` must be a multiple of 16."""
    num_rows, width = weight.shape
    scale = _scale_above(_peak(weight) / (FP4_MAX * FP8_MAX))
    codes = np.empty((num_rows, width // 2), np.uint8)
    block_scales = np.empty((num_rows, width // FP4_BLOCK), ml_dtypes.float8_e4m3fn)
    for rows in row_pieces(*weight.shape):
        blocks = weight[rows].reshape(-1, width // FP4_BLOCK, FP4_BLOCK)
        peaks = np.abs(blocks).max(-1) * np.float32(1 / (FP4_MAX * scale))
        block_scales[rows] = peaks.astype(block_scales.dtype)
        steps = block_scales[rows].astype(np.float32) * np.float32(scale)
        inverse = np.divide(1.0, steps, out=np.zeros_like(steps), where=steps != 0)
        codes[rows] = _pack(_fp4_codes(blocks * inverse[..., None])).reshape(-1, width // 2)
    return Nvfp4Weight(codes, block_scales, scale)


def _fp4_codes(values: F32) -> U8:
    """E2M1 codes, nearest, ties to the even code, saturating."""
    size = np.abs(values)
    codes = np.zeros(values.shape, np.uint8)
    for code, midpoint in enumerate(_FP4_MIDPOINTS):
        # Between codes c and c + 1 a tie goes to the even one.
        codes += size >= midpoint if code % 2 else size > midpoint
    codes |= np.signbit(values).astype(np.uint8) << np.uint8(3)
    return codes


def _pack(codes: U8) -> U8:
    packed: U8 = codes[..., ::2] | codes[..., 1::2] << np.uint8(4)
    return packed


def _scale_above(least: float) -> float:
    """The smallest scale that is a power of two and at least `least`."""
    return max(MIN_SCALE, 2.0 ** math.ceil(math.log2(least))) if least > 0 else MIN_SCALE


def _peak(weight: F32) -> float:
    return max(
        (float(np.abs(weight[rows]).max(initial=0)) for rows in row_pieces(*weight.shape)),
        default=0,
    )
