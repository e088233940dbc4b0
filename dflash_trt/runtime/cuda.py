"""CUDA, as little of it as a session needs: memory, copies, one stream, graphs of that stream.

`Cuda` is what the session is written against; tests put a stand-in there. Whatever is put on the
stream runs in order, later; only `synchronize` waits.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from dflash_trt import gpu
from dflash_trt.errors import GpuError

Bytes = npt.NDArray[np.uint8]
ALIGNMENT = 256  # of every device address that TensorRT is given

log = logging.getLogger(__name__)


class CaptureRefused(Exception):
    """What ran while the stream was captured cannot be part of a graph."""


class Cuda(Protocol):
    """One GPU with one stream."""

    @property
    def capability(self) -> tuple[int, int]:
        """Compute capability."""

    @property
    def name(self) -> str:
        """What the GPU calls itself."""

    @property
    def uuid(self) -> str:
        """Of this very GPU: letters, digits and dashes."""

    @property
    def stream(self) -> int:
        """The stream's handle."""

    def memory(self) -> tuple[int, int]:
        """Bytes that are free, and bytes in all."""

    def allocate(self, num_bytes: int) -> int:
        """Address of new device memory, aligned to `ALIGNMENT`. Raises `GpuMemoryError`."""

    def free(self, address: int) -> None:
        """Give device memory back."""

    def pinned(self, num_bytes: int) -> Bytes:
        """New page-locked host memory, which copies need in order not to wait."""

    def free_pinned(self, memory: Bytes) -> None:
        """Give page-locked memory back."""

    def upload(self, address: int, source: npt.NDArray[Any]) -> None:
        """Put a copy host to device on the stream; `source` must stay until it has run."""

    def download(self, target: npt.NDArray[Any], address: int) -> None:
        """Put a copy device to host on the stream; `target` must stay until it has run."""

    def clear(self, address: int, num_bytes: int) -> None:
        """Put zeroing memory on the stream."""

    def synchronize(self) -> None:
        """Wait until all that is on the stream has run. Raises `GpuError` if some of it failed."""

    def capture(self, work: Callable[[], None]) -> object | None:
        """The graph of what `work` puts on the stream, which does not run; None if refused."""

    def launch(self, graph: object) -> None:
        """Put all of a graph on the stream."""

    def destroy(self, graph: object) -> None:
        """Give a graph back."""


class CudaDevice:
    """The process's GPU, through cuda-python."""

    def __init__(self) -> None:
        """Raises `MissingPackage` without cuda-python, `GpuError` without a usable GPU."""
        self._cuda: Any = gpu.load_runtime()
        self._gpu = gpu.first_gpu(self._cuda)
        self._stream = int(
            self._call(self._cuda.cudaStreamCreateWithFlags, self._cuda.cudaStreamNonBlocking)
        )

    @property
    def capability(self) -> tuple[int, int]:
        """See `Cuda`."""
        return self._gpu.capability

    @property
    def name(self) -> str:
        """See `Cuda`."""
        return self._gpu.name

    @property
    def uuid(self) -> str:
        """See `Cuda`."""
        return self._gpu.uuid

    @property
    def stream(self) -> int:
        """See `Cuda`."""
        return self._stream

    def memory(self) -> tuple[int, int]:
        """See `Cuda`."""
        free, total = self._call(self._cuda.cudaMemGetInfo)
        return int(free), int(total)

    def allocate(self, num_bytes: int) -> int:
        """See `Cuda`."""
        return int(self._call(self._cuda.cudaMalloc, num_bytes))

    def free(self, address: int) -> None:
        """See `Cuda`."""
        self._call(self._cuda.cudaFree, address)

    def pinned(self, num_bytes: int) -> Bytes:
        """See `Cuda`."""
        address = int(self._call(self._cuda.cudaHostAlloc, num_bytes, 0))
        return host_view(address, num_bytes)

    def free_pinned(self, memory: Bytes) -> None:
        """See `Cuda`."""
        self._call(self._cuda.cudaFreeHost, memory.ctypes.data)

    def upload(self, address: int, source: npt.NDArray[Any]) -> None:
        """See `Cuda`."""
        self._copy(address, source.ctypes.data, source.nbytes, "cudaMemcpyHostToDevice")

    def download(self, target: npt.NDArray[Any], address: int) -> None:
        """See `Cuda`."""
        self._copy(target.ctypes.data, address, target.nbytes, "cudaMemcpyDeviceToHost")

    def _copy(self, target: int, source: int, num_bytes: int, kind: str) -> None:
        way = getattr(self._cuda.cudaMemcpyKind, kind)
        self._call(self._cuda.cudaMemcpyAsync, target, source, num_bytes, way, self._stream)

    def clear(self, address: int, num_bytes: int) -> None:
        """See `Cuda`."""
        self._call(self._cuda.cudaMemsetAsync, address, 0, num_bytes, self._stream)

    def synchronize(self) -> None:
        """See `Cuda`."""
        self._call(self._cuda.cudaStreamSynchronize, self._stream)

    def capture(self, work: Callable[[], None]) -> object | None:
        """See `Cuda`."""
        cuda = self._cuda
        # Other threads of the process may allocate meanwhile: it does not concern this stream.
        mode = cuda.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        self._call(cuda.cudaStreamBeginCapture, self._stream, mode)
        reason = ""
        with gpu.no_collection():  # a capture of this thread refuses what it would call
            try:
                work()
            except (CaptureRefused, GpuError) as error:
                reason = str(error)
            finally:
                # The stream stays unusable until its capture is ended, whatever came of it.
                status, captured = cuda.cudaStreamEndCapture(self._stream)
        if not reason and int(status) != 0:
            reason = gpu.reason(cuda, cuda.cudaStreamEndCapture, status)
        try:
            if not reason:
                graph: object = self._call(cuda.cudaGraphInstantiate, captured, 0)
                return graph
        except GpuError as error:
            reason = error.message
        finally:
            if captured is not None and int(captured):
                cuda.cudaGraphDestroy(captured)
        cuda.cudaGetLastError()  # a refused capture must not look like a failed step
        log.warning("steps run without CUDA graphs: %s", reason)
        return None

    def launch(self, graph: object) -> None:
        """See `Cuda`."""
        self._call(self._cuda.cudaGraphLaunch, graph, self._stream)

    def destroy(self, graph: object) -> None:
        """See `Cuda`."""
        self._call(self._cuda.cudaGraphExecDestroy, graph)

    def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return gpu.call(self._cuda, function, *arguments)


def host_view(address: int, num_bytes: int) -> Bytes:
    """The bytes of host memory at an address, which the caller keeps alive."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * num_bytes).from_address(address))
