"""What a client asks for, and what it gets: one request's parameters, deltas and final result."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from dflash_trt.decode.logprobs import TokenLogprob
from dflash_trt.errors import RequestError
from dflash_trt.text.stop import FinishReason
from dflash_trt.text.unicode import check_unicode

MAX_SEED = 2**62 - 1
MAX_LOGPROBS = 20
MAX_BAD_WORDS = 64
MAX_BIASES = 1024


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen and when to end. Out-of-range values are refused, never clamped."""

    max_tokens: int | None = None  # None: as many as the engine's max_seq_len allows
    temperature: float = 0.0  # 0 is greedy
    top_k: int = 0  # 0 is off
    top_p: float = 1.0  # 1 is off
    min_p: float = 0.0  # 0 is off
    seed: int | None = None  # None: a random one
    min_tokens: int = 0  # end ids are banned until so many tokens are out
    repetition_penalty: float = 1.0  # 1 is off
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # token id -> added
    bad_words: Sequence[str] = ()  # also with a space before them
    logprobs: int | None = None  # alternatives beside the chosen token's own; None is off
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        _whole("max_tokens", 1 if self.max_tokens is None else self.max_tokens, 1, 1 << 30)
        _whole("top_k", self.top_k, 0, 1 << 30)
        _whole("seed", 0 if self.seed is None else self.seed, 0, MAX_SEED)
        _number("temperature", self.temperature, 0.0, 100.0)
        _number("top_p", self.top_p, 0.0, 1.0)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _whole("min_tokens", self.min_tokens, 0, 1 << 30)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens {self.min_tokens} is more than max_tokens {self.max_tokens}"
            )
        _whole("logprobs", 0 if self.logprobs is None else self.logprobs, 0, MAX_LOGPROBS)
        _check_lists(self.logit_bias, self.bad_words)
        for text in (text for text in self.stop if isinstance(text, str)):
            check_unicode("a stop string", text)
        if self.top_p == 0.0:
            raise RequestError("top_p is 0, allowed are values above 0 up to 1")
        if 0.0 < self.temperature < 1e-3:
            raise RequestError(
                f"temperature is {self.temperature}, allowed are 0 (greedy) and 0.001 to 100"
            )

    @property
    def has_penalties(self) -> bool:
        """Whether the history changes logits."""
        off = (1.0, 0.0, 0.0)
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != off

    @property
    def adjusts_logits(self) -> bool:
        """Whether any row's logits are changed before the choice."""
        return bool(self.has_penalties or self.logit_bias or self.bad_words or self.min_tokens > 0)


@dataclass(frozen=True)
class Delta:
    """What one step brought to one request: new token ids and the text that is now certain."""

    request_id: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None = None
    error: str = ""  # what failed, beside the finish reason "error"
    logprobs: tuple[TokenLogprob, ...] | None = None  # of each id, where the request asks for them

    @classmethod
    def merged(cls, deltas: Sequence[Delta]) -> Delta:
        """One delta for several of one request, oldest first; there must be one."""
        if len(deltas) == 1:
            return deltas[0]
        return replace(
            deltas[-1],
            token_ids=tuple(token for delta in deltas for token in delta.token_ids),
            text="".join(delta.text for delta in deltas),
            logprobs=_joined(deltas),
        )


def _joined(deltas: Sequence[Delta]) -> tuple[TokenLogprob, ...] | None:
    if all(delta.logprobs is None for delta in deltas):
        return None
    return tuple(entry for delta in deltas for entry in delta.logprobs or ())


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
        offered, accepted = self.offered, self.accepted
        for position in range(num_offered):
            offered[position] += 1
        # An output that ended inside the block delivers fewer than were accepted.
        for position in range(min(num_offered, num_accepted, num_delivered)):
            accepted[position] += 1

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


def _check_lists(logit_bias: Mapping[int, float], bad_words: Sequence[str]) -> None:
    if len(logit_bias) > MAX_BIASES:
        raise RequestError(f"logit_bias has {len(logit_bias)} ids, allowed are {MAX_BIASES}")
    for token, bias in logit_bias.items():
        _whole("a logit_bias id", token, 0, 1 << 30)
        _number(f"logit_bias of {token}", bias, -100.0, 100.0)
    if isinstance(bad_words, str):
        raise RequestError("bad_words must be a list of strings, not one string")
    if len(bad_words) > MAX_BAD_WORDS:
        raise RequestError(f"{len(bad_words)} bad_words, allowed are {MAX_BAD_WORDS}")
    for word in bad_words:
        if not isinstance(word, str) or not word.strip():
            raise RequestError(f"bad word {word!r} is not text")
        check_unicode("a bad word", word)
