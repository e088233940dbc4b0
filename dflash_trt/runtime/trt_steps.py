"""A step on the GPU, as host arithmetic: which profile, which shapes, what lies where.

Nothing here knows CUDA. All inputs of a step lie in one block of memory, so that one copy brings
them to the GPU; the two outputs that are read back lie in another.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dflash_trt import contract as c
from dflash_trt.config import PairConfig
from dflash_trt.errors import CapacityError, EngineDirError
from dflash_trt.runtime.cuda import ALIGNMENT, Bytes
from dflash_trt.runtime.session import I32, SessionLimits, StepRows
from dflash_trt.runtime.special import special_inputs
from dflash_trt.runtime.trt_engine import Shape, TensorInfo

# The block is always drafted whole, so the engine has its offsets inside.
INPUTS = tuple(name for name in c.INPUTS if name not in (c.BLOCK_OFFSETS, c.DRAFT_OFFSETS))
ADJUSTED_IDS = (c.ADJUST_IDS, c.ADJUST_SEEN, c.ADJUST_COUNT, c.ADJUST_BIAS)
REBUILD = "build the engine again with this version of dflash-trt"


@dataclass(frozen=True)
class StepKey:
    """What must be equal for two steps to be the same work for the GPU, but for their values."""

    profile: int
    first_slot: int  # the caches' addresses depend on it
    slots: int  # B
    width: int  # S
    special: int  # M
    adjusted: int  # P


@dataclass(frozen=True)
class Field:
    """Where one array lies in a block of memory."""

    offset: int
    shape: Shape
    dtype: np.dtype[Any]

    def view(self, block: Bytes) -> npt.NDArray[Any]:
        """The array in a block."""
        num_bytes = math.prod(self.shape) * self.dtype.itemsize
        return block[self.offset : self.offset + num_bytes].view(self.dtype).reshape(self.shape)


@dataclass(frozen=True)
class Layout:
    """Arrays side by side, each aligned as TensorRT wants its addresses."""

    fields: Mapping[str, Field]
    num_bytes: int


def layout(arrays: Iterable[tuple[str, Shape, np.dtype[Any]]]) -> Layout:
    """Lay arrays out one after the other."""
    fields, end = {}, 0
    for name, shape, dtype in arrays:
        fields[name] = Field(end, shape, dtype)
        end = aligned(end + max(1, math.prod(shape) * dtype.itemsize))  # each has an address
    return Layout(fields, end)


def _power_of_two(number: int) -> int:
    """The next one; 0 for 0."""
    return 1 << (number - 1).bit_length() if number else 0


def aligned(num_bytes: int) -> int:
    """The next multiple of `ALIGNMENT`."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class CachePlace:
    """One cache of all slots, slot-major: [max_slots, heads, capacity, head_dim]."""

    spec: c.CacheSpec
    slot_shape: Shape
    dtype: np.dtype[Any]

    @property
    def slot_bytes(self) -> int:
        """From one slot to the next."""
        return math.prod(self.slot_shape) * self.dtype.itemsize

    def offset(self, first_slot: int) -> int:
        """Where the slots from `first_slot` on begin: the view that a step is given."""
        return first_slot * self.slot_bytes


class StepShapes:
    """The binding table of an engine: its tensors, checked against the contract, and its limits."""

    def __init__(
        self, tensors: Sequence[TensorInfo], pair: PairConfig, limits: SessionLimits
    ) -> None:
        """Raises `EngineDirError` for an engine that is not one of this version's step graphs."""
        self._limits = limits
        self._tensors = {tensor.name: tensor for tensor in tensors}
        specs = c.all_caches(pair)
        self.has_logits = c.LOGITS in self._tensors
        outputs = {c.COMMITTED, c.NEXT, *(spec.output for spec in specs)}
        self._compare("inputs", True, {*INPUTS, *(spec.name for spec in specs)})
        self._compare("outputs", False, outputs | ({c.LOGITS} if self.has_logits else set()))
        self.caches = [self._cache(spec) for spec in specs]
        tokens = self._tensors[c.TOKENS].most
        self._most = [(shape[0], shape[1]) for shape in tokens]  # slots and width of each profile
        self._most_adjusted = [shape[2] for shape in self._tensors[c.ADJUST_IDS].most]
        # Of the profiles that take a step, the one that was tuned for the smallest steps.
        self._order = sorted(range(len(tokens)), key=lambda profile: self._most[profile][1])
        for slots, width in ((limits.max_slots, limits.block), (1, limits.prefill_chunk)):
            self.profile(slots, width)

    @property
    def cache_bytes(self) -> int:
        """Of all caches of one slot."""
        return sum(place.slot_bytes for place in self.caches)

    @property
    def capacity(self) -> int:
        """Rows of every cache."""
        return self.caches[0].slot_shape[1]

    def profile(self, slots: int, width: int) -> int:
        """The profile of a step. Raises `EngineDirError` when none takes it."""
        for profile in self._order:
            most_slots, most_width = self._most[profile]
            if slots <= most_slots and width <= most_width:
                return profile
        raise EngineDirError(
            f"no profile of the engine takes a step of {slots} slots and {width} tokens",
            hint=REBUILD,
        )

    def key(self, first_slot: int, rows: StepRows, special: I32) -> StepKey:
        """What kind of step this is; `special`: see `special_slots`.

        Raises `CapacityError` for a step that would write past the caches or whose adjusted ids
        are more than the engine takes.
        """
        slots, width = rows.tokens.shape
        # A step writes full rows, idle ones included: past the end lies another slot's cache.
        end = int(rows.length.max()) + width + self._limits.block
        if first_slot < 0 or first_slot + slots > self._limits.max_slots:
            raise CapacityError(f"the engine has no slots {first_slot} to {first_slot + slots - 1}")
        if end > self.capacity:
            raise CapacityError(f"a step would write {end} rows, the caches have {self.capacity}")
        profile = self.profile(slots, width)
        adjust = rows.adjust if len(special) else None
        asked = 1 if adjust is None else max(1, adjust.ids.shape[2])
        most = self._most_adjusted[profile]
        if asked > most:
            raise CapacityError(
                f"penalties, biases and bans touch {asked} token ids, the engine takes {most}"
            )
        # Each number of ids, which grow with the text, or of special slots is other work.
        adjusted = min(_power_of_two(asked), most)
        lines = min(_power_of_two(len(special)), slots)
        return StepKey(profile, first_slot, slots, width, lines, adjusted)

    def inputs(self, key: StepKey) -> Layout:
        """The small inputs of a step."""
        verified = min(key.width, self._limits.block)
        dims: dict[str, Shape] = {c.TOKENS: (key.slots, key.width)}
        dims |= dict.fromkeys((c.LENGTH, c.COUNT, c.KNOWN, c.CHOICE_SOURCE), (key.slots,))
        dims |= dict.fromkeys(ADJUSTED_IDS, (key.special, verified, key.adjusted))
        return layout(
            (name, dims.get(name, (key.special,)), self._tensors[name].dtype) for name in INPUTS
        )

    def largest_inputs(self, adjusted: int) -> int:
        """Bytes that hold the inputs of any step with so many adjusted ids."""
        return max(
            self.inputs(StepKey(profile, 0, slots, width, slots, adjusted)).num_bytes
            for profile, (slots, width) in enumerate(self._most)
        )

    def outputs(self, slots: int) -> Layout:
        """What is read back after every step."""
        return layout(
            (name, shape, self._tensors[name].dtype)
            for name, shape in (
                (c.COMMITTED, (slots,)),
                (c.NEXT, (slots, self._limits.block)),
            )
        )

    def logits(self, slots: int, width: int) -> Shape:
        """Shape of the target's logits."""
        return (slots, min(width, self._limits.block), self._limits.vocab_size)

    def logits_bytes(self) -> int:
        """Bytes that hold the logits of any step; none where the engine does not return them."""
        if not self.has_logits:
            return 0
        size = self._tensors[c.LOGITS].dtype.itemsize
        return aligned(size * max(math.prod(self.logits(*most)) for most in self._most))

    def _compare(self, what: str, is_input: bool, wanted: set[str]) -> None:
        found = {name for name, tensor in self._tensors.items() if tensor.is_input == is_input}
        if found != wanted:
            names = ", ".join(sorted(found ^ wanted)[:3])
            raise EngineDirError(
                f"the engine's {what} are not those of this version's step graph: {names}",
                hint=REBUILD,
            )

    def _cache(self, spec: c.CacheSpec) -> CachePlace:
        tensor = self._tensors[spec.name]
        _, heads, capacity, head_dim = tensor.most[0]
        least = c.cache_rows(self._limits.max_seq_len, self._limits.block)
        if (heads, head_dim) != (spec.num_heads, spec.head_dim) or capacity < least:
            raise EngineDirError(
                f"the engine's {spec.name} has shape {list(tensor.most[0])}, config.json asks for "
                f"{spec.num_heads} heads, at least {least} rows and {spec.head_dim} columns",
                hint="build the engine again",
            )
        place = CachePlace(spec, (heads, capacity, head_dim), tensor.dtype)
        if place.slot_bytes % ALIGNMENT and self._limits.max_slots > 1:
            raise EngineDirError(
                f"a slot of the engine's {spec.name} has {place.slot_bytes} bytes, which is no "
                f"multiple of {ALIGNMENT}: TensorRT could not be given any but the first",
                hint=REBUILD,
            )
        return place


def fill(block: Bytes, where: Layout, rows: StepRows, special: I32) -> None:
    """Write a step's inputs into a block of memory; `special`: see `special_slots`."""
    fields = where.fields
    num_lines, verified, _ = fields[c.ADJUST_IDS].shape
    lines = np.pad(special, (0, num_lines - len(special)), "edge") if num_lines else special
    values = {
        c.TOKENS: rows.tokens,
        c.LENGTH: rows.length,
        c.COUNT: rows.count,
        c.KNOWN: rows.known,
        **special_inputs(rows, lines, verified, ids=1),
    }
    for name, value in values.items():
        place = fields[name].view(block)
        if name not in ADJUSTED_IDS:
            place[...] = value
            continue
        given = value.shape[2]
        place[..., :given] = value
        place[..., given:] = value[..., -1:]  # an id may repeat with equal values
