"""Penalties, biases and bans on the logits of chosen token ids, row by row.

Repetition as in arXiv 1909.05858 section 4.1 (ids of prompt and output); presence and frequency as
OpenAI's API defines them (ids of the output). Only ids that a row's history touches are read and
written, so the cost follows the history and not the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

from dflash_trt.contract import DRAFT_ROWS
from dflash_trt.graph import (
    DType,
    Tensor,
    add,
    cast,
    cond,
    constant,
    div,
    gather_last,
    less,
    maximum,
    minimum,
    mul,
    reshape,
    scatter_last,
    scope,
    size,
    sub,
    take,
    where,
)

NEVER = -1e30  # the logit of a token that cannot be chosen


@dataclass(frozen=True)
class Adjustment:
    """What to adjust: strengths [M], and per verified row R and touched id P, [M, R, P]."""

    repetition: Tensor
    presence: Tensor
    frequency: Tensor
    ids: Tensor
    seen: Tensor
    count: Tensor
    bias: Tensor

    @property
    def is_needed(self) -> Tensor:
        """Whether this step adjusts any id: a scalar."""
        return less(constant(0, DType.I32), size(self.ids, 2))

    def for_drafts(self, draft_offsets: Tensor) -> Adjustment:
        """The same for draft rows: each gets the first verified row's history.

        A draft may be wrong about what comes right before it; that costs acceptance, no more.
        """
        first = constant([0], DType.I32)
        rows = reshape(mul(draft_offsets, 0), (1, DRAFT_ROWS, 1))

        def spread(x: Tensor) -> Tensor:
            return add(take(x, first, 1), cast(rows, x.dtype))

        return Adjustment(
            self.repetition, self.presence, self.frequency,
            spread(self.ids), spread(self.seen), spread(self.count), spread(self.bias),
        )  # fmt: skip


def adjust(logits: Tensor, adjustment: Adjustment) -> Tensor:
    """Adjusted logits [M, R, V]; the logits themselves in a step that adjusts nothing."""
    with scope("adjust"):
        return cond(adjustment.is_needed, lambda: _adjusted(logits, adjustment), lambda: logits)


def _adjusted(logits: Tensor, a: Adjustment) -> Tensor:
    slots = a.repetition.shape[0]

    def per_slot(x: Tensor) -> Tensor:
        return reshape(x, (slots, 1, 1))

    value = gather_last(logits, a.ids)
    penalty = per_slot(a.repetition)
    zero = constant(0.0, DType.F32)
    repeated = where(less(zero, value), div(value, penalty), mul(value, penalty))
    value = where(less(zero, a.seen), repeated, value)
    is_in_output = minimum(a.count, 1.0)
    value = sub(value, mul(per_slot(a.frequency), a.count))
    value = sub(value, mul(per_slot(a.presence), is_in_output))
    return scatter_last(logits, a.ids, maximum(add(value, a.bias), NEVER))
