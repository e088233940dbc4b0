"""The bench's acceptance under sampling: the right distributions, and no better than can be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from dflash_trt.decode.request import SamplingParams
from tiny import EngineMaker, PairMaker, TinyEngine
from tiny.reference import draft_states, target_states

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCH))
    import sampled_acceptance

    return sampled_acceptance


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [
        (0.7, 0, 1.0, 0.0),
        (1.5, 0, 0.8, 0.0),
        (1.0, 9, 0.6, 0.0),
        (1.0, 0, 0.9, 0.2),
        (1, 500, 1, 0),
    ],
)
def test_distributions_are_those_of_transformers_filters(
    bench: Any, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    logits = np.random.default_rng(0).normal(0, 2, (5, 90)).astype(np.float32)
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    scores = TemperatureLogitsWarper(float(temperature))(None, torch.from_numpy(logits).double())
    scores = TopKLogitsWarper(top_k)(None, scores) if top_k else scores
    scores = TopPLogitsWarper(float(top_p))(None, scores) if top_p < 1 else scores
    scores = MinPLogitsWarper(min_p)(None, scores) if min_p else scores
    np.testing.assert_allclose(bench.distribution(logits, params), scores.softmax(-1), atol=1e-12)


def test_blocks_are_read_with_the_logits_that_they_were_drafted_and_verified_from(
    bench: Any, trained_engine: TinyEngine, prompts: list[list[int]]
) -> None:
    engine = bench.tapped_engine(trained_engine.directory.path)
    params = SamplingParams(max_tokens=24, temperature=9.0, seed=4)
    made = engine.generate(prompts[1], params)
    text, pair = [*prompts[1], *made.token_ids], trained_engine.pair
    logits, states = target_states(pair.target, text)
    features = np.concatenate(
        [states[i + 1] for i in trained_engine.facts.drafter.target_layer_ids], -1
    )
    at = len(prompts[1])  # of the anchor
    assert len(engine.session.blocks) == made.stats.offered[0] > 4
    assert sum(made.stats.accepted) > 4
    for block in engine.session.blocks:
        count = min(block.num_accepted + 1, len(block.drafts), len(text) - at)
        np.testing.assert_allclose(block.target[:count], logits[at : at + count], atol=1e-4)
        drafted = draft_states(pair, features[:at], text[at], 6)[2][: len(block.drafts)]
        np.testing.assert_allclose(block.drafter, drafted, atol=1e-4)
        at += block.num_accepted + 1


def test_shared_noise_accepts_nearly_what_rejection_sampling_would(
    bench: Any, trained_engine: TinyEngine, prompts: list[list[int]]
) -> None:
    engine = bench.tapped_engine(trained_engine.directory.path)
    params = [SamplingParams(max_tokens=30, temperature=9.0, seed=s) for s in range(10)]
    tally = bench.measure(engine, prompts[:8], params, 6)
    made = tally.to_json()
    ours, best = (made[way]["by_position"][0] for way in ("ours", "rejection_sampling"))
    blocks = made["blocks"]
    assert blocks > 600
    assert 0.1 < best < 0.9
    # One token from each side agrees with probability sum(min(p, q)) at most, whatever the way.
    assert ours < best + 4 * (best / blocks) ** 0.5
    assert ours > best / (2 - best) - 4 * (best / blocks) ** 0.5  # what Gumbel-max guarantees


def test_drafts_that_no_logits_tell_are_refused(
    bench: Any, make_pair: PairMaker, make_engine: EngineMaker, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = make_engine(make_pair(dflash2={}))
    with pytest.raises(SystemExit):
        bench.tapped_engine(engine.directory.path)
    assert "its drafter is of DFlash 2" in capsys.readouterr().err


def test_the_overlap_is_what_rejection_sampling_accepts(bench: Any) -> None:
    rng = np.random.default_rng(1)
    params = SamplingParams(temperature=1.0, top_k=12)
    rows = rng.normal(0, 1.5, (2, 1, 40)).astype(np.float32)
    tally = bench.Tally()
    tally.add(bench.Verified([0], 0, *rows), params)
    p, q = (bench.distribution(row, params)[0] for row in rows)
    drafts = rng.choice(40, 200_000, p=q)
    accepted = (rng.random(len(drafts)) < p[drafts] / q[drafts]).mean()
    assert abs(tally.overlap[0] - accepted) < 5 * 0.5 / len(drafts) ** 0.5
