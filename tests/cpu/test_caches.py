"""Cache rows: nothing is read that was not written, nothing is written that is not one's own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dflash_trt.decode.request import SamplingParams
from dflash_trt.runtime.session import StepRows
from tiny import EngineMaker, Guarded, Recording, Scripted, TinyEngine, TinyPair, greedy

MAX = 40  # max_seq_len of the small engine
BLOCK = 4


@pytest.fixture(scope="module")
def small(pair: TinyPair, make_engine: EngineMaker) -> TinyEngine:
    """An engine that a short text fills to its last token."""
    return make_engine(pair, max_seq_len=MAX)


@pytest.mark.parametrize("room", range(1, BLOCK + 4))
@pytest.mark.parametrize("accept", [0, 1, BLOCK - 1])
def test_generating_to_the_last_token_of_the_engine(
    room: int, accept: int, small: TinyEngine, pair: TinyPair, prompts: list[list[int]]
) -> None:
    prompt = (prompts[31] + prompts[0])[: MAX - room]
    wanted = greedy(pair.target, prompt, room)
    text = [*prompt, *wanted, *[0] * BLOCK]
    inner = small.session(Guarded)
    session = Scripted(inner, lambda slot, at, n: [
        t if j < accept else t + 1 for j, t in enumerate(text[at + 1 : at + 1 + n])
    ])  # fmt: skip
    made = small.generate(prompt, None, session=session)
    assert made.token_ids == wanted
    assert made.finish_reason == "length"
    inner.check_guards()
    for step in session.steps:
        block = BLOCK if step.num_drafts else 0
        rows = step.rows.length + step.rows.tokens.shape[1] + block
        assert rows.max() <= inner.caches["draft_k_0"].shape[2]


def test_a_batch_whose_rows_all_end_at_the_last_token(
    small: TinyEngine, pair: TinyPair, prompts: list[list[int]]
) -> None:
    session = small.session(Guarded)
    scheduler = small.scheduler(session)
    made: dict[int, list[int]] = {}
    wanted = []
    for index in (0, 31, 24):
        room = MAX - len(prompts[index])
        made[scheduler.submit(prompts[index], SamplingParams())[0]] = []
        wanted.append(greedy(pair.target, prompts[index], room))
    while scheduler.has_work:
        for delta in scheduler.step():
            made[delta.request_id].extend(delta.token_ids)
    assert list(made.values()) == wanted
    session.check_guards()


@pytest.mark.parametrize("garbage", [1e30, -3e20, 1.0])
@pytest.mark.parametrize("index", [0, 24, 31])
def test_whatever_lies_in_unwritten_rows_is_never_read(
    garbage: float, index: int, engine: TinyEngine, pair: TinyPair, prompts: list[list[int]]
) -> None:
    session = engine.session(Guarded)
    for _ in range(2):
        session.poison(garbage)
        made = engine.generate(prompts[index], 20, session=session)
        assert made.token_ids == greedy(pair.target, prompts[index], 20)


def test_sliding_layers_read_no_unwritten_rows_either(
    make_pair: Any, make_engine: EngineMaker, prompts: list[list[int]]
) -> None:
    windows = {
        "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    }  # fmt: skip
    pair = make_pair(target=windows, **{**windows, "layer_types": ["sliding_attention"] * 2})
    engine = make_engine(pair)
    made = engine.generate(prompts[0], 20, session=engine.session(Guarded))
    assert made.token_ids == greedy(pair.target, prompts[0], 20)


def test_a_step_leaves_every_slot_outside_its_run_byte_identical(
    engine: TinyEngine, prompts: list[list[int]]
) -> None:
    session = engine.session(Guarded)
    for slot, index in ((0, 24), (1, 0), (2, 31)):
        before = [session.snapshot(s) for s in range(3)]
        run_prompt(engine, session, slot, prompts[index][:8])
        for other in {0, 1, 2} - {slot}:
            assert session.snapshot(other) == before[other]
        assert session.snapshot(slot) != before[slot]


def run_prompt(engine: TinyEngine, session: Guarded, slot: int, tokens: list[int]) -> None:
    session.step(slot, rows_of([tokens], [0], [len(tokens)], [len(tokens)]), BLOCK - 1)


def rows_of(
    tokens: list[list[int]], length: list[int], count: list[int], known: list[int]
) -> StepRows:
    width = max(len(row) for row in tokens)
    padded = np.array([[*row, *[0] * (width - len(row))] for row in tokens], np.int32)
    as_int = [np.array(values, np.int32) for values in (length, count, known)]
    return StepRows.greedy(padded, *as_int)


def test_an_idle_row_keeps_its_committed_rows_and_padding_changes_no_other_row(
    engine: TinyEngine, prompts: list[list[int]]
) -> None:
    """A slot in mid-prompt stands idle while its neighbours decode."""
    wide, alone = engine.session(Guarded), engine.session(Guarded)
    for session in (wide, alone):
        for slot, index in ((0, 0), (1, 31), (2, 1)):
            run_prompt(engine, session, slot, prompts[index][:8])
    kept = {name: cache[1, :, :8].copy() for name, cache in wide.caches.items()}
    tokens = [[3, 1, 4, 1], [], [5, 9, 2, 6]]
    wide.step(0, rows_of(tokens, [8, 8, 8], [4, 0, 4], [1, 0, 1]), BLOCK - 1)
    for slot in (0, 2):
        alone.step(slot, rows_of([tokens[slot]], [8], [4], [1]), BLOCK - 1)
        for name, cache in wide.caches.items():
            np.testing.assert_allclose(cache[slot, :, :9], alone.caches[name][slot, :, :9],
                                       rtol=1e-4, atol=1e-4, err_msg=name)  # fmt: skip
    for name, cache in wide.caches.items():
        np.testing.assert_array_equal(cache[1, :, :8], kept[name], err_msg=name)


def test_a_long_request_leaves_nothing_for_the_short_one_after_it(
    engine: TinyEngine, pair: TinyPair, prompts: list[list[int]]
) -> None:
    session = engine.session()
    engine.generate(prompts[31], 60, session=session)
    for index in (24, 25, 0):
        made = engine.generate(prompts[index], 15, session=session)
        fresh = engine.generate(prompts[index], 15)
        assert made.token_ids == fresh.token_ids == greedy(pair.target, prompts[index], 15)


def test_no_result_is_overwritten_by_a_later_step(
    engine: TinyEngine, prompts: list[list[int]]
) -> None:
    session = Recording(engine.session())
    engine.generate(prompts[0], 20, session=session)
    copies = [step.result.next_tokens.copy() for step in session.steps]
    engine.generate(prompts[31], 20, session=session)
    for step, copy in zip(session.steps, copies, strict=False):
        np.testing.assert_array_equal(step.result.next_tokens, copy)


@pytest.mark.parametrize("seed", range(8))
def test_mixed_requests_over_fewer_slots_equal_their_solo_runs(
    seed: int, trained_engine: TinyEngine, prompts: list[list[int]]
) -> None:
    """Arrivals, lengths, sampling, widths and cancels are random; garbage fills the caches."""
    rng = np.random.default_rng(seed)
    slots, chunk, width = (int(rng.integers(*r)) for r in ((1, 4), (1, 13), (1, 7)))
    session = trained_engine.session(Guarded, max_slots=slots, prefill_chunk=chunk)
    scheduler = trained_engine.scheduler(session, width)
    jobs = []
    for _ in range(8):
        temperature = float(rng.choice([0.0, 0.0, 0.7]))
        params = SamplingParams(
            max_tokens=int(rng.integers(1, 25)), temperature=temperature,
            top_k=int(rng.choice([0, 9])), seed=int(rng.integers(1 << 40)),
        )  # fmt: skip
        jobs.append((prompts[int(rng.integers(len(prompts)))], params))
    made: dict[int, list[int]] = {}
    counts = []
    waiting, cancelled = list(jobs), set()
    while waiting or scheduler.has_work:
        while waiting and (rng.random() < 0.3 or not scheduler.has_work):
            request, stats = scheduler.submit(*waiting.pop(0))
            made[request] = []
            counts.append(stats)
        for delta in scheduler.step():
            made[delta.request_id].extend(delta.token_ids)
        if rng.random() < 0.02 and made:
            cancelled.add(max(made))
            scheduler.cancel(max(made))
    for request, (prompt, params) in enumerate(jobs):
        solo = trained_engine.engine().generate(prompt, params, width=width)
        if request in cancelled:
            assert made[request] == solo.token_ids[: len(made[request])]
        else:
            assert made[request] == solo.token_ids
            assert counts[request] == solo.stats  # the drafts too were as good as alone
    session.check_guards()


def test_what_one_request_overflowed_to_does_not_reach_the_next(
    engine: TinyEngine, prompts: list[list[int]]
) -> None:
    """Dead rows are masked, but zero times NaN is NaN: a released slot is clean."""
    session = engine.session()
    engine.generate(prompts[25], 10, session=session)
    for cache in session.caches.values():
        cache[...] = np.nan
    for slot in range(session.limits.max_slots):
        session.release(slot)
    again = engine.generate(prompts[25], 10, session=session)
    assert again.token_ids == engine.generate(prompts[25], 10).token_ids
