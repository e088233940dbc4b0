"""An engine loop over the toy session, and a gate that holds it in a step."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from toy import Call, ToySession, limits, scheduler

from dflash_trt.decode.handle import Handle
from dflash_trt.decode.loop import EngineLoop
from dflash_trt.decode.request import SamplingParams

LONG = SamplingParams(max_tokens=80, ignore_eos=True)
WAIT_S = 60.0  # for what comes at once; a bound on what a broken loop would hang for


@contextmanager
def serving(
    on_step: Callable[[Call], None] = lambda call: None, **options: Any
) -> Iterator[EngineLoop]:
    """A loop over a toy session; afterwards nothing may be left in it."""
    sizes = {k: options.pop(k) for k in ("max_slots", "prefill_chunk") if k in options}
    session = ToySession(limits(**sizes), on_step=on_step, keep_calls=False)
    with EngineLoop(scheduler(session, **options)) as loop:
        yield loop
    assert not loop._thread.is_alive()
    assert loop.num_requests == 0


class Gate:
    """Holds a session in its step until told to go on."""

    def __init__(self, is_open: bool = False) -> None:
        self.inside, self.go_on = threading.Event(), threading.Event()
        if is_open:
            self.go_on.set()

    def __call__(self, call: Call) -> None:
        self.inside.set()
        assert self.go_on.wait(WAIT_S)


def outcome(handle: Handle) -> tuple[list[int], str, str]:
    made = handle.result(WAIT_S)
    return made.token_ids, made.text, made.finish_reason
