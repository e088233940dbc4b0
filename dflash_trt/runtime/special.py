"""Which slots of a step choose by more than their largest logit, and their lines of its inputs."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from dflash_trt import contract as c
from dflash_trt.runtime.session import I32, AdjustRows, StepRows


def special_slots(rows: StepRows) -> I32:
    """Rows that sample, or whose logits are adjusted. The others need no line."""
    is_special = rows.temperature > 0
    if rows.adjust is not None:
        for changes in (rows.adjust.seen, rows.adjust.count, rows.adjust.bias):
            is_special = is_special | changes.any(axis=(1, 2))
    return np.flatnonzero(is_special).astype(np.int32)


def special_inputs(rows: StepRows, slots: I32, verified: int, ids: int) -> dict[str, I32 | Any]:
    """The inputs of the step graph that have a line for each of `slots`, which may repeat.

    A step that adjusts nothing gets so many neutral `ids`.
    """
    a = rows.adjust
    if a is None or not len(slots):
        a = neutral(len(rows.tokens), verified, ids)
    values: dict[str, npt.NDArray[Any]] = {
        c.TEMPERATURE: rows.temperature,
        c.TOP_K: rows.top_k,
        c.TOP_P: rows.top_p,
        c.MIN_P: rows.min_p,
        c.SEED: rows.seed,
        c.REPETITION: a.repetition,
        c.PRESENCE: a.presence,
        c.FREQUENCY: a.frequency,
        c.ADJUST_IDS: a.ids,
        c.ADJUST_SEEN: a.seen,
        c.ADJUST_COUNT: a.count,
        c.ADJUST_BIAS: a.bias,
    }
    num_slots = len(rows.tokens)
    source = np.arange(num_slots, dtype=np.int32)
    source[slots] = num_slots + np.arange(len(slots))
    return {
        c.SPECIAL_SLOTS: slots,
        c.CHOICE_SOURCE: source,
        **{name: value[slots] for name, value in values.items()},
    }


def neutral(num_slots: int, verified: int, ids: int) -> AdjustRows:
    """An adjustment that changes nothing: so many ids, with nothing to add to them."""
    off, nothing = np.zeros(num_slots, np.float32), np.zeros((num_slots, verified, ids), np.float32)
    return AdjustRows(off + 1, off, off, nothing.astype(np.int32), nothing, nothing, nothing)
