"""Weights in blocks of 4 or 8 bits along the input axis, and their round-to-nearest quantizer.

Layout: ONNX Runtime's MatMulNBits. value = scale * (code - 2^(bits-1)) + offset.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dflash_trt.quantize.pieces import row_pieces

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]

BLOCK_SIZE = 32
# Shrinking the scale clips the block's largest weight but rounds all others finer.
_SCALE_CANDIDATES = (1.0, 0.96, 0.92, 0.88)


@dataclass(frozen=True)
class Blocks:
    """One weight [out, in] in blocks of `BLOCK_SIZE` inputs."""

    bits: int
    codes: U8  # [out, blocks, BLOCK_SIZE * bits / 8]; 4 bits: low nibble is the even element
    scales: F32  # [out, blocks]
    offsets: F32 | None  # [out, blocks]; None where zero everywhere

    def dequantize(self) -> F32:
        """The weight [out, in] as float32."""
        if self.bits == 4:
            pairs = np.stack([self.codes & 15, self.codes >> 4], axis=-1)
            codes: U8 = pairs.reshape(*self.codes.shape[:2], BLOCK_SIZE)
        else:
            codes = self.codes
        centred = codes.astype(np.float32) - np.float32(2 ** (self.bits - 1))
        values = centred * self.scales[..., None]
        if self.offsets is not None:
            values = values + self.offsets[..., None]
        return values.reshape(codes.shape[0], -1)


def quantize(weight: F32, bits: int) -> Blocks:
    """`quantize_rows` in pieces, so that its intermediates stay small beside the weight."""
    return stack([quantize_rows(weight[rows], bits) for rows in row_pieces(*weight.shape)])


def quantize_rows(weight: F32, bits: int) -> Blocks:
    """Round-to-nearest blocks of weight [out, in]; `in` must be a multiple of `BLOCK_SIZE`.

    4 bits: the scale maps the block's largest weight to code 0 (-8), as GGUF's Q4_0 does, then
    the candidate of least squared error is kept. 8 bits: symmetric, largest magnitude to 127.
    """
    blocks = weight.reshape(weight.shape[0], -1, BLOCK_SIZE)
    peak = np.take_along_axis(blocks, np.abs(blocks).argmax(-1)[..., None], axis=-1)[..., 0]
    if bits == 8:
        scales = (np.abs(peak) / np.float32(127)).astype(np.float32)
        return Blocks(8, _codes(blocks, scales, 8), scales, None)
    best_scales = np.zeros(blocks.shape[:2], np.float32)
    best_error = np.full(blocks.shape[:2], np.inf, np.float32)
    for factor in _SCALE_CANDIDATES:
        scales = (peak / np.float32(-8) * np.float32(factor)).astype(np.float32)
        centred = _codes(blocks, scales, 4).astype(np.float32) - np.float32(8)
        error = np.square(centred * scales[..., None] - blocks).sum(-1)
        better = error < best_error
        best_scales = np.where(better, scales, best_scales)
        best_error = np.where(better, error, best_error)
    codes = _codes(blocks, best_scales, 4)
    packed: U8 = np.bitwise_or(codes[..., ::2], codes[..., 1::2] * np.uint8(16))
    return Blocks(4, packed, best_scales, None)


def stack(parts: list[Blocks]) -> Blocks:
    """Weights of one bit width with the same inputs, outputs stacked."""
    offsets = None
    if any(part.offsets is not None for part in parts):
        filled = [np.zeros_like(p.scales) if p.offsets is None else p.offsets for p in parts]
        offsets = np.concatenate(filled)
    return Blocks(
        bits=parts[0].bits,
        codes=np.concatenate([part.codes for part in parts]),
        scales=np.concatenate([part.scales for part in parts]),
        offsets=offsets,
    )


def _codes(blocks: F32, scales: F32, bits: int) -> U8:
    half = 2 ** (bits - 1)
    inverse = np.divide(1.0, scales, out=np.zeros_like(scales), where=scales != 0)
    codes = np.rint(blocks * inverse[..., None]) + half
    limited: U8 = np.clip(codes, 0, 2 * half - 1).astype(np.uint8)
    return limited
