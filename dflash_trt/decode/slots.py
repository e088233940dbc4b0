"""One seat in the running batch: what the host knows of a request between steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from dflash_trt.decode.request import DecodeStats, SamplingParams
from dflash_trt.text import BlockResult, TextStream


@dataclass
class Slot:
    """A request in its seat. `length` tokens are in the caches; `row` is the next step's row."""

    request_id: int
    prompt: Sequence[int]
    params: SamplingParams
    max_tokens: int
    stream: TextStream
    stats: DecodeStats
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
        self.stats.record(num_offered, committed - 1, result.num_tokens)
        return result
