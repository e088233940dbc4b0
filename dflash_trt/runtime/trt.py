"""The GPU session: the step graph on TensorRT, caches on the GPU and updated in place.

It is written against `Cuda` and `LoadedEngine`; the real ones are `CudaDevice` and
`TrtEngine` (trt_load.py).
"""

from __future__ import annotations

import contextlib
import weakref
from dataclasses import dataclass

import numpy as np

from dflash_trt import contract as c
from dflash_trt.config import PairConfig
from dflash_trt.errors import CapacityError, GpuError, GpuMemoryError
from dflash_trt.runtime.cuda import Bytes, Cuda
from dflash_trt.runtime.session import F32, SessionLimits, StepResult, StepRows
from dflash_trt.runtime.special import special_slots
from dflash_trt.runtime.trt_engine import LoadedEngine, StepContext
from dflash_trt.runtime.trt_graphs import MAX_GRAPHS, StepRunner, StepWork
from dflash_trt.runtime.trt_steps import Layout, StepKey, StepShapes, fill

GB = 1e9


@dataclass(frozen=True)
class GpuNeed:
    """Bytes of GPU memory that an engine takes."""

    weights: int
    caches_per_slot: int
    max_slots: int
    scratch: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.caches_per_slot * self.max_slots + self.scratch

    def check(self, memory: tuple[int, int]) -> None:
        """Raises `GpuMemoryError` unless (free, all) bytes of memory hold it."""
        free, total = memory
        if self.total <= free:
            return
        parts = f"caches of {self.max_slots} slots {self.caches_per_slot * self.max_slots / GB:.2f}"
        if self.weights:
            parts = f"weights {self.weights / GB:.2f}, {parts}"
        if self.scratch:
            parts = f"{parts}, scratch {self.scratch / GB:.2f}"
        fitting = (free - self.weights - self.scratch) // self.caches_per_slot
        if fitting >= 1:
            hint = f"build with --max-slots {fitting}, or with a smaller --max-seq-len"
        else:
            hint = "build with a smaller --precision or --max-seq-len, or end what else runs there"
        raise GpuMemoryError(
            f"the engine needs {self.total / GB:.2f} GB of the GPU's memory ({parts}), "
            f"{free / GB:.2f} of {total / GB:.2f} GB are free",
            hint=hint,
        )


class TrtSession:
    """Runs `rank0.engine` with caches of its own. Not thread-safe: one caller at a time."""

    def __init__(
        self, engine: LoadedEngine, cuda: Cuda, pair: PairConfig, limits: SessionLimits,
        max_graphs: int = MAX_GRAPHS,
    ) -> None:  # fmt: skip
        """Allocate all that steps need but for adjusted logits.

        Raises `EngineDirError` for an engine that is not the step graph, `GpuMemoryError`.
        """
        self._engine, self._cuda, self._limits = engine, cuda, limits
        self._shapes = StepShapes(engine.tensors, pair, limits)
        scratch = max(engine.scratch_bytes(p) for p in range(engine.num_profiles))
        logits = self._shapes.logits_bytes()
        need = GpuNeed(0, self._shapes.cache_bytes, limits.max_slots, scratch + logits)
        need.check(cuda.memory())
        self._scratch = DeviceMemory(cuda, scratch)
        self._logits = DeviceMemory(cuda, logits)
        self._caches = [
            DeviceMemory(cuda, place.slot_bytes * limits.max_slots) for place in self._shapes.caches
        ]
        # Memory that was never written may hold NaN, and see `release`.
        for memory in self._caches:
            cuda.clear(memory.address, memory.num_bytes)
        self._inputs: dict[int, Mirror] = {}  # by adjusted ids
        self._outputs = Mirror(cuda, self._shapes.outputs(limits.max_slots).num_bytes)
        # Not of this session's own methods: a cycle would keep the GPU's memory until a collection.
        me = weakref.proxy(self)
        work = StepWork(
            lambda profile, fixed: me._context(profile, fixed),
            lambda key, context: me._bind(key, context),
            lambda key, context: me._put(key, context),
        )
        self._runner = StepRunner(cuda, work, limits.block, max_graphs)

    @property
    def limits(self) -> SessionLimits:
        """The engine's limits."""
        return self._limits

    @property
    def num_graphs(self) -> int:
        """CUDA graphs that are kept now."""
        return self._runner.num_graphs

    def step(
        self, first_slot: int, rows: StepRows, num_drafts: int, *, want_logits: bool = False
    ) -> StepResult:
        """See `Session.step`. The block is always drafted whole; fewer drafts are a part of it.

        Raises `CapacityError` for a step beyond the engine's limits, `GpuError`.
        """
        if want_logits and not self._shapes.has_logits:
            raise CapacityError("this engine does not return logits", hint="build it with --logits")
        special = special_slots(rows)
        key = self._shapes.key(first_slot, rows, special)
        inputs = self._mirror(key.adjusted)
        fill(inputs.host, self._shapes.inputs(key), rows, special)
        try:
            is_new = self._runner.run(key)
            logits = self._read_logits(key) if want_logits else None
            self._cuda.synchronize()
        except BaseException:
            # What is on the stream must not write to memory that the next step uses.
            with contextlib.suppress(GpuError):
                self._cuda.synchronize()
            raise
        self._engine.save_compiled(is_new)
        made = self._shapes.outputs(key.slots).fields
        next_tokens = made[c.NEXT].view(self._outputs.host)
        # Copies: the next step writes to the same memory.
        return StepResult(
            committed=made[c.COMMITTED].view(self._outputs.host).copy(),
            next_tokens=next_tokens[:, : 1 + num_drafts].copy(),
            logits=logits,
        )

    def release(self, slot: int) -> None:
        """See `Session.release`. Clears the slot's caches, on the stream.

        Attention gives keys behind a row's last one no weight. But a kernel may load a whole tile
        of values and multiply the dead ones with zero, and zero times NaN is NaN. What one request
        overflowed to must not reach the next one, so no memory holds bytes of a request that is
        over.
        """
        for place, memory in zip(self._shapes.caches, self._caches, strict=True):
            self._cuda.clear(memory.address + place.offset(slot), place.slot_bytes)

    def _mirror(self, adjusted: int) -> Mirror:
        """Memory for inputs with so many adjusted ids; it stays, for graphs hold its address."""
        if adjusted not in self._inputs:
            self._inputs[adjusted] = Mirror(self._cuda, self._shapes.largest_inputs(adjusted))
        return self._inputs[adjusted]

    def _context(self, profile: int, fixed: bool) -> StepContext:
        scratch = self._scratch
        return self._engine.context(profile, scratch.address, scratch.num_bytes, fixed=fixed)

    def _bind(self, key: StepKey, context: StepContext) -> None:
        """Give a context the shapes and addresses of a kind of step."""
        inputs, outputs = self._shapes.inputs(key), self._shapes.outputs(key.slots)
        for where, mirror in ((inputs, self._mirror(key.adjusted)), (outputs, self._outputs)):
            for name, field in where.fields.items():
                context.set_address(name, mirror.device.address + field.offset)
        for name, field in inputs.fields.items():
            context.set_shape(name, field.shape)
        for place, memory in zip(self._shapes.caches, self._caches, strict=True):
            context.set_shape(place.spec.name, (key.slots, *place.slot_shape))
            address = memory.address + place.offset(key.first_slot)
            # Input and output are one memory: the update is in place.
            context.set_address(place.spec.name, address)
            context.set_address(place.spec.output, address)
        if self._shapes.has_logits:
            context.set_address(c.LOGITS, self._logits.address)

    def _put(self, key: StepKey, context: StepContext) -> None:
        """One step: inputs to the GPU, the step, what is read back to the host."""
        self._mirror(key.adjusted).upload(self._shapes.inputs(key))
        context.enqueue()
        self._outputs.download(self._shapes.outputs(key.slots))

    def _read_logits(self, key: StepKey) -> F32:
        logits = np.empty(self._shapes.logits(key.slots, key.width), np.float32)
        self._cuda.download(logits, self._logits.address)
        return logits


class DeviceMemory:
    """Memory on the GPU, given back when this object is."""

    def __init__(self, cuda: Cuda, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.address = cuda.allocate(num_bytes) if num_bytes else 0
        if num_bytes:
            weakref.finalize(self, cuda.free, self.address)


class Mirror:
    """Memory on the GPU, and page-locked memory on the host that is copied to or from it."""

    def __init__(self, cuda: Cuda, num_bytes: int) -> None:
        self._cuda = cuda
        self.device = DeviceMemory(cuda, num_bytes)
        self.host: Bytes = cuda.pinned(num_bytes)
        weakref.finalize(self, cuda.free_pinned, self.host)

    def upload(self, where: Layout) -> None:
        """Put the copy to the GPU on the stream."""
        self._cuda.upload(self.device.address, self.host[: where.num_bytes])

    def download(self, where: Layout) -> None:
        """Put the copy to the host on the stream."""
        self._cuda.download(self.host[: where.num_bytes], self.device.address)
