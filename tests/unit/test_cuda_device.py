"""What `CudaDevice` makes of CUDA's answers; a stand-in gives them."""

from __future__ import annotations

import gc
from typing import Any

import pytest
from cuda.bindings import runtime as cuda_runtime

from dflash_trt.errors import GpuError, GpuMemoryError
from dflash_trt.runtime.cuda import CudaDevice

Status = cuda_runtime.cudaError_t


class Runtime:
    """cuda-bindings' names and enums; every function answers with `status` and some handle."""

    def __init__(self) -> None:
        self.status: dict[str, Status] = {}

    def __getattr__(self, name: str) -> Any:
        real = getattr(cuda_runtime, name)
        if isinstance(real, type) or name == "cudaGetErrorString":
            return real

        def function(*_: Any) -> tuple[Any, ...]:
            status = self.status.get(name, Status.cudaSuccess)
            return (status, 5) if name in ("cudaMalloc", "cudaStreamEndCapture") else (status,)

        function.__name__ = name
        self.__dict__[name] = function
        return function


@pytest.fixture
def runtime() -> Runtime:
    return Runtime()


@pytest.fixture
def device(runtime: Runtime) -> CudaDevice:
    made = CudaDevice.__new__(CudaDevice)
    made._cuda, made._stream = runtime, 7
    return made


def test_memory_that_is_not_there_is_said_in_bytes(device: CudaDevice, runtime: Runtime) -> None:
    runtime.status["cudaMalloc"] = Status.cudaErrorMemoryAllocation
    with pytest.raises(GpuMemoryError, match=r"out of memory for 12,345 bytes: cudaMalloc"):
        device.allocate(12_345)


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("cudaGraphLaunch", lambda device: device.launch(object())),
        ("cudaGraphExecDestroy", lambda device: device.destroy(object())),
        ("cudaStreamSynchronize", lambda device: device.synchronize()),
        ("cudaMemsetAsync", lambda device: device.clear(4096, 8)),
    ],
)
def test_other_calls_may_lack_memory_too(
    name: str, call: Any, device: CudaDevice, runtime: Runtime
) -> None:
    runtime.status[name] = Status.cudaErrorMemoryAllocation
    with pytest.raises(GpuMemoryError, match=f"the GPU is out of memory: {name}"):
        call(device)
    runtime.status[name] = Status.cudaErrorIllegalAddress
    with pytest.raises(GpuError, match=rf"{name}: .* \(cudaErrorIllegalAddress\)"):
        call(device)


def test_a_graph_that_does_not_fit_is_none(device: CudaDevice, runtime: Runtime) -> None:
    runtime.status["cudaGraphInstantiate"] = Status.cudaErrorMemoryAllocation
    assert device.capture(lambda: None) is None


@pytest.mark.parametrize("is_on", [True, False])
def test_nothing_is_collected_while_the_stream_is_captured(
    is_on: bool, device: CudaDevice, runtime: Runtime
) -> None:
    seen = []

    def work() -> None:
        seen.append(gc.isenabled())
        raise GpuError("no")

    (gc.enable if is_on else gc.disable)()
    try:
        assert device.capture(work) is None
        assert gc.isenabled() is is_on
    finally:
        gc.enable()
    assert seen == [False]
