"""Penalties, biases and bans: what the host tells the graph of each row, by plain definition."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_trt.decode.adjust import History, join
from dflash_trt.decode.request import SamplingParams

VOCAB = 12
TOKENS = st.lists(st.integers(0, VOCAB - 1), max_size=12)


def plain(
    logits: npt.NDArray[np.float64], params: SamplingParams, prompt: list[int], output: list[int],
    bad_words: list[list[int]], end_ids: list[int],
) -> npt.NDArray[np.float64]:  # fmt: skip
    """The definition, one id at a time, for the token after `output`."""
    times, text = Counter(output), prompt + output
    made = logits.copy()
    for v in range(VOCAB):
        if v in text:
            r = params.repetition_penalty
            made[v] = made[v] / r if made[v] > 0 else made[v] * r
        made[v] -= params.frequency_penalty * times[v]
        made[v] -= params.presence_penalty * (times[v] > 0)
        made[v] += params.logit_bias.get(v, 0.0)
        banned = len(output) < params.min_tokens and v in end_ids
        for word in bad_words:
            before = word[:-1]
            ends = text[len(text) - len(before) :] == before if len(before) <= len(text) else False
            banned = banned or (v == word[-1] and ends)
        if banned:
            made[v] = -1e30
    return made


def applied(logits: npt.NDArray[np.float64], rows: Any, r: int) -> npt.NDArray[np.float64]:
    """What the graph computes for row r of a single slot."""
    made = logits.copy()
    for i, v in enumerate(rows.ids[0, r]):
        value = logits[v]
        if rows.seen[0, r, i] > 0:
            value = value / rows.repetition[0] if value > 0 else value * rows.repetition[0]
        value -= rows.frequency[0] * rows.count[0, r, i]
        value -= rows.presence[0] * min(rows.count[0, r, i], 1.0)
        made[v] = max(value + rows.bias[0, r, i], -1e30)
    return made


@settings(max_examples=300, deadline=None)
@given(
    prompt=TOKENS, output=TOKENS, drafts=TOKENS,
    repetition=st.sampled_from([1.0, 1.3, 0.7]), presence=st.sampled_from([0.0, 0.5]),
    frequency=st.sampled_from([0.0, -0.25]), min_tokens=st.integers(0, 9),
    bias=st.dictionaries(st.integers(0, VOCAB - 1), st.sampled_from([2.0, -3.0]), max_size=3),
    bad_words=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3), max_size=3),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_every_row_is_adjusted_as_if_its_drafts_were_the_output(
    prompt: list[int], output: list[int], drafts: list[int], repetition: float, presence: float,
    frequency: float, min_tokens: int, bias: dict[int, float], bad_words: list[list[int]],
    seed: int,
) -> None:  # fmt: skip
    params = SamplingParams(
        repetition_penalty=repetition, presence_penalty=presence, frequency_penalty=frequency,
        min_tokens=min_tokens, logit_bias=bias,
    )  # fmt: skip
    history = History(params, prompt, bad_words, end_ids=[1, 2])
    history.extend(output[:3])
    history.extend(output[3:])
    num_rows = len(drafts) + 2
    rows = join([(params, history.rows(drafts, num_rows))], num_rows)
    assert rows is not None
    assert rows.ids.shape == rows.bias.shape == (1, num_rows, rows.ids.shape[2])
    logits = np.random.default_rng(seed).normal(0, 3, VOCAB)
    for r in range(len(drafts) + 1):
        wanted = plain(logits, params, prompt, output + drafts[:r], bad_words, [1, 2])
        found = applied(logits, rows, r)
        banned = wanted <= -1e29
        np.testing.assert_array_equal(found <= -1e29, banned)
        np.testing.assert_allclose(found[~banned], wanted[~banned], rtol=1e-5, atol=1e-5)


def test_slots_without_adjustments_are_padded_with_what_changes_nothing() -> None:
    params = SamplingParams(repetition_penalty=2.0, logit_bias={5: 1.0})
    history = History(params, [3, 4, 5], [], [])
    rows = join([(SamplingParams(), None), (params, history.rows([7], 2))], 2)
    assert rows is not None
    assert rows.ids.shape == (2, 2, 4)
    assert not rows.seen[0].any()
    assert not rows.bias[0].any()
    assert rows.repetition.tolist() == [1.0, 2.0]
    assert join([(SamplingParams(), None)], 2) is None
