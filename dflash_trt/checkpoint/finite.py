"""Refuses weights that are not numbers: one of them spoils every text, and a whole scale."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from dflash_trt.checkpoint.tensors import TensorInfo, shown
from dflash_trt.errors import BadTensor

PIECE_VALUES = 1 << 20  # intermediates stay in the processor's cache


def check_finite(array: npt.NDArray[Any], info: TensorInfo) -> None:
    """Refuse NaN and infinity in floating-point values. Raises `BadTensor` naming the tensor."""
    # In all types exactly these have every bit of the exponent set. Comparing bits is several
    # times faster than `isfinite`, which has no fast form for the 16-bit types.
    infinity = np.array(np.inf, array.dtype)
    unsigned = f"u{array.dtype.itemsize}"
    exponent, bits = infinity.view(unsigned), array.reshape(-1).view(unsigned)
    for start in range(0, len(bits), PIECE_VALUES):
        if ((bits[start : start + PIECE_VALUES] & exponent) == exponent).any():
            raise BadTensor(f"{info.file}: tensor {shown(info.name)} holds NaN or infinite values")
