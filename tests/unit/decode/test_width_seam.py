"""What a width policy is asked and told, and that no width changes a token."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from toy import TOKENIZER, Client, ToySession, limits, random_job

from dflash_trt.decode.request import DecodeStats, SamplingParams
from dflash_trt.decode.scheduler import Scheduler


class Script:
    """Gives widths in turn, and keeps what it is asked and told."""

    def __init__(self, widths: Sequence[int]) -> None:
        self.widths = list(widths)
        self.asked: list[list[DecodeStats]] = []
        self.told: list[tuple[int, int, bool]] = []

    def width(self, stats: Sequence[DecodeStats]) -> int:
        self.asked.append(list(stats))
        return self.widths[(len(self.asked) - 1) % len(self.widths)]

    def observe(self, width: int, num_slots: int, seconds: float, is_prefill: bool) -> None:
        assert seconds >= 0
        self.told.append((width, num_slots, is_prefill))


def test_a_step_between_two_widths_is_not_told() -> None:
    policy = Script([1, 1, 3, 3, 1, 1])
    session = ToySession(limits())
    running = Scheduler(session, TOKENIZER, (), policy)
    _, stats = running.submit([1] * 7, SamplingParams(max_tokens=60))
    for _ in range(2 + 5):
        running.step()
    ran = [(call.rows.tokens.shape[1], call.num_drafts) for call in session.calls]
    # Two chunks; plain; plain but drafting; three; three but drafting nothing, as asked; plain.
    assert ran == [(5, 0), (2, 0), (1, 0), (1, 2), (3, 2), (1, 0), (1, 0)]
    plain, wide = (1, 1, False), (3, 1, False)
    assert policy.told == [(5, 1, True), (2, 1, True), plain, wide, plain, plain]
    assert policy.asked == [[stats]] * 6, "once by the last chunk, then once per decode step"


def test_it_is_asked_about_the_requests_that_decode() -> None:
    policy = Script([2])
    running = Scheduler(ToySession(limits()), TOKENIZER, (), policy)
    params = SamplingParams(max_tokens=60)
    first, second = (running.submit([1], params)[1] for _ in range(2))
    for _ in range(4):
        running.step()
    seen = [[{id(first): 1, id(second): 2}[id(s)] for s in stats] for stats in policy.asked]
    assert seen == [[1], [1], [1, 2], [1, 2]]


@pytest.mark.parametrize("seed", range(5))
def test_widths_that_change_in_every_step_change_no_token(seed: int) -> None:
    rng = random.Random(seed)
    policy = Script([rng.randint(1, 4) for _ in range(101)])
    running, client = Scheduler(ToySession(limits()), TOKENIZER, [63], policy), Client()
    for _ in range(30):
        client.submit(running, random_job(rng))
    client.run(running)
    client.check()
