"""What the KV-injection kernel must compute, to the bit, in NumPy and ml_dtypes.

Written from the interface (`plugins/src/kv_inject.h`) and the order of its float32 operations,
which is part of the contract: squares of a lane's eight low elements in turn, its eight high ones
likewise, their sum, then lanes 1, 2, 4, .. apart.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

from kv import interface as kv
from kv.case import TYPES, Arrays, Case

F32 = np.float32
SIXTH = F32(1) / F32(6)


def inject(case: Case, arrays: Arrays) -> None:
    """Update the caches in `arrays`."""
    with np.errstate(all="ignore"):
        for slot, (length, committed) in enumerate(zip(case.length, case.committed, strict=True)):
            if not 0 <= committed <= case.context_rows:
                continue
            rows = list(arrays["context"][slot, :committed]) + list(arrays["block"][slot])
            for position, row in enumerate(rows, length):
                if 0 <= position < case.positions and (case.ring or position < case.capacity):
                    _write(case, arrays, slot, position, row)


def _write(case: Case, arrays: Arrays, slot: int, position: int, row: np.ndarray) -> None:
    heads, dim = case.heads, case.head_dim
    lines = row[: 2 * case.layers * heads * dim].reshape(2 * case.layers, heads, dim)
    at = position % case.capacity if case.ring else position
    for pair, line in enumerate(lines):
        x = line.astype(F32)
        if pair % 2 == 0:
            if case.norm:
                x = rms_norm(x, arrays[f"k_norm.{pair // 2}"], F32(case.eps))
            x = rope(x, arrays["cos"][position], arrays["sin"][position])
        cache = arrays[f"cache.{pair}"][slot, :, at]
        if case.quant == kv.NONE:
            stored = rounded(x, case.type) if pair % 2 == 0 else line
            cache[...] = np.ascontiguousarray(stored).view(np.uint8)
        elif case.quant == kv.FP8:
            cache[...] = e4m3(x * (F32(1) / arrays["scale"][pair]))
        else:
            cache[...], arrays[f"cache_scale.{pair}"][slot, :, at] = nvfp4(x, arrays["scale"][pair])


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: np.float32) -> np.ndarray:
    """Over the last axis of x [N, D]."""
    heads, dim = x.shape
    squares = (x * x).reshape(heads, 2, dim // 16, 8)
    sums = squares[..., 0]
    for i in range(1, 8):
        sums = sums + squares[..., i]
    lanes = sums[:, 0] + sums[:, 1]  # [N, lanes]
    step = 1
    while step < lanes.shape[1]:
        lanes = lanes + lanes[:, np.arange(lanes.shape[1]) ^ step]
        step *= 2
    mean = lanes[:, :1] * F32(1 / dim)
    return x * (F32(1) / np.sqrt(mean + eps)) * weight


def rope(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """Half-split layout."""
    low, high = np.split(x, 2, axis=-1)
    return np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)


def rounded(x: np.ndarray, type_: int) -> np.ndarray:
    """To the 16-bit type; every NaN becomes 0x7fff, as the hardware's."""
    bits = x.astype(TYPES[type_]).view(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FFF), bits).view(TYPES[type_])


def e4m3(x: np.ndarray) -> np.ndarray:
    """Saturating; NaN is 0x7f."""
    codes = np.clip(x, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    return np.where(np.isnan(x), np.uint8(0x7F), codes)


def e2m1(x: np.ndarray) -> np.ndarray:
    """Saturating; NaN is +6 (0x7): the format has none."""
    codes = np.clip(np.nan_to_num(x, nan=6.0), -6, 6).astype(ml_dtypes.float4_e2m1fn)
    return codes.view(np.uint8) & 0xF


def nvfp4(x: np.ndarray, scale: np.float32) -> tuple[np.ndarray, np.ndarray]:
    """Packed elements [N, D / 2] and block scales [N, D / 16] of x [N, D]."""
    blocks = x.reshape(len(x), -1, 16)
    largest = np.fmax.reduce(np.abs(blocks), axis=-1)
    wanted = largest * SIXTH * (F32(1) / scale)
    codes = e4m3(wanted)
    unit = codes.view(ml_dtypes.float8_e4m3fn).astype(F32) * scale
    factor = np.where(unit >= np.finfo(F32).tiny, F32(1) / unit, F32(0))
    nibbles = e2m1(blocks * factor[..., None]).reshape(len(x), -1, 2)
    return nibbles[..., 0] | nibbles[..., 1] << 4, codes
