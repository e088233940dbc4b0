"""Many unlike requests at once on the real pair: each gets the tokens of its solo run."""

from __future__ import annotations

import random
from typing import Any

import pytest

from dflash_trt.decode.admission import RunConfig
from dflash_trt.decode.request import SamplingParams

pytestmark = pytest.mark.slow
NUM_REQUESTS = 64
WAIT_S = 120.0


def mixed(prompts: list[list[int]], words: list[str]) -> list[tuple[list[int], SamplingParams]]:
    """Prompts of 1 token up to a whole chat, greedy and sampled, every kind of filter."""
    rng = random.Random(8)
    made = []
    for index in range(NUM_REQUESTS):
        prompt = prompts[index % len(prompts)]
        params = SamplingParams(
            max_tokens=rng.randint(1, 6),
            temperature=rng.choice([0.0, 0.0, 0.7, 1.2]),
            top_k=rng.choice([0, 0, 20, 300]),
            top_p=rng.choice([1.0, 0.9]),
            min_p=rng.choice([0.0, 0.02]),
            repetition_penalty=rng.choice([1.0, 1.0, 1.2]),
            frequency_penalty=rng.choice([0.0, 0.0, 0.5]),
            seed=rng.randrange(1 << 60),
            stop=[rng.choice(words)] if rng.random() < 0.4 else (),
        )
        made.append((prompt[-rng.choice([1, 7, 7, 25, 25, len(prompt)]) :], params))
    return made


def test_64_mixed_requests_equal_their_solo_runs(make_engine: Any, prompts: Any) -> None:
    engine = make_engine("fp32")
    wanted = mixed(prompts, [" the", "\n", ".", " a", ","])
    solo = [engine.generate(*job, width=1) for job in wanted]
    with engine.start(4, config=RunConfig(max_waiting=NUM_REQUESTS)) as loop:
        handles = [loop.submit(*job) for job in wanted]
        for index in range(0, NUM_REQUESTS, 8):  # some wait, some read, some decode
            handles[index].cancel()
        for index in range(5, NUM_REQUESTS, 8):
            next(handles[index])
            handles[index].cancel()
        made = [handle.result(WAIT_S) for handle in handles]
    for result, alone in zip(made, solo, strict=True):
        if result.finish_reason == "cancelled":
            assert result.token_ids == alone.token_ids[: len(result.token_ids)]
        else:
            assert (result.token_ids, result.text) == (alone.token_ids, alone.text)
            assert result.finish_reason == alone.finish_reason
    reasons = [result.finish_reason for result in made]
    assert {*reasons} == {"cancelled", "length", "stop"}
    assert reasons.count("cancelled") <= NUM_REQUESTS // 4
