"""An engine directory, loaded: text in, text out. What `generate`, `verify` and benches use."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_trt.decode.request import DecodeStats, Delta, SamplingParams
from dflash_trt.decode.scheduler import Scheduler
from dflash_trt.engine_dir import EngineDir, open_engine
from dflash_trt.runtime.ort import OrtSession
from dflash_trt.runtime.session import Session, SessionLimits
from dflash_trt.text import Tokenizer
from dflash_trt.text.stop import FinishReason


@dataclass(frozen=True)
class Generation:
    """One finished request. Times are wall clock seconds of this process."""

    text: str
    token_ids: list[int]
    prompt_tokens: int
    finish_reason: FinishReason
    stats: DecodeStats
    ttft_s: float
    decode_s: float

    def to_json(self) -> dict[str, Any]:
        """The fields of `generate --json`."""
        after_first = len(self.token_ids) - 1
        return {
            "text": self.text,
            "token_ids": self.token_ids,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": len(self.token_ids),
            "finish_reason": self.finish_reason,
            "steps": self.stats.steps,
            "acceptance_length": self.stats.acceptance_length,
            "accepted_per_position": self.stats.accepted_per_position,
            "ttft_s": self.ttft_s,
            "decode_tokens_per_s": after_first / self.decode_s if after_first else None,
        }


class Engine:
    """A session with its tokenizer and stop ids."""

    def __init__(self, session: Session, tokenizer: Tokenizer, eos_ids: Sequence[int]) -> None:
        self.session = session
        self.tokenizer = tokenizer
        self.eos_ids = tuple(dict.fromkeys((*eos_ids, *tokenizer.stop_ids)))

    @classmethod
    def load(cls, path: Path, num_threads: int | None = None) -> Engine:
        """Open and check an engine directory and load it. Raises `EngineDirError`."""
        return cls.from_dir(open_engine(path), num_threads)

    @classmethod
    def from_dir(cls, engine: EngineDir, num_threads: int | None = None) -> Engine:
        """Load an engine directory that is already open."""
        choices, pair = engine.config.choices, engine.config.pair
        limits = SessionLimits(
            block=choices.block,
            max_seq_len=choices.max_seq_len,
            max_slots=choices.max_slots,
            prefill_chunk=choices.prefill_chunk,
            vocab_size=pair.target.vocab_size,
        )
        session = OrtSession(engine.model, pair, limits, num_threads)
        return cls(session, Tokenizer.load(engine.path), pair.target.eos_token_ids)

    def scheduler(self, width: int | None = None, padded_width: int | None = None) -> Scheduler:
        """A scheduler over this session; verify `width` defaults to the whole block.

        One at a time: schedulers share the session's slots.
        """
        chosen = self.session.limits.block if width is None else width
        return Scheduler(self.session, self.tokenizer, self.eos_ids, chosen, padded_width)

    def generate(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        width: int | None = None,
        padded_width: int | None = None,
        on_delta: Callable[[Delta], None] | None = None,
    ) -> Generation:
        """Run one request to its end. `width` 1 is plain decoding, without the drafter."""
        scheduler = self.scheduler(width, padded_width)
        _, stats = scheduler.submit(prompt, params)
        start = time.perf_counter()
        first = start
        token_ids: list[int] = []
        parts: list[str] = []
        reason: FinishReason | None = None
        while reason is None:
            for delta in scheduler.step():
                if not token_ids:
                    first = time.perf_counter()
                token_ids.extend(delta.token_ids)
                parts.append(delta.text)
                reason = delta.finish_reason
                if on_delta is not None:
                    on_delta(delta)
        return Generation(
            text="".join(parts),
            token_ids=token_ids,
            prompt_tokens=len(prompt),
            finish_reason=reason,
            stats=stats,
            ttft_s=first - start,
            decode_s=time.perf_counter() - first,
        )
