"""Log-probabilities of delivered tokens, from the target's raw logits (before any filter)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dflash_trt.runtime.session import F32


@dataclass(frozen=True)
class TokenLogprob:
    """One delivered token; `top` are the likeliest ids with theirs, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


def token_logprobs(logits: F32, tokens: Sequence[int], num_top: int) -> list[TokenLogprob]:
    """Log-softmax of rows [n, V] at n tokens, with the `num_top` likeliest ids of each row."""
    rows = logits[: len(tokens)]
    peak = rows.max(axis=-1, keepdims=True)
    total = np.log(np.exp(rows - peak).sum(axis=-1, dtype=np.float64))
    results = []
    for row, token, top, log_total in zip(rows, tokens, peak[:, 0], total, strict=True):
        shift = float(top) + float(log_total)
        best = np.argpartition(-row, num_top)[:num_top] if num_top else np.empty(0, np.int64)
        ranked = sorted(((float(row[i]) - shift, -int(i)) for i in best), reverse=True)
        results.append(
            TokenLogprob(
                int(token),
                float(row[token]) - shift,
                tuple((-negative, value) for value, negative in ranked),
            )
        )
    return results
