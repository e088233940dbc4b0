"""Requests and their seats: what the host knows of a request between steps, and who sits where."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from dflash_trt.decode.adjust import History
from dflash_trt.decode.logprobs import TokenLogprob, token_logprobs
from dflash_trt.decode.request import DecodeStats, Delta, SamplingParams
from dflash_trt.runtime.session import F32
from dflash_trt.text import TextStream


@dataclass(eq=False)
class Request:
    """A request, waiting or in its slot. `length` tokens are in the caches.

    Times are the scheduler's clock.
    """

    request_id: int
    prompt: list[int]
    params: SamplingParams
    max_tokens: int
    stream: TextStream
    stats: DecodeStats
    history: History | None = None  # of requests that adjust logits
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

    def take(
        self, num_tokens: int, committed: int, next_row: list[int], logits: F32 | None = None
    ) -> Delta | None:
        """Account for a step of `num_tokens` tokens; None when the prompt is not read to its end.

        `logits` [R, V] are those of the verified rows, where the step was asked for them.

        The last prompt chunk brings one token. Of a block, accepted drafts and the bonus are new,
        the anchor is not. Raises `ValueError` when the session's numbers make no sense.
        """
        known = num_tokens if self.is_prefilling else 1
        if not known <= committed <= num_tokens:
            raise ValueError(f"committed is {committed}, allowed are {known} to {num_tokens}")
        is_prompt = self.is_prefilling
        new = [next_row[0]] if is_prompt else [*self.row[1:committed], next_row[0]]
        self.length += committed
        if self.is_prefilling:
            return None
        self.row = next_row
        block = self.stream.push(new)
        if not is_prompt:
            self.stats.record(num_tokens - 1, committed - 1, block.num_tokens)
        delivered = new[: block.num_tokens]
        if self.history is not None:
            self.history.extend(delivered)
        logprobs: tuple[TokenLogprob, ...] | None = None
        if self.params.logprobs is not None and logits is not None:
            logprobs = tuple(token_logprobs(logits, delivered, self.params.logprobs))
        return Delta(self.request_id, tuple(delivered), block.text, block.reason, logprobs=logprobs)


class SlotTable:
    """The seats of one session. The lowest free slot is taken first: steps run on few rows."""

    def __init__(self, num_slots: int, release: Callable[[int], None]) -> None:
        """`release` is told of every slot that becomes free, before anyone else may take it."""
        self._seats: list[Request | None] = [None] * num_slots
        self._release = release
        self.num_used = 0

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

    def between(self, first: Request, last: Request) -> tuple[int, list[Request | None]]:
        """The slot of `first`, and who sits from there to `last`, which sits no lower."""
        assert first.slot is not None
        assert last.slot is not None
        return first.slot, self._seats[first.slot : last.slot + 1]

    def prefilling(self) -> list[Request]:
        """Seated requests whose prompt is not read yet, in the order of their slots."""
        return [request for request in self._seats if request and request.is_prefilling]

    def decoding(self) -> list[Request]:
        """Seated requests that decode, in the order of their slots."""
        return [request for request in self._seats if request and not request.is_prefilling]
