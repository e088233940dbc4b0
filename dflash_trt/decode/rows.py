"""A step's rows: what the scheduler chose, as the arrays that a session reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dflash_trt.decode.adjust import join
from dflash_trt.decode.request import SamplingParams
from dflash_trt.decode.slots import Request
from dflash_trt.runtime.session import AdjustRows, StepRows

# An idle row is greedy, whatever its slot samples with.
_GREEDY = SamplingParams()

Row = tuple[Request | None, list[int], int]  # request in this slot, its tokens, known ones


@dataclass(frozen=True)
class Batch:
    """One step: rows of neighbouring slots from `first_slot` on; rows without tokens stand idle."""

    is_prefill: bool
    first_slot: int
    rows: Sequence[Row]
    num_drafts: int
    block: int
    least_width: int = 1

    @property
    def want_logits(self) -> bool:
        """Whether any of its requests asks for log-probabilities."""
        return any(
            r is not None and row and r.params.logprobs is not None for r, row, _ in self.rows
        )

    def pack(self) -> StepRows:
        """Pad the rows to one width, `least_width` or wider."""
        rows = self.rows
        width = max(self.least_width, *(len(tokens) for _, tokens, _ in rows))
        tokens = [
            row if len(row) == width else row + [0] * (width - len(row)) for _, row, _ in rows
        ]
        params = [request.params if request and row else _GREEDY for request, row, _ in rows]
        return StepRows(
            tokens=np.array(tokens, np.int32),
            length=np.array([request.length if request else 0 for request, _, _ in rows], np.int32),
            count=np.array([len(row) for _, row, _ in rows], np.int32),
            known=np.array([known for _, _, known in rows], np.int32),
            temperature=np.array([p.temperature for p in params], np.float32),
            top_k=np.array([p.top_k for p in params], np.int32),
            top_p=np.array([p.top_p for p in params], np.float32),
            min_p=np.array([p.min_p for p in params], np.float32),
            seed=np.array([p.seed or 0 for p in params], np.int64),
            adjust=self._adjust(params, min(width, self.block)),
        )

    def _adjust(self, params: list[SamplingParams], num_rows: int) -> AdjustRows | None:
        if not any(p.adjusts_logits for p in params):
            return None
        adjustments = [
            request.history.rows(row[known:], num_rows)
            if request and row and request.history
            else None
            for request, row, known in self.rows
        ]
        return join(list(zip(params, adjustments, strict=True)), num_rows)
