"""What the run half asks of a loaded step graph: one method. CPU and GPU sessions are alike.

Slots are seats in the caches; a step runs on any run of neighbouring slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

I32 = npt.NDArray[np.int32]
F32 = npt.NDArray[np.float32]


@dataclass(frozen=True)
class SessionLimits:
    """What the engine was built for."""

    block: int  # K: anchor counted, so at most K - 1 drafts a step
    max_seq_len: int  # prompt and generated tokens of one request
    max_slots: int
    prefill_chunk: int
    vocab_size: int
    has_logits: bool = True  # whether a step can return them
    max_adjusted: int | None = None  # ids whose logits a step can adjust, per slot; None: any


@dataclass(frozen=True)
class AdjustRows:
    """Penalties, biases and bans of a step: strengths [B]; touched ids P of each verified row R."""

    repetition: F32  # [B], 1 is off
    presence: F32  # [B]
    frequency: F32  # [B]
    ids: I32  # [B, R, P], R = min(S, block); an id may repeat with equal values
    seen: F32  # [B, R, P]: 1 where the id is in the row's prompt or output
    count: F32  # [B, R, P]: times in the row's output
    bias: F32  # [B, R, P]


@dataclass(frozen=True)
class StepRows:
    """One step's rows; every array has one row per slot (B), see `contract` for the meanings."""

    tokens: I32  # [B, S]
    length: I32  # [B]
    count: I32  # [B]
    known: I32  # [B]
    temperature: F32  # [B]
    top_k: I32  # [B]
    top_p: F32  # [B]
    min_p: F32  # [B]
    seed: npt.NDArray[np.int64]  # [B]
    adjust: AdjustRows | None = None

    @classmethod
    def greedy(cls, tokens: I32, length: I32, count: I32, known: I32) -> StepRows:
        """Rows that choose the likeliest token."""
        num_slots = len(tokens)
        off = np.zeros(num_slots, np.float32)
        return cls(
            tokens=tokens, length=length, count=count, known=known, temperature=off,
            top_k=np.zeros(num_slots, np.int32), top_p=off + 1, min_p=off,
            seed=np.zeros(num_slots, np.int64),
        )  # fmt: skip


@dataclass(frozen=True)
class StepResult:
    """What the host reads back: the tokens committed, and the next row of each slot."""

    committed: I32  # [B]
    next_tokens: I32  # [B, 1 + num_drafts]: bonus, then drafts
    logits: npt.NDArray[np.float32] | None = None  # [B, R, V], R = min(S, block); on request


class Session(Protocol):
    """A loaded step graph with its caches."""

    @property
    def limits(self) -> SessionLimits:
        """The engine's limits."""

    def step(
        self, first_slot: int, rows: StepRows, num_drafts: int, *, want_logits: bool = False
    ) -> StepResult:
        """Run one step on slots first_slot.. and draft `num_drafts` tokens (0: only verify).

        The caches of those slots are updated in place. The result is the caller's to keep.
        `want_logits` asks for the target's logits of the verified rows as well.
        """

    def release(self, slot: int) -> None:
        """The slot's request is over: its caches need not be kept."""
