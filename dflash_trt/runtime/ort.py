"""The CPU session: the step graph on ONNX Runtime, caches bound once and updated in place."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from dflash_trt import contract as c
from dflash_trt.config import PairConfig
from dflash_trt.errors import ConfigError, EngineDirError
from dflash_trt.runtime.caches import CachePools
from dflash_trt.runtime.session import SessionLimits, StepResult, StepRows
from dflash_trt.runtime.special import special_inputs, special_slots
from dflash_trt.runtime.threads import MAX_THREADS, cpu_allowance

F32 = npt.NDArray[np.float32]

# ONNX Runtime has other kernels for a single row than for several. Rows of wider steps are equal
# to the bit at every width, so with no step narrower than this, plain decoding and any block give
# the same logits. What that costs plain decoding is in bench/README.md.
MIN_WIDTH = 2


class OrtSession:
    """Runs `step.onnx` with caches of its own. Not thread-safe: one caller at a time."""

    def __init__(
        self, model: Path, pair: PairConfig, limits: SessionLimits, num_threads: int | None = None
    ) -> None:
        """Load a model. `num_threads` defaults to the process's CPU allowance.

        Raises `EngineDirError` when ONNX Runtime refuses the file, `ConfigError` for a bad number.
        """
        if num_threads is not None and not 1 <= num_threads <= MAX_THREADS:
            raise ConfigError(f"threads is {num_threads}, allowed are 1 to {MAX_THREADS}")
        options = ort.SessionOptions()
        options.intra_op_num_threads = num_threads or cpu_allowance()
        options.log_severity_level = 3
        try:
            self._session = ort.InferenceSession(
                str(model), options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:  # ONNX Runtime raises several unrelated classes
            reason = str(error).splitlines()[0]
            raise EngineDirError(
                f"{model}: ONNX Runtime {ort.__version__} cannot load it: {reason}",
                hint="build the engine again with this version of dflash-trt",
            ) from error
        self._check_contract(model, pair, limits)
        self._limits = limits
        self._specs = c.all_caches(pair)
        max_rows = c.cache_rows(limits.max_seq_len, limits.block)
        self._pools = CachePools(self._specs, limits.max_slots, max_rows, self._allocate)
        self._bindings: dict[tuple[int, int], ort.IOBinding] = {}
        offsets = np.arange(limits.block, dtype=np.int32)
        self._offsets = {
            drafts: (offsets if drafts else offsets[:0], offsets[1 : drafts + 1])
            for drafts in range(limits.block)
        }

    def _check_contract(self, model: Path, pair: PairConfig, limits: SessionLimits) -> None:
        wanted = {*c.INPUTS, *(spec.name for spec in c.all_caches(pair))}
        found = {value.name for value in self._session.get_inputs()}
        if found != wanted:
            names = ", ".join(sorted(found ^ wanted)[:3])
            raise EngineDirError(
                f"{model}: its inputs are not those of this version's step graph: {names}",
                hint="build the engine again with this version of dflash-trt",
            )
        # The caches are bound by address, so their shape must be the one that the graph has.
        shapes = {value.name: value.shape for value in self._session.get_inputs()}
        for spec in c.all_caches(pair):
            if shapes[spec.name][1::2] != [spec.num_heads, spec.head_dim]:
                raise EngineDirError(
                    f"{model}: its {spec.name} is not of the shape that config.json says",
                    hint="build the engine again",
                )
        built = self._session.get_modelmeta().custom_metadata_map
        for name, value in c.build_properties(limits.block, limits.max_seq_len).items():
            if int(built.get(name, 0)) < int(value):
                raise EngineDirError(
                    f"{model} was built for {name} {built.get(name)}, config.json says {value}",
                    hint="build the engine again",
                )

    @property
    def limits(self) -> SessionLimits:
        """The engine's limits."""
        return self._limits

    def step(
        self, first_slot: int, rows: StepRows, num_drafts: int, *, want_logits: bool = False
    ) -> StepResult:
        """See `Session.step`."""
        asked_width = rows.tokens.shape[1]
        rows = _at_least(rows, MIN_WIDTH)
        num_slots, width = rows.tokens.shape
        block_offsets, draft_offsets = self._offsets[num_drafts]
        if self._pools.fit(int(rows.length.max()) + width + len(block_offsets)):
            self._bindings.clear()
        binding = self._binding(first_slot, num_slots)
        inputs = {
            c.TOKENS: rows.tokens,
            c.LENGTH: rows.length,
            c.COUNT: rows.count,
            c.KNOWN: rows.known,
            c.BLOCK_OFFSETS: block_offsets,
            c.DRAFT_OFFSETS: draft_offsets,
            **special_inputs(rows, special_slots(rows), min(width, self._limits.block), ids=0),
        }
        for name, array in inputs.items():
            binding.bind_cpu_input(name, np.ascontiguousarray(array))
        # Fresh memory each step: a result never shows what an earlier or later step wrote.
        result = StepResult(
            committed=np.full(num_slots, -1, np.int32),
            next_tokens=np.full((num_slots, 1 + num_drafts), -1, np.int32),
            logits=self._logits(num_slots, width) if want_logits else None,
        )
        for name, array in (
            (c.COMMITTED, result.committed),
            (c.NEXT, result.next_tokens),
            (c.LOGITS, result.logits),
        ):
            if array is not None:
                place = ("cpu", 0, array.dtype, list(array.shape), array.ctypes.data)
                binding.bind_output(name, *place)
        self._session.run_with_iobinding(binding)
        self._pools.keep(first_slot, rows.length + result.committed)
        if want_logits:
            del self._bindings[first_slot, num_slots]  # the next step must not write to it
            assert result.logits is not None
            return dataclasses.replace(result, logits=result.logits[:, :asked_width])
        return result

    def release(self, slot: int) -> None:
        """See `Session.release`."""
        self._pools.release(slot)

    @property
    def caches(self) -> dict[str, F32]:
        """The arrays [slots, heads, rows, head_dim] behind the caches, by name."""
        return self._pools.arrays

    def _allocate(self, shape: tuple[int, ...]) -> F32:
        return np.zeros(shape, np.float32)

    def _logits(self, num_slots: int, width: int) -> F32:
        rows = min(width, self._limits.block)
        return np.empty((num_slots, rows, self._limits.vocab_size), np.float32)

    def _binding(self, first_slot: int, num_slots: int) -> ort.IOBinding:
        """The binding of one run of slots, its caches bound by address as input and output."""
        key = (first_slot, num_slots)
        if key not in self._bindings:
            binding = self._session.io_binding()
            for spec in self._specs:
                view = self._pools.arrays[spec.name][first_slot : first_slot + num_slots]
                place = ("cpu", 0, np.float32, list(view.shape), view.ctypes.data)
                binding.bind_input(spec.name, *place)
                binding.bind_output(spec.output, *place)
            self._bindings[key] = binding
        return self._bindings[key]


def _at_least(rows: StepRows, width: int) -> StepRows:
    """The rows, filled up with invalid tokens to `width` columns."""
    missing = width - rows.tokens.shape[1]
    if missing <= 0:
        return rows
    adjust = rows.adjust
    if adjust is not None:
        # Their choices do not count, so any adjustment will do for the new columns.
        edge = ((0, 0), (0, missing), (0, 0))
        names = ("ids", "seen", "count", "bias")
        padded = {name: np.pad(getattr(adjust, name), edge, mode="edge") for name in names}
        adjust = dataclasses.replace(adjust, **padded)
    tokens = np.pad(rows.tokens, ((0, 0), (0, missing)))
    return dataclasses.replace(rows, tokens=tokens, adjust=adjust)
