"""A GPU and an engine that are not there: the session's own code runs whole generations on them.

Device memory is host memory whose addresses only the stand-in may use. The stream is a queue: what
is put on it runs at `synchronize`, so that a host buffer that is read too early or written too
early is seen. Whatever CUDA or TensorRT forbid is an assertion here.
"""

from __future__ import annotations

import ctypes
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from dflash_trt import contract as c
from dflash_trt.config import PairConfig
from dflash_trt.errors import GpuError, GpuMemoryError
from dflash_trt.runtime.cuda import ALIGNMENT, Bytes, CaptureRefused, host_view
from dflash_trt.runtime.session import SessionLimits
from dflash_trt.runtime.trt_engine import Shape, TensorInfo

Array = npt.NDArray[Any]
Arrays = dict[str, Array]
Work = Callable[[], None]

# Inputs with a line for each special slot; there may be none.
SPECIAL_LINES = frozenset(c.INPUTS[c.INPUTS.index(c.SPECIAL_SLOTS) :]) - {c.CHOICE_SOURCE}
GUARD = 4096
UNSET = 0xFF  # NaN in every floating type: memory that nobody wrote must not matter
GUARD_BYTE = 0xA5


@dataclass
class Block:
    """One allocation, between guard bytes."""

    whole: Bytes
    start: int
    num_bytes: int

    def check(self) -> None:
        offset = self.start - self.whole.ctypes.data
        assert (self.whole[:offset] == GUARD_BYTE).all(), "a write in front of an allocation"
        assert (self.whole[offset + self.num_bytes :] == GUARD_BYTE).all(), "a write past its end"


class FakeCuda:
    """See `dflash_trt.runtime.cuda.Cuda`."""

    def __init__(self, total: int = 1 << 30, *, refuses_capture: bool = False) -> None:
        self.capability, self.name, self.uuid, self.stream = (12, 0), "NVIDIA stand-in", "1" * 32, 7
        self.total = total
        self.refuses_capture = refuses_capture
        self.fails_next = ""  # what the next synchronize reports
        self.blocks: dict[int, Block] = {}
        self.pinned_blocks: dict[int, Bytes] = {}
        self.graphs: list[list[Work]] = []
        self.num_launches = 0
        self._queue: deque[Work] = deque()
        self._capturing: list[Work] | None = None

    def memory(self) -> tuple[int, int]:
        return self.total - sum(block.num_bytes for block in self.blocks.values()), self.total

    def allocate(self, num_bytes: int) -> int:
        assert num_bytes > 0
        assert self._capturing is None, "memory is allocated while the stream is captured"
        if num_bytes > self.memory()[0]:
            raise GpuMemoryError(f"the GPU is out of memory for {num_bytes:,} bytes")
        whole = np.full(num_bytes + 2 * GUARD + ALIGNMENT, GUARD_BYTE, np.uint8)
        start = -(-(whole.ctypes.data + GUARD) // ALIGNMENT) * ALIGNMENT
        self.blocks[start] = Block(whole, start, num_bytes)
        host_view(start, num_bytes)[...] = UNSET
        return start

    def free(self, address: int) -> None:
        self._drain()  # cudaFree waits for what is on the stream, which may use the memory
        self.blocks.pop(address).check()

    def pinned(self, num_bytes: int) -> Bytes:
        memory = np.full(num_bytes, UNSET, np.uint8)
        self.pinned_blocks[memory.ctypes.data] = memory
        return memory

    def free_pinned(self, memory: Bytes) -> None:
        self._drain()  # as above
        del self.pinned_blocks[memory.ctypes.data]

    def upload(self, address: int, source: Array) -> None:
        self.check_range(address, source.nbytes)
        if self._capturing is not None:
            assert source.ctypes.data in self.pinned_blocks, "a graph copies from pageable memory"
        self.put(lambda: self._move(address, source.ctypes.data, source.nbytes))

    def download(self, target: Array, address: int) -> None:
        self.check_range(address, target.nbytes)
        self.put(lambda: self._move(target.ctypes.data, address, target.nbytes))

    def _move(self, target: int, source: int, num_bytes: int) -> None:
        ctypes.memmove(target, source, num_bytes)

    def clear(self, address: int, num_bytes: int) -> None:
        self.check_range(address, num_bytes)
        self.put(lambda: host_view(address, num_bytes).fill(0))

    def put(self, work: Work) -> None:
        """Put work on the stream."""
        (self._queue if self._capturing is None else self._capturing).append(work)

    def synchronize(self) -> None:
        if self._capturing is not None:
            raise GpuError("the host waits while the stream is captured")
        if self.fails_next:
            reason, self.fails_next = self.fails_next, ""
            self._queue.clear()
            raise GpuError(reason)
        self._drain()
        for block in self.blocks.values():
            block.check()

    def _drain(self) -> None:
        """Run what is on the stream; what follows an error never runs."""
        try:
            while self._queue:
                self._queue.popleft()()
        except BaseException:
            self._queue.clear()
            raise

    def capture(self, work: Callable[[], None]) -> object | None:
        assert self._capturing is None
        self._capturing = []
        try:
            work()
        except (CaptureRefused, GpuError):
            return None
        finally:
            captured, self._capturing = self._capturing, None
        if self.refuses_capture:
            return None
        self.graphs.append(captured)
        return captured

    @property
    def is_capturing(self) -> bool:
        return self._capturing is not None

    def launch(self, graph: object) -> None:
        assert any(graph is known for known in self.graphs), "a graph that was given back"
        self.num_launches += 1
        self._queue += graph  # type: ignore[arg-type]

    def destroy(self, graph: object) -> None:
        self.graphs = [known for known in self.graphs if known is not graph]

    def check_range(self, address: int, num_bytes: int) -> None:
        """Fail unless these bytes lie in one allocation."""
        holds = any(
            block.start <= address and address + num_bytes <= block.start + block.num_bytes
            for block in self.blocks.values()
        )
        assert holds, f"{num_bytes} bytes at {address:#x} are in no allocation"


@dataclass
class FakeEngine:
    """See `dflash_trt.runtime.trt_engine.LoadedEngine`; `run` computes a step on arrays.

    `run` gets every input by name and gives every output; it may update caches in place.
    """

    cuda: FakeCuda
    tensors: Sequence[TensorInfo]
    run: Callable[[Arrays], Arrays]
    num_profiles: int = 2
    scratch: int = 1000
    is_capturable: bool = True
    max_contexts: int = 1000
    fixed_fails: bool = False  # no memory for the kernels of a context for a graph
    num_contexts: int = 0
    num_saved: int = 0

    def scratch_bytes(self, profile: int) -> int:
        return self.scratch * (profile + 1)

    def context(self, profile: int, scratch: int, num_bytes: int, *, fixed: bool) -> FakeContext:
        self.num_contexts += 1
        if self.num_contexts > self.max_contexts:
            raise GpuError("TensorRT makes no execution context: out of memory")
        assert num_bytes >= self.scratch_bytes(profile)
        self.cuda.check_range(scratch, num_bytes)
        return FakeContext(self, profile, fixed)

    def save_compiled(self, is_new: bool) -> None:
        self.num_saved += is_new


class FakeContext:
    """One context: what was set when a step was enqueued is what runs."""

    def __init__(self, engine: FakeEngine, profile: int, fixed: bool) -> None:
        self._engine, self._profile, self._fixed = engine, profile, fixed
        self._tensors = {tensor.name: tensor for tensor in engine.tensors}
        self._shapes: dict[str, Shape] = {}
        self._addresses: dict[str, int] = {}
        self._settled: dict[str, Shape] = {}  # the shapes of the last step that ran

    @property
    def is_capturable(self) -> bool:
        return self._engine.is_capturable

    def set_shape(self, name: str, shape: Shape) -> None:
        tensor = self._tensors[name]
        assert tensor.is_input
        may_be_empty = name in SPECIAL_LINES
        least = [0 if may_be_empty and axis == 0 else 1 for axis in range(len(shape))]
        fits = len(shape) == len(tensor.shape) and all(
            low <= n <= most and static in (-1, n)
            for low, n, static, most in zip(
                least, shape, tensor.shape, tensor.most[self._profile], strict=True
            )
        )
        if not fits:
            raise GpuError(f"TensorRT does not take shape {list(shape)} for {name}")
        self._shapes[name] = shape

    def set_address(self, name: str, address: int) -> None:
        assert name in self._tensors
        assert address % ALIGNMENT == 0, f"{name} at {address:#x} is not aligned"
        self._addresses[name] = address

    def enqueue(self) -> None:
        if self._fixed and self._engine.fixed_fails:
            raise GpuError("TensorRT cannot run the step: out of memory")
        shapes, addresses = dict(self._shapes), dict(self._addresses)
        assert set(addresses) == set(self._tensors), "a tensor without an address"
        assert {n for n, t in self._tensors.items() if t.is_input} == set(shapes)
        for spec in (name for name in addresses if name.startswith(c.UPDATED)):
            assert addresses[spec] == addresses[spec.removeprefix(c.UPDATED)], "not in place"
        is_captured = self._engine.cuda.is_capturing
        if is_captured:
            assert self._fixed, "kernels that may still change are captured"
            assert self._settled == shapes, "shapes are settled while the stream is captured"
        self._settled = shapes
        for name, shape in shapes.items():
            size = math.prod(shape) * self._tensors[name].dtype.itemsize
            self._engine.cuda.check_range(addresses[name], size)

        def work() -> None:
            # A graph's kernels read what its context holds for these shapes.
            assert not is_captured or self._settled == shapes, "its context has other shapes now"
            self._compute(shapes, addresses)

        self._engine.cuda.put(work)

    def _compute(self, shapes: Mapping[str, Shape], addresses: Mapping[str, int]) -> None:
        feeds = {name: self._at(name, shape, addresses) for name, shape in shapes.items()}
        for name, made in self._engine.run(feeds).items():
            if name not in addresses:  # an engine that was built without it
                continue
            place = self._at(name, made.shape, addresses)
            assert made.dtype == place.dtype
            place[...] = made

    def _at(self, name: str, shape: Shape, addresses: Mapping[str, int]) -> Array:
        dtype = self._tensors[name].dtype
        num_bytes = math.prod(shape) * dtype.itemsize
        self._engine.cuda.check_range(addresses[name], num_bytes)
        return host_view(addresses[name], num_bytes).view(dtype).reshape(shape)


def engine_tensors(
    pair: PairConfig, limits: SessionLimits, dtype: Any = np.float32, most_adjusted: int = 64
) -> list[TensorInfo]:
    """What an engine of this pair has, as docs/step-graph.md says; profiles {prefill, decode}."""
    block = limits.block
    profiles = ((1, limits.prefill_chunk), (limits.max_slots, block))
    floats = {c.TEMPERATURE, c.TOP_P, c.MIN_P, c.REPETITION, c.PRESENCE, c.FREQUENCY}
    ids = {c.ADJUST_IDS, c.ADJUST_SEEN, c.ADJUST_COUNT, c.ADJUST_BIAS}
    made = []
    for name in c.INPUTS:
        if name in (c.BLOCK_OFFSETS, c.DRAFT_OFFSETS):
            continue
        kind = np.float32 if name in floats | ids - {c.ADJUST_IDS} else np.int32
        rank = 3 if name in ids else 2 if name == c.TOKENS else 1
        most = tuple(
            (slots, min(width, block), most_adjusted)[:rank]
            if rank != 2
            else (slots, width)
            for slots, width in profiles
        )  # fmt: skip
        kind = np.int64 if name == c.SEED else kind
        made.append(TensorInfo(name, True, np.dtype(kind), (-1,) * rank, most))
    for spec in c.all_caches(pair):
        rows = c.cache_rows(limits.max_seq_len, block)
        shape = (spec.num_heads, rows, spec.head_dim)
        most = tuple((slots, *shape) for slots, _ in profiles)
        made.append(TensorInfo(spec.name, True, np.dtype(dtype), (-1, *shape), most))
        made.append(TensorInfo(spec.output, False, np.dtype(dtype), (-1, *shape)))
    made.append(TensorInfo(c.COMMITTED, False, np.dtype(np.int32), (-1,)))
    made.append(TensorInfo(c.NEXT, False, np.dtype(np.int32), (-1, block)))
    if limits.has_logits:
        made.append(TensorInfo(c.LOGITS, False, np.dtype(np.float32), (-1, -1, limits.vocab_size)))
    return made


class OnnxStep:
    """Computes a step with the ONNX form of the same graph, always drafting the whole block."""

    def __init__(self, model: Path, block: int) -> None:
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 3
        self._session = ort.InferenceSession(str(model), options)
        offsets = np.arange(block, dtype=np.int32)
        self._offsets = {c.BLOCK_OFFSETS: offsets, c.DRAFT_OFFSETS: offsets[1:]}

    def __call__(self, feeds: Arrays) -> Arrays:
        names = [output.name for output in self._session.get_outputs()]
        made = self._session.run(names, {**feeds, **self._offsets})
        return dict(zip(names, made, strict=True))
