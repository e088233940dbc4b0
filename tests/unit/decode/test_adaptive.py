"""The adaptive width against every fixed one, on simulated drafters and machines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from dflash_trt.decode.acceptance import AcceptanceModel
from dflash_trt.decode.adaptive import TRIAL_SHARE, AdaptiveWidth
from dflash_trt.decode.costs import StepCosts
from dflash_trt.decode.request import DecodeStats
from dflash_trt.decode.width import FixedWidth, WidthPolicy

BLOCK = 16
WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16)
SLOTS = (1, 4, 16)

# Chance of each draft of a block, given the ones before it; by the token that it comes after.
Process = Callable[[int], list[float]]


def falling(first: float, factor: float) -> Process:
    chances = [first * factor**position for position in range(BLOCK - 1)]
    return lambda token: chances


CODE, HELD_OUT = falling(0.88, 0.985), falling(0.65, 0.95)
CHAT, NOISE = falling(0.45, 0.9), falling(0.1, 0.8)


def table(plain: float, drafter: float, token: float, slot_token: float) -> StepCosts:
    """Milliseconds of the target, of the drafter, of each token more, of other slots' tokens."""
    return StepCosts(
        WIDTHS,
        SLOTS,
        [
            [plain + (w > 1) * drafter + token * (w - 1) + slot_token * (n - 1) * w for n in SLOTS]
            for w in WIDTHS
        ],
    )


def flat_machine() -> StepCosts:
    return table(20, 6, 0.6, 0.5)


def cpu() -> StepCosts:
    return table(55, 20, 5, 4)


def dear_drafter() -> StepCosts:
    return table(10, 40, 10, 8)


@dataclass
class Live:
    """One request of the simulation. `luck` is by token, so all policies meet the same text."""

    process: Process
    luck: list[float]
    stats: DecodeStats = field(default_factory=lambda: DecodeStats(BLOCK))
    drafted: int = BLOCK

    def step(self, width: int, length: int) -> None:
        done = self.stats.tokens
        width = min(width, self.drafted, length - done)
        chances, accepted = self.process(done), 0
        while accepted < width - 1 and self.luck[done + accepted] < chances[accepted]:
            accepted += 1
        self.stats.record(width - 1, accepted, accepted + 1)


@dataclass
class Outcome:
    tokens_per_s: float
    seconds: Counter[int]  # by width

    def share(self, width: int) -> float:
        return self.seconds[width] / self.seconds.total()


def simulate(
    policy: WidthPolicy, costs: StepCosts, processes: Sequence[Process], *,
    length: int = 300, slots: int = 1, seed: int = 0, limit_ms: int = 1 << 40,
) -> Outcome:  # fmt: skip
    """Run the requests in turn over `slots`; as the scheduler does, a step of a new width is not
    observed, and verifies no more than was drafted for it."""
    noise = np.random.default_rng(seed)
    waiting = [
        Live(process, np.random.default_rng([seed, i]).random(length + BLOCK).tolist())
        for i, process in enumerate(processes)
    ]
    live: list[Live] = []
    seconds: Counter[int] = Counter()
    started: list[Live] = []
    while (waiting or live) and seconds.total() < limit_ms:
        while waiting and len(live) < slots:
            live.append(waiting.pop(0))
            started.append(live[-1])
        width = policy.width([one.stats for one in live])
        is_steady = any(min(one.drafted, length - one.stats.tokens) >= width for one in live)
        took = costs.seconds(width, len(live)) * float(np.exp(0.05 * noise.standard_normal()))
        seconds[width] += took
        for one in live:
            one.step(width, length)
            one.drafted = width
        if is_steady:
            policy.observe(width, len(live), took, False)
        live = [one for one in live if one.stats.tokens < length]
    num_tokens = sum(one.stats.tokens for one in started)
    return Outcome(num_tokens / seconds.total(), seconds)


def against_fixed(
    make: Callable[[], StepCosts], processes: Sequence[Process], **options: int
) -> tuple[Outcome, dict[int, float]]:
    fixed = {
        width: simulate(FixedWidth(width), make(), processes, **options).tokens_per_s
        for width in WIDTHS
    }
    return simulate(AdaptiveWidth(make(), BLOCK), make(), processes, **options), fixed


def changing(first: Process, then: Process, at: int) -> Process:
    return lambda token: first(token) if token < at else then(token)


LOADS = {
    "code": [CODE] * 12,
    "chat": [CHAT] * 12,
    "held out": [HELD_OUT] * 12,
    "noise": [NOISE] * 12,
    "code then chat": [changing(CODE, CHAT, 150)] * 12,
    "chat then code": [changing(CHAT, CODE, 150)] * 12,
    "code requests, then noise": [CODE] * 6 + [NOISE] * 6,
    "noise requests, then code": [NOISE] * 6 + [CODE] * 6,
    "code and noise in turn": [CODE, NOISE] * 6,
}


@pytest.mark.parametrize("make", [flat_machine, cpu, dear_drafter])
@pytest.mark.parametrize("load", LOADS)
def test_one_request_at_a_time_within_3_percent_of_the_best_fixed_width(
    load: str, make: Callable[[], StepCosts]
) -> None:
    ratios = []
    for seed in range(3):
        adaptive, fixed = against_fixed(make, LOADS[load], seed=seed)
        ratios.append(adaptive.tokens_per_s / max(fixed.values()))
    assert np.mean(ratios) >= 0.97


@pytest.mark.parametrize("make", [flat_machine, cpu])
@pytest.mark.parametrize(
    "processes",
    [[CODE] * 8, [NOISE] * 8, [CODE, HELD_OUT] * 4, [CODE, CHAT, HELD_OUT, NOISE] * 2],
    ids=["code", "noise", "code and held out", "mixed"],
)
def test_eight_at_once_within_3_percent_of_the_best_fixed_width(
    processes: list[Process], make: Callable[[], StepCosts]
) -> None:
    """While the same eight run: tokens per second are not the time until the last one is done."""
    options = {"slots": 8, "length": 4000, "limit_ms": 30_000}
    ratios = []
    for seed in range(2):
        adaptive, fixed = against_fixed(make, processes, seed=seed, **options)
        ratios.append(adaptive.tokens_per_s / max(fixed.values()))
    assert np.mean(ratios) >= 0.97


def test_requests_that_differ_are_served_better_than_by_any_fixed_width() -> None:
    adaptive, fixed = against_fixed(cpu, [CODE, NOISE] * 6)
    assert adaptive.tokens_per_s > 1.1 * max(fixed.values())


def test_where_drafting_loses_it_falls_back_to_plain_decoding_and_trials_cost_little() -> None:
    adaptive, fixed = against_fixed(cpu, [NOISE] * 8, length=600)
    assert max(fixed, key=lambda width: fixed[width]) == 1
    assert adaptive.share(1) > 0.95
    # The first steps, which learn that drafting loses, are no trials.
    assert adaptive.tokens_per_s > (1 - TRIAL_SHARE - 0.005) * fixed[1]
    assert adaptive.tokens_per_s > 1.5 * fixed[BLOCK]


def test_a_drafter_that_can_never_pay_is_not_even_tried() -> None:
    policy = AdaptiveWidth(table(10, 400, 10, 8), BLOCK)
    assert simulate(policy, dear_drafter(), [CODE]).share(1) == 1.0


def test_plain_decoding_finds_out_when_drafting_begins_to_pay() -> None:
    text = changing(NOISE, CODE, 300)
    adaptive = simulate(AdaptiveWidth(cpu(), BLOCK), cpu(), [text], length=1200)
    plain = simulate(FixedWidth(1), cpu(), [text], length=1200)
    assert adaptive.tokens_per_s > 1.4 * plain.tokens_per_s


def test_it_follows_a_machine_whose_wide_steps_become_dear() -> None:
    policy = AdaptiveWidth(flat_machine(), BLOCK)
    simulate(policy, flat_machine(), [CODE] * 2)
    slow = cpu()
    late = simulate(policy, slow, [CODE] * 12, seed=1)
    fixed = [simulate(FixedWidth(w), cpu(), [CODE] * 12, seed=1).tokens_per_s for w in WIDTHS]
    assert late.tokens_per_s > 0.93 * max(fixed)


def test_prompt_chunks_and_cut_steps_teach_nothing() -> None:
    policy = AdaptiveWidth(cpu(), BLOCK)
    width = policy.width([DecodeStats(BLOCK)])
    before = policy.costs.to_json()
    policy.observe(width, 1, 9.0, True)
    policy.observe(width - 1, 1, 9.0, False)
    assert policy.costs.to_json() == before
    policy.observe(width, 1, 9.0, False)
    assert policy.costs.to_json() != before


def test_the_same_history_gives_the_same_widths() -> None:
    runs = [simulate(AdaptiveWidth(cpu(), BLOCK), cpu(), [CODE, CHAT] * 3) for _ in range(2)]
    assert runs[0] == runs[1]


def test_a_request_alone_and_no_request_at_all() -> None:
    policy = AdaptiveWidth(cpu(), BLOCK)
    assert policy.width([]) in WIDTHS
    stats = DecodeStats(BLOCK)
    assert policy.width([stats]) in WIDTHS
    assert policy.width([stats, DecodeStats(BLOCK)]) in WIDTHS
    assert policy.width([]) in WIDTHS


def feed(model: AcceptanceModel, stats: DecodeStats, process: Process, width: int) -> None:
    luck = np.random.default_rng(0)
    for _ in range(200):
        accepted = 0
        while accepted < width - 1 and luck.random() < process(0)[accepted]:
            accepted += 1
        stats.record(width - 1, accepted, accepted + 1)
        model.update([stats])


@pytest.mark.parametrize("process", [CODE, HELD_OUT, CHAT, NOISE])
def test_estimates_meet_the_truth_where_it_was_seen(process: Process) -> None:
    model, stats = AcceptanceModel(BLOCK), DecodeStats(BLOCK)
    feed(model, stats, process, BLOCK)
    truth = 1 + np.concatenate([[0.0], np.cumsum(np.cumprod(process(0)))])
    np.testing.assert_allclose(model.expected_tokens(), truth, rtol=0.2)


def test_a_narrow_width_tells_of_wider_ones() -> None:
    model, stats = AcceptanceModel(BLOCK), DecodeStats(BLOCK)
    feed(model, stats, CODE, BLOCK)
    like_code = model.expected_tokens()[-1]
    feed(model, stats, NOISE, 4)
    low = model.expected_tokens()[-1]
    feed(model, stats, falling(0.9, 1.0), 4)
    assert low < 1.5 < 0.6 * like_code < model.expected_tokens()[-1]


def test_a_new_request_starts_from_the_running_average_and_an_old_one_keeps_its_own() -> None:
    model, good, bad = AcceptanceModel(BLOCK), DecodeStats(BLOCK), DecodeStats(BLOCK)
    for _ in range(50):
        good.record(7, 7, 8)
        bad.record(7, 0, 1)
        model.update([good, bad])

    def tokens(*stats: DecodeStats) -> float:
        """Of a step of width 8 for these; `good` and `bad` never leave, so nothing is forgotten."""
        model.update([good, bad, *stats])
        return float(model.expected_tokens()[7])

    both = tokens()
    a_new_one = tokens(DecodeStats(BLOCK)) - both
    assert tokens() == both
    model.update([bad])
    only_bad = float(model.expected_tokens()[7])
    assert only_bad < 1.5 < a_new_one < both - only_bad
    assert both - only_bad > 6
