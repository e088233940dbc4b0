"""The adaptive width on a real session: it may change the speed, never the tokens."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from dflash_trt.decode.request import DecodeStats, SamplingParams
from tiny import Recording, TinyEngine


class AnyWidth:
    """Widths at random: whatever a policy may choose, this has chosen it."""

    def __init__(self, block: int, seed: int) -> None:
        self._block, self._random = block, random.Random(seed)

    def width(self, stats: Sequence[DecodeStats]) -> int:
        return self._random.randint(1, self._block)

    def observe(self, width: int, num_slots: int, seconds: float, is_prefill: bool) -> None:
        pass


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_auto_gives_the_tokens_of_plain_decoding(
    temperature: float, trained_engine: TinyEngine, prompts: list[list[int]]
) -> None:
    engine = trained_engine.engine()
    params = SamplingParams(max_tokens=40, temperature=temperature, seed=5)
    policy = engine.auto_width(budget_s=0.2)
    plain = [engine.generate(prompt, params, width=1).token_ids for prompt in prompts[:8]]
    alone = [engine.generate(prompt, params, width=policy).token_ids for prompt in prompts[:8]]
    assert alone == plain
    batch = engine.generate_all([(prompt, params) for prompt in prompts[:8]], width=policy)
    assert [made.token_ids for made in batch] == plain


@pytest.mark.parametrize("seed", range(4))
def test_widths_that_change_at_every_step_change_no_token(
    seed: int, trained_engine: TinyEngine, prompts: list[list[int]]
) -> None:
    engine = trained_engine.engine()
    params = SamplingParams(max_tokens=40)
    jobs = [(prompt, params) for prompt in prompts[:6]]
    plain = [engine.generate(*job, width=1).token_ids for job in jobs]
    made = engine.generate_all(jobs, width=AnyWidth(6, seed))
    assert [one.token_ids for one in made] == plain


def test_measuring_leaves_no_trace(trained_engine: TinyEngine, prompts: list[list[int]]) -> None:
    params = SamplingParams(max_tokens=30)
    fresh = trained_engine.engine().generate(prompts[0], params).token_ids
    session = Recording(trained_engine.session())
    engine = trained_engine.engine(session)
    policy = engine.auto_width(budget_s=0.2)
    assert {step.rows.tokens.shape[1] for step in session.steps} >= {1, 4, 6}
    assert engine.generate(prompts[0], params).token_ids == fresh
    assert policy.costs.slots == (1, 3)
