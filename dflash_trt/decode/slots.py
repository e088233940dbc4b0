"""Requests and their seats: what the host knows of a request between steps, and who sits where."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from dflash_trt.decode.request import DecodeStats, SamplingParams
from dflash_trt.text import BlockResult, TextStream


@dataclass(eq=False)
class Request:
    """A request, waiting or in its slot. `length` tokens are in the caches.

    Times are the scheduler's clock.
    """

    request_id: int
    prompt: Sequence[int]
    params: SamplingParams
    max_tokens: int
    stream: TextStream
    stats: DecodeStats
    deadline: float = math.inf
    submitted_at: float = 0.0
    first_token_at: float | None = None
    slot: int | None = None  # its seat; None while it waits
    length: int = 0
    row: list[int] = field(default_factory=list)  # [anchor, d1, ..] once the prompt is read

    @property
    def is_prefilling(self) -> bool:
        """Whether prompt tokens are still to be read."""
        return self.length < len(self.prompt)

    @property
    def remaining(self) -> int:
        """Tokens that may still be generated."""
        return self.max_tokens - self.stream.num_tokens

    def take_prompt(self, committed: int, next_row: list[int]) -> BlockResult | None:
        """Account for a prompt chunk; the last one brings the first token."""
        self.length += committed
        if self.is_prefilling:
            return None
        self.row = next_row
        return self.stream.push(next_row[:1])

    def take_block(self, num_offered: int, committed: int, next_row: list[int]) -> BlockResult:
        """Account for a decode step: accepted drafts and the bonus are new, the anchor is not."""
        new = [*self.row[1:committed], next_row[0]]
        self.length += committed
        self.row = next_row
        result = self.stream.push(new)
        self.stats.record(num_offered, result.num_tokens)
        return result


class SlotTable:
    """The seats of one session. The lowest free slot is taken first: steps run on few rows."""

    def __init__(self, num_slots: int, release: Callable[[int], None]) -> None:
        """`release` is told of every slot that becomes free, before anyone else may take it."""
        self._seats: list[Request | None] = [None] * num_slots
        self._release = release
        self.num_used = 0

    def __getitem__(self, slot: int) -> Request | None:
        return self._seats[slot]

    @property
    def has_free(self) -> bool:
        """Whether a request can be seated."""
        return self.num_used < len(self._seats)

    def seat(self, request: Request) -> None:
        """Give a request the lowest free slot; there must be one."""
        slot = self._seats.index(None)
        self._seats[slot] = request
        request.slot = slot
        self.num_used += 1

    def free(self, request: Request) -> None:
        """Take a request out of its slot, if it has one."""
        if request.slot is not None:
            slot, request.slot = request.slot, None
            self._seats[slot] = None
            self.num_used -= 1
            self._release(slot)

    def prefilling(self) -> list[Request]:
        """Seated requests whose prompt is not read yet, in the order of their slots."""
        return [request for request in self._seats if request and request.is_prefilling]

    def decoding(self) -> list[Request]:
        """Seated requests that decode, in the order of their slots."""
        return [request for request in self._seats if request and not request.is_prefilling]
