"""The scheduler on a toy session: exactness in any interleaving, fairness, limits, failures."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy import TOKENIZER, Call, Client, ToySession, limits, random_job, scheduler, solo

from dflash_trt.decode.admission import RunConfig
from dflash_trt.decode.engine import Engine
from dflash_trt.decode.request import SamplingParams
from dflash_trt.decode.telemetry import NoTelemetry, StepEvent
from dflash_trt.errors import StepError


@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 1 << 30), slots=st.integers(1, 6), width=st.integers(1, 4),
    chunk=st.integers(1, 9), right=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
)  # fmt: skip
def test_200_requests_in_any_interleaving_get_the_tokens_of_their_solo_runs(
    seed: int, slots: int, width: int, chunk: int, right: float
) -> None:
    rng = random.Random(seed)
    session = ToySession(limits(max_slots=slots, prefill_chunk=chunk), right)
    running, client = scheduler(session, width), Client()
    jobs = [random_job(rng) for _ in range(200)]
    while jobs or running.has_work:
        while jobs and (not running.has_work or rng.random() < 0.4):
            client.submit(running, jobs.pop())
        client.take(running.step())
        if rng.random() < 0.05:
            running.cancel(rng.choice(list(client.jobs)))
    client.check()
    assert len(session.released) >= len([t for t in client.tokens.values() if t])


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("submit"), st.integers(0, 99)),
            st.tuples(st.just("cancel"), st.integers(0, 20)),
            st.tuples(st.just("hurry"), st.integers(0, 99)),
            st.tuples(st.just("fail"), st.just(0)),
            st.tuples(st.just("step"), st.integers(1, 6)),
        ),
        max_size=60,
    )
)
def test_any_sequence_of_calls_leaves_every_request_exact_or_ended(
    calls: list[tuple[str, int]],
) -> None:
    now, broken = [0.0], [False]

    def on_step(call: Call) -> None:
        now[0] += 1.0
        if broken[0]:
            broken[0] = False
            raise OSError("lost")

    session = ToySession(limits(max_slots=2), on_step=on_step)
    running, client = scheduler(session, clock=lambda: now[0]), Client()
    for what, number in calls:
        if what in ("submit", "hurry"):
            deadline = 1.0 + number % 9 if what == "hurry" else None
            client.submit(running, random_job(random.Random(number)), deadline)
        elif what == "cancel":
            running.cancel(number)
        elif what == "fail":
            broken[0] = True
        else:
            for _ in range(number):
                client.take(running.step())
    client.run(running)
    client.check()


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1 << 30), slots=st.integers(1, 5), chunk=st.integers(1, 6))
def test_prompts_and_blocks_alternate_and_arrival_is_the_order(
    seed: int, slots: int, chunk: int
) -> None:
    """The policy as its documentation says it, over random loads."""
    rng, kinds = random.Random(seed), Kinds()
    session = ToySession(limits(max_slots=slots, prefill_chunk=chunk))
    running, client = scheduler(session, telemetry=kinds), Client()
    jobs = [random_job(rng) for _ in range(25)]
    answered: list[int] = []
    before = ""
    while jobs or running.has_work:
        while jobs and (not running.has_work or rng.random() < 0.3):
            client.submit(running, jobs.pop())
        reading, decoding = running._slots.prefilling(), running._slots.decoding()
        deltas = running.step()
        client.take(deltas)
        answered += [d.request_id for d in deltas if d.request_id not in answered]
        if decoding and before == "prefill":
            assert kinds.last == "decode"
        if reading and before == "decode":
            assert kinds.last == "prefill"
        before = kinds.last
    assert answered == sorted(answered), "the first to come is the first to answer"
    client.check()


class Kinds(NoTelemetry):
    last = ""

    def on_step(self, event: StepEvent) -> None:
        self.last = event.kind


def test_a_long_prompt_and_a_long_output_both_go_on() -> None:
    session = ToySession(limits(prefill_chunk=2))
    running, client = scheduler(session, 1), Client()
    long_output = SamplingParams(max_tokens=60, ignore_eos=True)
    client.submit(running, ([1], long_output))
    client.take(running.step())
    late = client.submit(running, ([2] * 40, SamplingParams(max_tokens=5, ignore_eos=True)))
    for _ in range(2 * 20):  # 20 chunks, each behind one block
        client.take(running.step())
    assert client.tokens[late]
    assert len(client.tokens[0]) >= 20
    client.run(running)
    client.check()


@pytest.mark.parametrize("phase", ["waiting", "prefilling", "decoding", "over", "unknown"])
def test_cancelling_in_every_phase_is_told_by_the_very_next_delta(phase: str) -> None:
    session = ToySession(limits(max_slots=1, prefill_chunk=2))
    running, client = scheduler(session), Client()
    other = client.submit(running, ([1] * 8, SamplingParams(max_tokens=20, ignore_eos=True)))
    mine = other
    if phase == "waiting":
        mine = client.submit(running, ([2, 3], SamplingParams(max_tokens=20)))
    for _ in range({"prefilling": 2, "decoding": 6}.get(phase, 1)):
        client.take(running.step())
    if phase == "over":
        client.run(running)
    steps, was_over = len(session.calls), phase in ("over", "unknown")
    running.cancel(999 if phase == "unknown" else mine)
    running.cancel(999 if phase == "unknown" else mine)
    client.take(running.sweep())
    assert len(session.calls) == steps, "no step comes before the answer"
    if not was_over:
        assert client.last[mine].finish_reason == "cancelled"
        assert bool(client.tokens[mine]) == (phase == "decoding")
        assert (session.released == [0]) == (phase != "waiting")
    again = client.submit(running, ([2, 3], SamplingParams(max_tokens=20)))
    client.run(running)
    client.check()
    assert client.last[again].finish_reason in ("stop", "length")


@pytest.mark.parametrize("how", ["cancelled", "error"])
def test_text_that_was_kept_back_is_shown_when_a_request_is_ended(how: str) -> None:
    prompt = [3, 1, 4]
    tokens, text, _ = solo(prompt, SamplingParams(max_tokens=8, ignore_eos=True))
    session = ToySession(limits(), on_step=failing(4))
    running, client = scheduler(session, 1), Client()
    params = SamplingParams(max_tokens=50, stop=[text[:5] + "\x01"], ignore_eos=True)
    request = client.submit(running, (prompt, params))
    for _ in range(3):
        client.take(running.step())
    assert client.text[request] == ""
    if how == "cancelled":
        running.cancel(request)
    client.run(running)
    assert client.last[request].finish_reason == how
    assert client.text[request] == TOKENIZER.decode(tokens[:3])


@pytest.mark.parametrize("phase", ["waiting", "prefilling", "decoding"])
def test_a_deadline_ends_a_request_in_every_phase(phase: str) -> None:
    now = [0.0]
    session = ToySession(limits(max_slots=1, prefill_chunk=2))
    running, client = scheduler(session, clock=lambda: now[0]), Client()
    first = {"waiting": None, "prefilling": 2.5, "decoding": 6.5}[phase]
    mine = client.submit(running, ([1] * 8, SamplingParams(max_tokens=60, ignore_eos=True)), first)
    if phase == "waiting":
        mine = client.submit(running, ([7], SamplingParams(max_tokens=4)), 2.5)
    client.submit(running, ([9], SamplingParams(max_tokens=4)), 1e9)
    while running.has_work:
        now[0] += 1.0
        client.take(running.step())
        if mine in client.last:
            assert now[0] <= {"waiting": 3, "prefilling": 3, "decoding": 7}[phase]
            break
    assert client.last[mine].finish_reason == "timeout"
    assert bool(client.tokens[mine]) == (phase == "decoding")
    client.run(running)
    client.check()


def failing(at: int, times: int = 1) -> Any:
    steps = [0]

    def on_step(call: Call) -> None:
        steps[0] += 1
        if at <= steps[0] < at + times:
            raise RuntimeError(f"device lost in step {steps[0]}")

    return on_step


@pytest.mark.parametrize("at", range(1, 16))
def test_a_step_that_raises_ends_its_own_requests_only(at: int) -> None:
    session = ToySession(limits(max_slots=2), on_step=failing(at))
    running, client = scheduler(session), Client()
    rng = random.Random(at)
    for _ in range(6):
        client.submit(running, random_job(rng))
    client.run(running)
    client.check()
    if len(session.calls) < at:
        return
    bad = session.calls[at - 1]
    failed = [d for d in client.last.values() if d.finish_reason == "error"]
    assert 1 <= len(failed) <= len(bad.rows.count)
    assert all(
        f"step failed with RuntimeError: device lost in step {at}" in d.error for d in failed
    )
    assert not running.is_dead
    assert running.num_failed_steps == 0


def test_idle_slots_between_those_of_a_failed_step_fail_too() -> None:
    """A prompt half read lies between two requests that decode: its caches are part of the step."""
    fail = [False]

    def on_step(call: Call) -> None:
        if fail[0] and len(call.rows.count) == 3:
            raise RuntimeError("lost")

    session = ToySession(limits(prefill_chunk=2), on_step=on_step)
    running, client = scheduler(session, 1), Client()
    endless = SamplingParams(max_tokens=50, ignore_eos=True)
    middle = SamplingParams(max_tokens=1)
    for params in (endless, middle, endless):
        client.submit(running, ([1, 2], params))
    for _ in range(6):
        client.take(running.step())
    assert list(client.last) == [1]
    client.submit(running, ([3] * 30, endless))
    client.take(running.step())
    fail[0] = True
    client.take(running.step())
    client.take(running.step())
    assert sorted(r for r, d in client.last.items() if d.finish_reason == "error") == [0, 2, 3]


def test_steps_that_keep_failing_make_the_scheduler_dead() -> None:
    session = ToySession(limits(max_slots=1), on_step=failing(1, times=99))
    running, client = scheduler(session, config=RunConfig(max_failed_steps=2)), Client()
    for _ in range(3):
        client.submit(running, ([1], SamplingParams(max_tokens=3)))
    client.take(running.step())
    assert not running.is_dead
    client.take(running.step())
    assert running.is_dead
    assert isinstance(running.last_error, RuntimeError)


@pytest.mark.parametrize(("committed", "bonus"), [(0, 1), (9, 1), (-1, 1), (1, -1)])
def test_a_session_that_answers_nonsense_ends_that_request_only(committed: int, bonus: int) -> None:
    class Nonsense(ToySession):
        def step(self, *args: Any, **kwargs: Any) -> Any:
            result = super().step(*args, **kwargs)
            if len(self.calls) == 4:
                result.committed[0] = committed
                result.next_tokens[0, 0] = bonus
            return result

    running, client = scheduler(Nonsense(limits(max_slots=2))), Client()
    for _ in range(3):
        client.submit(running, ([1, 2], SamplingParams(max_tokens=30, ignore_eos=True)))
    client.run(running)
    failed = [d for d in client.last.values() if d.finish_reason == "error"]
    assert [d.request_id for d in failed] == [0]
    del client.jobs[0], client.last[0]
    client.check()


def test_the_synchronous_engine_raises_what_the_session_raised() -> None:
    session = ToySession(limits(), on_step=failing(3))
    engine = Engine(session, TOKENIZER, ())
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    with pytest.raises(StepError, match="device lost") as caught:
        engine.generate([1], params)
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert session.released == [0]
    assert engine.generate([1], params).token_ids == solo([1], params)[0]


def test_many_requests_in_this_thread_come_back_in_order() -> None:
    engine = Engine(ToySession(limits()), TOKENIZER, ())
    rng = random.Random(5)
    jobs = [(p, dataclasses.replace(q, ignore_eos=True)) for p, q in map(random_job, [rng] * 300)]
    made = engine.generate_all(iter(jobs))
    assert [(g.token_ids, g.text, g.finish_reason) for g in made] == [solo(*job) for job in jobs]
