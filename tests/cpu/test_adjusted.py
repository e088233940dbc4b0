"""Penalties, bans, biases and log-probabilities of whole generations, against transformers."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from dflash_trt.decode.request import SamplingParams
from dflash_trt.errors import RequestError
from tiny import TinyEngine, TinyPair

COUNT = 24


@torch.no_grad()
def reference(
    pair: TinyPair, prompt: list[int], params: SamplingParams, bad_words: list[list[int]]
) -> list[int]:
    """Greedy, a token at a time, each rule applied as its definition says."""
    output: list[int] = []
    for _ in range(COUNT):
        text, times = prompt + output, Counter(output)
        logits = pair.target(torch.tensor([text])).logits[0, -1].double().numpy()
        for v in set(text):
            r = params.repetition_penalty
            logits[v] = logits[v] / r if logits[v] > 0 else logits[v] * r
        for v, n in times.items():
            logits[v] -= params.frequency_penalty * n + params.presence_penalty
        for v, bias in params.logit_bias.items():
            logits[v] += bias
        for word in bad_words:
            before = len(word) - 1
            if not before or text[-before:] == word[:-1]:
                logits[word[-1]] = -np.inf
        output.append(int(logits.argmax()))
    return output


CASES: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.4},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.9},
    "all": {"repetition_penalty": 1.2, "presence_penalty": 0.4, "frequency_penalty": 0.3},
    "encouraged": {"repetition_penalty": 0.8, "frequency_penalty": -0.5},
    "bias": {"logit_bias": {7: 30.0, 9: 29.0}, "frequency_penalty": 2.0},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("width", [1, 2, 6])
def test_penalties_equal_their_definition_at_every_width(
    case: str, width: int, trained_pair: TinyPair, trained_engine: TinyEngine, prompts: Any
) -> None:
    params = SamplingParams(max_tokens=COUNT, **CASES[case])
    for prompt in (prompts[0], prompts[27]):
        wanted = reference(trained_pair, prompt, params, [])
        found = trained_engine.generate(prompt, COUNT, width=width, **CASES[case])
        assert found.token_ids == wanted


def test_penalties_change_the_text(trained_engine: TinyEngine, prompts: Any) -> None:
    plain = trained_engine.generate(prompts[0], COUNT).token_ids
    for case in CASES.values():
        assert trained_engine.generate(prompts[0], COUNT, **case).token_ids != plain


def test_adjusted_and_plain_requests_side_by_side(trained_engine: TinyEngine, prompts: Any) -> None:
    """Rows of one batch: each is adjusted by its own history alone."""
    options = [{}, CASES["all"], CASES["bias"], {"temperature": 0.9, "seed": 3, **CASES["all"]}]
    jobs = [(prompts[i], SamplingParams(max_tokens=COUNT, **o)) for i, o in enumerate(options)]
    together = trained_engine.engine().generate_all(jobs, width=4)
    for (prompt, _), option, made in zip(jobs, options, together, strict=True):
        assert made.token_ids == trained_engine.generate(prompt, COUNT, **option).token_ids


@pytest.mark.parametrize("width", [1, 6])
def test_bad_words_of_several_tokens_are_banned_after_their_beginning(
    width: int, trained_pair: TinyPair, trained_engine: TinyEngine, prompts: Any
) -> None:
    plain = trained_engine.generate(prompts[0], COUNT).token_ids
    tokenizer = trained_engine.tokenizer
    pair = next(
        (a, b) for a, b in itertools.pairwise(plain)
        if tokenizer.encode(tokenizer.decode([a, b]), add_special_tokens=False) == [a, b]
    )  # fmt: skip
    word = tokenizer.decode(list(pair))
    spaced = tokenizer.encode(f" {word}", add_special_tokens=False)
    wanted = reference(trained_pair, prompts[0], SamplingParams(), [list(pair), spaced])
    found = trained_engine.generate(prompts[0], COUNT, width=width, bad_words=(word,))
    assert found.token_ids == wanted
    assert found.token_ids != plain


def test_min_tokens_bans_every_end_until_then(trained_engine: TinyEngine, prompts: Any) -> None:
    plain = trained_engine.generate(prompts[0], COUNT).token_ids
    end = plain[4]
    stopped = trained_engine.generate(prompts[0], COUNT, eos=[end])
    assert stopped.token_ids == plain[: plain.index(end) + 1]
    for minimum in (6, 9):
        longer = trained_engine.generate(prompts[0], COUNT, eos=[end], min_tokens=minimum, width=6)
        assert end not in longer.token_ids[:minimum]
        assert len(longer.token_ids) >= minimum


@torch.no_grad()
@pytest.mark.parametrize("width", [1, 6])
def test_logprobs_are_the_log_softmax_of_the_raw_logits(
    width: int, trained_pair: TinyPair, trained_engine: TinyEngine, prompts: Any
) -> None:
    options = {"logprobs": 3, "repetition_penalty": 1.3, "temperature": 0.7, "seed": 5}
    made = trained_engine.generate(prompts[1], COUNT, width=width, **options)
    assert made.logprobs is not None
    assert [entry.token_id for entry in made.logprobs] == made.token_ids
    text = [*prompts[1], *made.token_ids]
    rows = trained_pair.target(torch.tensor([text])).logits[0, len(prompts[1]) - 1 : -1]
    wanted = rows.log_softmax(-1)
    for row, entry in zip(wanted, made.logprobs, strict=True):
        assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=1e-3)
        best = row.topk(3)
        assert [token for token, _ in entry.top] == best.indices.tolist()
        assert [value for _, value in entry.top] == pytest.approx(best.values.tolist(), abs=1e-3)
    without = trained_engine.generate(
        prompts[1], COUNT, width=width, **{**options, "logprobs": None}
    )
    assert without.logprobs is None
    assert without.token_ids == made.token_ids


@pytest.mark.parametrize(
    "bad",
    [
        {"repetition_penalty": 0.0}, {"presence_penalty": 2.5}, {"frequency_penalty": -3.0},
        {"min_p": 1.5}, {"min_tokens": -1}, {"logprobs": 21}, {"logit_bias": {3: 101.0}},
        {"logit_bias": {-1: 1.0}}, {"bad_words": "word"}, {"bad_words": [" "]},
        {"max_tokens": 3, "min_tokens": 4}, {"temperature": float("nan")}, {"seed": -1},
    ],
)  # fmt: skip
def test_values_out_of_range_are_refused_by_name(bad: dict[str, Any]) -> None:
    name = "min_tokens" if "min_tokens" in bad else next(iter(bad)).replace("_words", " word")
    with pytest.raises(RequestError, match=name.replace("bad word", "bad.word")):
        SamplingParams(**bad)


def test_an_unset_seed_is_another_one_each_time(trained_engine: TinyEngine, prompts: Any) -> None:
    options = {"temperature": 3.0, "seed": None}
    made = [trained_engine.generate(prompts[0], COUNT, **options) for _ in range(2)]
    assert made[0].seed != made[1].seed
    assert made[0].token_ids != made[1].token_ids
    again = trained_engine.generate(prompts[0], COUNT, temperature=3.0, seed=made[0].seed)
    assert again.token_ids == made[0].token_ids
