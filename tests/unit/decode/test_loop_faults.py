"""Failures of an engine loop: sessions that raise or hang, bugs, draining and closing."""

from __future__ import annotations

import random
import threading
import time

import pytest
from toy import Call, random_job, solo
from toy_loop import LONG, WAIT_S, Gate, outcome, serving

from dflash_trt.decode.admission import RunConfig
from dflash_trt.decode.handle import Handle
from dflash_trt.decode.loop import LoopState
from dflash_trt.decode.telemetry import NoTelemetry, StepEvent
from dflash_trt.errors import EngineStopped, QueueFull


def test_a_step_that_raises_ends_its_requests_and_the_loop_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    steps = [0]

    def on_step(call: Call) -> None:
        steps[0] += 1
        if steps[0] == 9:
            raise RuntimeError("device lost")

    with serving(on_step, max_slots=2) as loop:
        handles = [loop.submit([i], LONG) for i in range(8)]
        made = [handle.result(WAIT_S) for handle in handles]
        failed = [m for m in made if m.finish_reason == "error"]
        assert 1 <= len(failed) <= 2
        assert all("RuntimeError: device lost" in m.error for m in failed)
        good = [(i, m) for i, m in enumerate(made) if m.finish_reason != "error"]
        assert all(m.token_ids == solo([i], LONG)[0] for i, m in good)
        assert loop.is_healthy
        assert outcome(loop.submit([1], LONG)) == solo([1], LONG)
    assert "device lost" in caplog.text


def test_steps_that_keep_raising_kill_the_loop_and_nobody_hangs() -> None:
    gate = Gate()

    def on_step(call: Call) -> None:
        gate(call)
        raise RuntimeError("device lost")

    with serving(on_step, max_slots=1, config=RunConfig(max_failed_steps=2)) as loop:
        handles = [loop.submit([i], LONG) for i in range(6)]
        gate.go_on.set()
        made = [handle.result(WAIT_S) for handle in handles]
        assert [m.finish_reason for m in made] == ["error"] * 6
        assert "step failed" in made[0].error
        assert "engine died: RuntimeError: device lost" in made[5].error
        loop._thread.join(WAIT_S)
        assert not loop.is_healthy
        assert loop.state is LoopState.DEAD
        with pytest.raises(EngineStopped, match=r"dead.*device lost"):
            loop.submit([1], LONG)
        assert loop.drain(WAIT_S)


def test_a_bug_in_the_host_code_kills_the_loop_and_nobody_hangs() -> None:
    class Broken(NoTelemetry):
        def on_step(self, event: StepEvent) -> None:
            if event.kind == "decode":
                raise ZeroDivisionError("ours")

    with serving(telemetry=Broken()) as loop:
        handles = [loop.submit([i], LONG) for i in range(2)]
        for handle in handles:
            assert "ZeroDivisionError: ours" in handle.result(WAIT_S).error
        loop._thread.join(WAIT_S)
        assert not loop.is_healthy


def test_draining_finishes_what_runs_and_refuses_what_comes() -> None:
    gate = Gate()
    with serving(gate, max_slots=1) as loop:
        handles = [loop.submit([i], LONG) for i in range(5)]
        assert not loop.drain(0.02)
        with pytest.raises(EngineStopped, match="drains"):
            loop.submit([1], LONG)
        assert loop.is_healthy
        gate.go_on.set()
        assert loop.drain(WAIT_S)
        assert [outcome(h) for h in handles] == [solo([i], LONG) for i in range(5)]


def test_closing_under_load_ends_every_request() -> None:
    stop = threading.Event()
    handles: list[Handle] = []

    def client(seed: int) -> None:
        rng = random.Random(seed)
        while not stop.is_set():
            try:
                handles.append(loop.submit(*random_job(rng)))
            except QueueFull:
                time.sleep(0.001)
            except EngineStopped:
                return

    with serving(config=RunConfig(max_waiting=20)) as loop:
        threads = [threading.Thread(target=client, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        time.sleep(0.1)
        assert loop.close(WAIT_S)
        stop.set()
        for thread in threads:
            thread.join(WAIT_S)
    reasons = {handle.result(0).finish_reason for handle in handles}
    assert reasons <= {"stop", "length", "shutdown"}
    assert "shutdown" in reasons
    assert loop.close()
    with pytest.raises(EngineStopped, match="closed"):
        loop.submit([1], LONG)


def test_closing_does_not_wait_for_a_session_that_hangs() -> None:
    gate = Gate()
    with serving(gate) as loop:
        handle = loop.submit([1], LONG)
        assert gate.inside.wait(WAIT_S)
        assert not loop.close(0.02)
        assert outcome(handle) == ([], "", "shutdown")
        gate.go_on.set()
        assert loop.close(WAIT_S)
