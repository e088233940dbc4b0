"""One request's output as a whole: its deltas as they come, and what they amount to."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from dflash_trt.decode.logprobs import TokenLogprob
from dflash_trt.decode.request import DecodeStats, Delta
from dflash_trt.decode.slots import Request
from dflash_trt.text.stop import FinishReason


@dataclass(frozen=True)
class Generation:
    """One request that is over. Times are wall clock seconds of this process."""

    text: str
    token_ids: list[int]
    prompt_tokens: int
    finish_reason: FinishReason
    stats: DecodeStats
    ttft_s: float | None  # None: it ended before its first token
    decode_s: float
    seed: int | None = None  # what it was sampled with
    logprobs: tuple[TokenLogprob, ...] | None = None
    error: str = ""

    def to_json(self) -> dict[str, Any]:
        """The fields of `generate --json`."""
        after_first = len(self.token_ids) - 1
        figures = {
            "text": self.text,
            "token_ids": self.token_ids,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": len(self.token_ids),
            "finish_reason": self.finish_reason,
            "steps": self.stats.steps,
            "acceptance_length": self.stats.acceptance_length,
            "accepted_per_position": self.stats.accepted_per_position,
            "ttft_s": self.ttft_s,
            "decode_tokens_per_s": after_first / self.decode_s if after_first > 0 else None,
            "seed": self.seed,
        }
        if self.logprobs is not None:
            figures["logprobs"] = [asdict(entry) for entry in self.logprobs]
        return figures


class Collected:
    """The deltas of one request so far, with the times of the first and the last."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self.deltas: list[Delta] = []
        self._ended_at = 0.0

    @property
    def is_over(self) -> bool:
        """Whether the last delta is there."""
        return bool(self.deltas) and self.deltas[-1].finish_reason is not None

    def add(self, delta: Delta, now: float) -> None:
        """Take the next delta; `now` is a time of the scheduler's clock."""
        self.deltas.append(delta)
        self._ended_at = now

    def generation(self) -> Generation:
        """The whole output; the last delta must be there."""
        whole, request = Delta.merged(self.deltas), self._request
        assert whole.finish_reason is not None
        first = request.first_token_at
        return Generation(
            text=whole.text,
            token_ids=list(whole.token_ids),
            prompt_tokens=len(request.prompt),
            finish_reason=whole.finish_reason,
            stats=request.stats,
            ttft_s=None if first is None else first - request.submitted_at,
            decode_s=0.0 if first is None else self._ended_at - first,
            seed=request.params.seed,
            logprobs=whole.logprobs,
            error=whole.error,
        )
