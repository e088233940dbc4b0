"""CUDA's runtime, and the GPU of this process: the first that CUDA sees (CUDA_VISIBLE_DEVICES)."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from dflash_trt.errors import GpuError, GpuMemoryError, MissingPackage


@dataclass(frozen=True)
class Gpu:
    """What a GPU says of itself."""

    capability: tuple[int, int]  # compute capability
    name: str
    uuid: str  # of this very GPU: letters and digits


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Python collects no garbage meanwhile: what it frees may call CUDA or TensorRT."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def load_runtime() -> Any:
    """The module of CUDA's runtime. Raises `MissingPackage` without cuda-python's bindings."""
    try:
        from cuda.bindings import runtime
    except ImportError as error:
        raise MissingPackage(
            f"engines for GPUs need the package cuda-bindings: {error}",
            hint="pip install cuda-bindings",
        ) from error
    return runtime


def first_gpu(runtime: Any) -> Gpu:
    """The GPU that this process uses from now on. Raises `GpuError` where none is usable."""
    try:
        call(runtime, runtime.cudaSetDevice, 0)
    except GpuError as error:
        raise GpuError(
            f"no GPU can be used: {error.message}",
            hint="dflash-trt doctor says what is missing",
        ) from error
    properties = call(runtime, runtime.cudaGetDeviceProperties, 0)
    return Gpu(
        (int(properties.major), int(properties.minor)),
        bytes(properties.name).rstrip(b"\0").decode(errors="replace"),
        bytes(properties.uuid.bytes)[:16].hex(),
    )


def call(runtime: Any, function: Callable[..., Any], *arguments: Any) -> Any:
    """The values that a CUDA function gives besides its status: none, one or a tuple.

    Raises `GpuError` with the reason, `GpuMemoryError` where memory is what lacks.
    """
    status, *values = function(*arguments)
    if int(status) == 0:
        return values[0] if len(values) == 1 else tuple(values)
    message = reason(runtime, function, status)
    if status == runtime.cudaError_t.cudaErrorMemoryAllocation:
        takes_size = function in (runtime.cudaMalloc, runtime.cudaHostAlloc)
        asked = f" for {arguments[0]:,} bytes" if takes_size else ""
        raise GpuMemoryError(f"the GPU is out of memory{asked}: {message}")
    raise GpuError(message)


def reason(runtime: Any, function: Callable[..., Any], status: Any) -> str:
    """Why a CUDA function failed, in one line."""
    _, text = runtime.cudaGetErrorString(status)
    told = text.decode(errors="replace") if isinstance(text, bytes) else str(text)
    return f"{function.__name__}: {told} ({getattr(status, 'name', status)})"
