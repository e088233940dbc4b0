"""How many tokens a decode step verifies: the seam between the scheduler and what decides it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from dflash_trt.decode.request import DecodeStats
from dflash_trt.errors import ConfigError

AUTO = "auto"


def parse_width(text: str) -> int | None:
    """The number in a choice of the verify width; None for auto. Raises `ConfigError`."""
    if text == AUTO:
        return None
    if not text.isdecimal() or len(text) > 9:
        raise ConfigError(f"width is {text!r}, allowed are {AUTO} and whole numbers from 1")
    return int(text)


class WidthPolicy(Protocol):
    """Chooses verify widths and hears what steps cost. Called by the scheduler's thread only."""

    def width(self, stats: Sequence[DecodeStats]) -> int:
        """Tokens that the next decode step verifies, 1 (no drafter) to the block.

        `stats` are the counts of the requests that will take part, in the order of their slots.
        Asked once per decode step, and once by the last prompt chunk, which drafts for it.
        """

    def observe(self, width: int, num_slots: int, seconds: float, is_prefill: bool) -> None:
        """A step of `num_slots` rows of `width` tokens took `seconds`.

        A decode step is told only if it also drafted width - 1 tokens for the next one: a step
        that changes from one width to another costs something in between.
        """


@dataclass(frozen=True)
class FixedWidth:
    """The same width in every step; 1 is plain decoding."""

    num_tokens: int

    def width(self, stats: Sequence[DecodeStats]) -> int:
        """See `WidthPolicy.width`."""
        return self.num_tokens

    def observe(self, width: int, num_slots: int, seconds: float, is_prefill: bool) -> None:
        """Nothing to learn."""
