"""`plugins/src/kv_inject.h` for ctypes."""

from __future__ import annotations

import ctypes as c
from pathlib import Path

MAX_LAYERS = 16
BF16, FP16 = 0, 1
NONE, FP8, NVFP4 = 0, 1, 2
SUCCESS, INVALID_VALUE = 0, 1

_SIZES = (
    "slots", "context_rows", "block_rows", "num_layers", "num_kv_heads", "head_dim", "capacity",
    "num_positions", "type", "quant", "ring",
)  # fmt: skip
_PAIRS = c.c_void_p * (2 * MAX_LAYERS)


class Launch(c.Structure):
    """struct DflashKvInject."""

    _fields_ = [
        *((name, c.c_int32) for name in _SIZES),
        ("eps", c.c_float),
        ("context_stride", c.c_int64),
        ("block_stride", c.c_int64),
        *((name, c.c_void_p) for name in ("length", "committed", "cos", "sin", "scale")),
        ("k_norm", c.c_void_p * MAX_LAYERS),
        *((name, _PAIRS) for name in ("context", "block", "cache", "cache_scale")),
    ]


def load(library: Path) -> c.CDLL:
    """The kernel library with the types of its two functions."""
    loaded = c.CDLL(str(library))
    loaded.dflash_kv_inject.argtypes = [c.POINTER(Launch), c.c_void_p]
    loaded.dflash_kv_inject.restype = c.c_int
    loaded.dflash_kv_inject_check.argtypes = [c.POINTER(Launch)]
    loaded.dflash_kv_inject_check.restype = c.c_char_p
    return loaded
