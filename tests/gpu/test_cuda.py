"""`CudaDevice` on a real GPU: what the stand-in of the other tests takes for granted."""

from __future__ import annotations

import numpy as np
import pytest

from dflash_trt.errors import GpuMemoryError
from dflash_trt.runtime.cuda import ALIGNMENT, CaptureRefused, CudaDevice
from dflash_trt.runtime.trt import DeviceMemory

pytestmark = pytest.mark.gpu
SIZE = 1000


def test_facts(cuda: CudaDevice) -> None:
    free, total = cuda.memory()
    assert 0 < free <= total
    assert cuda.capability >= (7, 5)
    assert len(cuda.uuid) == 32
    assert int(cuda.uuid, 16)
    assert cuda.name.startswith(("NVIDIA", "Tesla", "GeForce", "Quadro"))


def test_copies_and_clearing(cuda: CudaDevice) -> None:
    memory = DeviceMemory(cuda, SIZE)
    assert memory.address % ALIGNMENT == 0
    host = cuda.pinned(SIZE)
    host[...] = np.arange(SIZE, dtype=np.uint8)
    cuda.upload(memory.address, host)
    cuda.clear(memory.address + 10, 20)
    back = np.empty(SIZE, np.uint8)
    cuda.download(back, memory.address)
    cuda.synchronize()
    wanted = host.copy()
    wanted[10:30] = 0
    np.testing.assert_array_equal(back, wanted)
    cuda.free_pinned(host)


def test_a_graph_copies_what_is_there_when_it_runs(cuda: CudaDevice) -> None:
    memory = DeviceMemory(cuda, SIZE)
    source, target = cuda.pinned(SIZE), cuda.pinned(SIZE)
    target[...] = 7

    def work() -> None:
        cuda.upload(memory.address, source)
        cuda.download(target, memory.address)

    graph = cuda.capture(work)
    assert graph is not None
    cuda.synchronize()
    assert (target == 7).all()  # capturing runs nothing
    for value in (3, 4):
        source[...] = value
        cuda.launch(graph)
        cuda.synchronize()
        assert (target == value).all()
    cuda.destroy(graph)


@pytest.mark.parametrize("how", ["it waits", "it refuses"])
def test_a_refused_capture_leaves_the_stream_usable(cuda: CudaDevice, how: str) -> None:
    def work() -> None:
        if how == "it refuses":
            raise CaptureRefused("no")
        cuda.synchronize()

    assert cuda.capture(work) is None
    test_copies_and_clearing(cuda)


def test_more_memory_than_there_is(cuda: CudaDevice) -> None:
    with pytest.raises(GpuMemoryError, match="out of memory"):
        cuda.allocate(1 << 50)
    test_copies_and_clearing(cuda)
