"""What a client asks for, and what it gets: one request's parameters, deltas and final result."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from dflash_trt.errors import RequestError
from dflash_trt.text.stop import FinishReason

MAX_SEED = 2**62 - 1


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen and when to end. Out-of-range values are refused, never clamped."""

    max_tokens: int | None = None  # None: as many as the engine's max_seq_len allows
    temperature: float = 0.0  # 0 is greedy
    top_k: int = 0  # 0 is off
    top_p: float = 1.0  # 1 is off
    seed: int = 0
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        _whole("max_tokens", 1 if self.max_tokens is None else self.max_tokens, 1, 1 << 30)
        _whole("top_k", self.top_k, 0, 1 << 30)
        _whole("seed", self.seed, 0, MAX_SEED)
        _number("temperature", self.temperature, 0.0, 100.0)
        _number("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0.0:
            raise RequestError("top_p is 0, allowed are values above 0 up to 1")
        if 0.0 < self.temperature < 1e-3:
            raise RequestError(
                f"temperature is {self.temperature}, allowed are 0 (greedy) and 0.001 to 100"
            )


@dataclass(frozen=True)
class Delta:
    """What one step brought to one request: new token ids and the text that is now certain."""

    request_id: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None = None


@dataclass
class DecodeStats:
    """Counts of one request's decode steps, over the tokens that were really delivered."""

    block: int
    steps: int = 0
    tokens: int = 0
    offered: list[int] = field(default_factory=list)  # [block - 1]: steps that verified draft j
    accepted: list[int] = field(default_factory=list)  # [block - 1]: .. and delivered it

    def __post_init__(self) -> None:
        self.offered = self.offered or [0] * (self.block - 1)
        self.accepted = self.accepted or [0] * (self.block - 1)

    def record(self, num_offered: int, num_accepted: int, num_delivered: int) -> None:
        """One step: drafts verified, drafts accepted, tokens delivered (drafts, then the bonus)."""
        self.steps += 1
        self.tokens += num_delivered
        for position in range(num_offered):
            self.offered[position] += 1
            # An output that ended inside the block delivers fewer than were accepted.
            self.accepted[position] += position < min(num_accepted, num_delivered)

    @property
    def acceptance_length(self) -> float | None:
        """Mean tokens per decode step, bonus counted; None before the first step."""
        return self.tokens / self.steps if self.steps else None

    @property
    def accepted_per_position(self) -> list[float]:
        """For each draft position, the share of steps that accepted it, of those that tried."""
        pairs = zip(self.accepted, self.offered, strict=True)
        return [accepted / offered for accepted, offered in pairs if offered]


def _whole(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise RequestError(f"{name} is {value!r}, allowed are whole numbers from {low} to {high}")


def _number(name: str, value: object, low: float, high: float) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or not low <= value <= high:  # type: ignore[arg-type, operator]
        raise RequestError(f"{name} is {value!r}, allowed are numbers from {low:g} to {high:g}")
