"""A step that never ends, as after a fault of the driver: it is seen, and nobody waits for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from toy import solo
from toy_loop import LONG, WAIT_S, Gate, outcome, serving

from dflash_trt.decode import loop as loop_module
from dflash_trt.decode.admission import RunConfig
from dflash_trt.decode.loop import EngineLoop, LoopState
from dflash_trt.errors import EngineStopped

SHORT = RunConfig(max_step_s=0.2)
NEVER = RunConfig(max_step_s=0)


@contextmanager
def hanging(config: RunConfig, **options: Any) -> Iterator[tuple[EngineLoop, Gate]]:
    """A loop whose steps hang; at the end the step that hung goes on."""
    gate = Gate()
    with serving(gate, config=config, **options) as loop:
        try:
            yield loop, gate
        finally:
            gate.go_on.set()
            loop.close(WAIT_S)
            loop._thread.join(WAIT_S)


def test_a_step_that_hangs_kills_the_loop_and_nobody_waits() -> None:
    with hanging(SHORT, max_slots=1) as (loop, gate):
        handles = [loop.submit([i], LONG) for i in range(3)]
        assert gate.inside.wait(WAIT_S)
        assert loop.is_healthy
        made = [handle.result(WAIT_S) for handle in handles]
        assert [m.finish_reason for m in made] == ["error"] * 3
        assert "a step has not ended for 0.2 s" in made[0].error
        assert loop.wait_end(WAIT_S)
        assert not loop.is_healthy
        assert loop.state is LoopState.DEAD
        with pytest.raises(EngineStopped, match=r"dead.*not ended for 0\.2 s"):
            loop.submit([1], LONG)
        started = time.monotonic()
        assert loop.drain()
        assert not loop.close()  # without a limit of time: the thread still hangs
        assert time.monotonic() - started < 1
        gate.go_on.set()
        loop._thread.join(WAIT_S)
        assert loop.close()
        assert loop.state is LoopState.DEAD


def test_closing_a_loop_that_hangs_waits_no_longer_than_for_its_step() -> None:
    with hanging(SHORT) as (loop, gate):
        handle = loop.submit([1], LONG)
        assert gate.inside.wait(WAIT_S)
        closed: list[bool] = []
        closing = threading.Thread(target=lambda: closed.append(loop.close()))
        closing.start()
        closing.join(WAIT_S)
        assert closed == [False]
        assert outcome(handle) == ([], "", "shutdown")


def test_steps_and_waits_within_their_time_are_no_reason() -> None:
    def slow(call: object) -> None:
        time.sleep(0.03)

    with serving(slow, config=RunConfig(max_step_s=0.5)) as loop:
        started = time.monotonic()
        handles = [loop.submit([i], LONG) for i in range(3)]
        assert [outcome(h) for h in handles] == [solo([i], LONG) for i in range(3)]
        assert time.monotonic() - started > 0.5
        time.sleep(0.8)  # idle
        assert loop.is_healthy


def test_deadlines_and_cancelling_do_not_wait_for_a_step_that_hangs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loop_module, "WATCH_PERIOD_S", 0.05)
    with hanging(NEVER, max_slots=2) as (loop, gate):
        kept = loop.submit([1], LONG)
        late = loop.submit([2], LONG, deadline_s=0.1)
        left = loop.submit([3], LONG)
        assert gate.inside.wait(WAIT_S)
        left.cancel()
        assert outcome(late) == ([], "", "timeout")
        assert outcome(left) == ([], "", "cancelled")
        assert not kept.is_over
        assert loop.num_requests == 3  # they keep their seats as long as the step may use them
        gate.go_on.set()
        assert outcome(kept) == solo([1], LONG)
        assert loop.drain(WAIT_S)
        assert loop.is_healthy
