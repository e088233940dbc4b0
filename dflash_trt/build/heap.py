"""How this process's heap treats large blocks while TensorRT builds."""

from __future__ import annotations

import ctypes

_M_MMAP_THRESHOLD = -3  # malloc.h
_LEAST_MAPPED = 128 * 1024  # bytes; what glibc starts with


def return_large_blocks() -> None:
    """From here on a large block that is freed goes back to the system at once.

    glibc's malloc does so from 128 KiB at first, but raises that limit to the size of each block
    that is freed, up to 32 MiB; from then on such blocks stay with the heap. TensorRT copies every
    constant of a network more than once, and most are below 32 MiB: docs/tensorrt.md has what that
    costs. A limit that was set stays (mallopt(3)). Another C library than glibc is left alone.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LEAST_MAPPED)
