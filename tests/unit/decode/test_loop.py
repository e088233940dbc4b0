"""The engine loop: threads, event loops, slow readers, cancelling, deadlines, idling, memory."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
import time
import tracemalloc

import pytest
from toy import Call, random_job, solo
from toy_loop import LONG, WAIT_S, Gate, outcome, serving

from dflash_trt.decode.admission import RunConfig
from dflash_trt.errors import CapacityError, QueueFull, RequestError


def test_a_handle_streams_and_keeps_the_whole() -> None:
    with serving() as loop:
        handle = loop.submit([1, 2, 3], LONG)
        deltas = list(handle)
        wanted = solo([1, 2, 3], LONG)
        assert [t for d in deltas for t in d.token_ids] == wanted[0]
        assert "".join(d.text for d in deltas) == wanted[1]
        assert [d.finish_reason for d in deltas if d.finish_reason] == ["length"]
        assert deltas[-1].finish_reason == "length"
        assert list(handle) == []
        assert outcome(handle) == wanted
        made = handle.result()
        assert made.stats.tokens == 79
        assert made.ttft_s is not None
        assert made.ttft_s >= 0
        assert made.to_json()["completion_tokens"] == 80


def test_many_threads_submit_cancel_and_read_at_once() -> None:
    failures: list[BaseException] = []

    def client(seed: int) -> None:
        rng = random.Random(seed)
        try:
            for _ in range(15):
                job = random_job(rng)
                handle = loop.submit(*job)
                wanted = solo(*job)
                how = rng.choice(["read", "result", "cancel", "leave"])
                if how == "read":
                    assert [t for d in handle for t in d.token_ids] == wanted[0]
                elif how == "cancel":
                    next(handle)
                    handle.cancel()
                    tokens, _, reason = outcome(handle)
                    assert tokens == wanted[0][: len(tokens)]
                    assert reason in ("cancelled", wanted[2])
                elif how == "result":
                    assert outcome(handle) == wanted
        except BaseException as error:
            failures.append(error)

    with serving() as loop:
        threads = [threading.Thread(target=client, args=(seed,)) for seed in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        assert loop.drain(WAIT_S)
    assert failures == []


def test_async_readers_of_two_event_loops_share_the_engine() -> None:
    async def read(seed: int) -> None:
        job = random_job(random.Random(seed))
        handle = loop.submit(*job)
        tokens = []
        async for delta in handle:
            tokens += delta.token_ids
        assert tokens == solo(*job)[0]
        assert (await handle.result_async()).token_ids == tokens
        late = loop.submit(*job)
        assert (await late.result_async()).token_ids == tokens

    async def many(first: int) -> None:
        await asyncio.wait_for(asyncio.gather(*(read(first + i) for i in range(20))), WAIT_S)

    with serving() as loop:
        other = threading.Thread(target=lambda: asyncio.run(many(1000)))
        other.start()
        asyncio.run(many(0))
        other.join(WAIT_S)
        assert not other.is_alive()


def test_an_async_reader_that_is_cancelled_loses_no_delta() -> None:
    gate = Gate()

    async def read() -> list[int]:
        handle = loop.submit([4], LONG)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(anext(handle), 0.05)
        assert handle._wakers == []
        gate.go_on.set()
        return [token async for delta in handle for token in delta.token_ids]

    with serving(gate) as loop:
        assert asyncio.run(read()) == solo([4], LONG)[0]


def test_a_reader_whose_event_loop_is_gone_harms_nobody() -> None:
    gate = Gate()
    with serving(gate) as loop:
        handle = loop.submit([4], LONG)
        reader = asyncio.new_event_loop()
        task = reader.create_task(anext(handle))  # type: ignore[arg-type]
        reader.run_until_complete(asyncio.sleep(0.02))
        gone, handle._wakers = list(handle._wakers), []
        task.cancel()
        reader.run_until_complete(asyncio.gather(task, return_exceptions=True))
        reader.close()
        handle._wakers = gone
        gate.go_on.set()
        assert outcome(handle) == solo([4], LONG)


def test_a_client_that_never_reads_blocks_nobody_and_reads_one_delta_at_last() -> None:
    with serving(max_slots=2) as loop:
        lazy = loop.submit([9], LONG)
        for seed in range(30):
            job = random_job(random.Random(seed))
            assert outcome(loop.submit(*job)) == solo(*job)
        lazy.result(WAIT_S)
        (delta,) = list(lazy)
        assert list(delta.token_ids) == solo([9], LONG)[0]
        assert delta.finish_reason == "length"


def test_errors_are_raised_where_they_are_made() -> None:
    gate = Gate()
    with serving(gate, max_slots=1, config=RunConfig(max_waiting=2)) as loop:
        with pytest.raises(RequestError):
            loop.submit([], LONG)
        with pytest.raises(CapacityError):
            loop.submit([1] * 96, LONG)
        with pytest.raises(RequestError):
            loop.submit([1], LONG, deadline_s=-1)
        handles = [loop.submit([1], LONG) for _ in range(3)]
        with pytest.raises(QueueFull):
            loop.submit([1], LONG)
        handles[1].cancel()
        gate.go_on.set()
        assert [outcome(h)[2] for h in handles] == ["length", "cancelled", "length"]
        assert outcome(loop.submit([1], LONG)) == solo([1], LONG)


@pytest.mark.parametrize("phase", ["waiting", "prefilling", "decoding"])
def test_cancelling_takes_at_most_the_running_step(phase: str) -> None:
    steps, at = [0], {"waiting": 1, "prefilling": 2, "decoding": 7}[phase]
    gate = Gate()

    def on_step(call: Call) -> None:
        steps[0] += 1
        if steps[0] == at:
            gate(call)

    with serving(on_step, max_slots=1, prefill_chunk=2) as loop:
        handle = loop.submit([1] * 8, LONG)
        other = loop.submit([2], LONG)
        assert gate.inside.wait(WAIT_S)
        (other if phase == "waiting" else handle).cancel()
        gate.go_on.set()
        made = (other if phase == "waiting" else handle).result(WAIT_S)
        assert made.finish_reason == "cancelled"
        assert bool(made.token_ids) == (phase == "decoding")
        survivor, prompt = (handle, [1] * 8) if phase == "waiting" else (other, [2])
        survivor_params = LONG
        assert outcome(survivor) == solo(prompt, survivor_params)


def test_leaving_the_handles_context_cancels() -> None:
    gate = Gate()
    with serving(gate) as loop:
        with loop.submit([1], LONG) as handle:
            assert gate.inside.wait(WAIT_S)
        gate.go_on.set()
        assert handle.result(WAIT_S).finish_reason == "cancelled"
        with loop.submit([1], LONG) as handle:
            list(handle)
        assert handle.result().finish_reason == "length"


def test_a_deadline_is_kept() -> None:
    with serving(lambda call: time.sleep(0.005), max_slots=1) as loop:
        first = loop.submit([1], LONG, deadline_s=0.06)
        second = loop.submit([2], LONG, deadline_s=0.02)
        made, waited = first.result(WAIT_S), second.result(WAIT_S)
    assert (made.finish_reason, waited.finish_reason) == ("timeout", "timeout")
    assert 0 < len(made.token_ids) < 80
    assert waited.token_ids == []
    assert waited.ttft_s is None


def test_result_does_not_wait_for_ever() -> None:
    gate = Gate()
    with serving(gate) as loop:
        handle = loop.submit([1], LONG)
        with pytest.raises(TimeoutError):
            handle.result(0.02)
        gate.go_on.set()
        handle.result(WAIT_S)


def test_an_idle_loop_burns_no_time() -> None:
    with serving() as loop:
        loop.submit([1], LONG).result(WAIT_S)
        time.sleep(0.02)
        clock = time.pthread_getcpuclockid(loop._thread.ident)  # type: ignore[arg-type]
        before = time.clock_gettime(clock)
        time.sleep(0.3)
        assert time.clock_gettime(clock) - before < 0.002


@pytest.mark.slow
def test_memory_is_flat_over_20000_requests() -> None:
    rng = random.Random(1)
    jobs = [random_job(rng, most=6) for _ in range(200)]

    def rounds(count: int) -> int:
        for start in range(count):
            batch = [loop.submit(*jobs[(start * 50 + i) % 200]) for i in range(50)]
            for i, handle in enumerate(batch):
                if i % 7 == 0:
                    handle.cancel()
                elif i % 3:
                    handle.result(WAIT_S)
            batch[-1].result(WAIT_S)
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    with serving(max_slots=4) as loop:
        tracemalloc.start()
        try:
            first = rounds(40)
            last = rounds(400)
        finally:
            tracemalloc.stop()
    assert last - first < 30_000, f"{last - first} bytes more after 20,000 requests"
