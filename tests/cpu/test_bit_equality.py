"""Logits are equal to the bit however a text is cut into steps: why losslessness is no accident."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from dflash_trt.runtime.session import StepRows
from tiny import EngineMaker, PairMaker, TinyEngine

TEXT = [3, 141, 59, 26, 53, 58, 97, 93, 23, 84, 62, 64, 33, 83, 27, 95, 2, 88, 41, 97]
SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}


@pytest.fixture(scope="module", params=["fp32", "int4"])
def tiny(request: Any, make_pair: PairMaker, make_engine: EngineMaker) -> TinyEngine:
    """Widths that blocks of 32 fit, so that int4 is really packed."""
    pair = make_pair(seed=7, block=8, **SIZES)
    return make_engine(pair, precision=request.param)


def logits_of(tiny: TinyEngine, widths: list[int]) -> npt.NDArray[np.float32]:
    """Logits [len(TEXT), V], the text verified in steps of these widths."""
    session, rows, start = tiny.session(), [], 0
    for width in widths:
        tokens = np.array([TEXT[start : start + width]], np.int32)
        one = np.ones(1, np.int32)
        step = StepRows.greedy(tokens, one * start, one * width, one)
        # What is committed is set by the test: a wrong draft's row is still that text's row.
        made = session.step(0, step, 0, want_logits=True)
        assert made.logits is not None
        rows.append(made.logits[0, :width])
        start += width
    return np.concatenate(rows)


@pytest.mark.parametrize(
    "widths",
    [[1] * 20, [2] * 10, [3, 5, 1, 8, 3], [8, 8, 4], [4, 1, 1, 6, 8], [7, 7, 6]],
)
def test_logits_do_not_depend_on_the_widths_of_steps(tiny: TinyEngine, widths: list[int]) -> None:
    assert sum(widths) == len(TEXT)
    np.testing.assert_array_equal(logits_of(tiny, widths), logits_of(tiny, [5, 5, 5, 5]))
