"""An engine directory, loaded: text in, text out. What `generate`, `verify` and benches use."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from dflash_trt.decode.adaptive import AdaptiveWidth
from dflash_trt.decode.admission import RunConfig
from dflash_trt.decode.costs import BUDGET_S, measure_costs, widths_of
from dflash_trt.decode.generation import Collected, Generation
from dflash_trt.decode.loop import EngineLoop
from dflash_trt.decode.request import Delta, SamplingParams
from dflash_trt.decode.scheduler import Scheduler
from dflash_trt.decode.stored_costs import StoredCosts
from dflash_trt.decode.telemetry import Telemetry
from dflash_trt.decode.width import FixedWidth, WidthPolicy
from dflash_trt.engine_dir import EngineDir, open_engine
from dflash_trt.errors import ConfigError, StepError
from dflash_trt.runtime.open import open_session
from dflash_trt.runtime.session import Session
from dflash_trt.runtime.threads import cpu_allowance
from dflash_trt.text import Tokenizer

__all__ = ["Engine", "Generation", "run_all"]


class Engine:
    """A session with its tokenizer and stop ids."""

    def __init__(
        self,
        session: Session,
        tokenizer: Tokenizer,
        eos_ids: Sequence[int],
        stored_costs: StoredCosts | None = None,
    ) -> None:
        """`stored_costs`: where `auto_width` looks for what it would measure, and keeps it."""
        self.session = session
        self._stored_costs = stored_costs
        self.tokenizer = tokenizer
        self.eos_ids = tuple(dict.fromkeys((*eos_ids, *tokenizer.stop_ids)))

    @classmethod
    def load(cls, path: Path, num_threads: int | None = None) -> Engine:
        """Open and check an engine directory and load it. Raises `EngineDirError`."""
        return cls.from_dir(open_engine(path), num_threads)

    @classmethod
    def from_dir(cls, engine: EngineDir, num_threads: int | None = None) -> Engine:
        """Load an engine directory that is already open. Raises what `open_session` does."""
        session = open_session(engine, num_threads)
        eos_ids = engine.config.pair.target.eos_token_ids
        stored = StoredCosts.of(engine, num_threads or cpu_allowance())
        return cls(session, Tokenizer.load(engine.path), eos_ids, stored)

    def scheduler(
        self,
        width: int | WidthPolicy | None = None,
        padded_width: int | None = None,
        *,
        config: RunConfig | None = None,
        telemetry: Telemetry | None = None,
    ) -> Scheduler:
        """A scheduler over this session; verify `width` defaults to the whole block.

        One at a time: schedulers share the session's slots. Raises `ConfigError` for a width out
        of range.
        """
        return Scheduler(
            self.session, self.tokenizer, self.eos_ids, self._policy(width),
            padded_width=1 if padded_width is None else self._checked(padded_width),
            config=config, telemetry=telemetry,
        )  # fmt: skip

    def start(
        self,
        width: int | WidthPolicy | None = None,
        *,
        config: RunConfig | None = None,
        telemetry: Telemetry | None = None,
    ) -> EngineLoop:
        """A thread that serves requests of any number of threads and event loops, until closed.

        Verify `width` defaults to `auto_width`.
        """
        chosen = self.auto_width() if width is None else width
        return EngineLoop(self.scheduler(chosen, config=config, telemetry=telemetry))

    def generate(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        width: int | WidthPolicy | None = None,
        padded_width: int | None = None,
        on_delta: Callable[[Delta], None] | None = None,
    ) -> Generation:
        """Run one request to its end, in this thread. `width` 1 is plain decoding.

        Raises `StepError` when the session fails.
        """
        scheduler = self.scheduler(width, padded_width)
        return run_all(scheduler, [(prompt, params)], on_delta)[0]

    def generate_all(
        self,
        requests: Iterable[tuple[Sequence[int], SamplingParams]],
        *,
        width: int | WidthPolicy | None = None,
        on_delta: Callable[[Delta], None] | None = None,
    ) -> list[Generation]:
        """Run requests side by side over all slots, in this thread; results in their order.

        Raises `StepError` when the session fails.
        """
        return run_all(self.scheduler(width), requests, on_delta)

    def auto_width(
        self, num_slots: int | None = None, budget_s: float = BUDGET_S, *, fresh: bool = False
    ) -> AdaptiveWidth:
        """The policy that follows costs and acceptance.

        `num_slots` is how many will be used at once (default: all). Takes what an earlier call
        stored, unless `fresh`; else it measures the session, which must be idle.
        """
        limits, stored = self.session.limits, self._stored_costs
        costs = None
        if stored is not None and not fresh:
            costs = stored.read(widths_of(limits.block), num_slots or limits.max_slots)
        if costs is None:
            costs = measure_costs(self.session, num_slots, budget_s)
            if stored is not None:
                stored.write(costs)
        return AdaptiveWidth(costs, limits.block)

    def _policy(self, width: int | WidthPolicy | None) -> WidthPolicy:
        if width is None:
            return FixedWidth(self.session.limits.block)
        return FixedWidth(self._checked(width)) if isinstance(width, int) else width

    def _checked(self, width: int) -> int:
        block = self.session.limits.block
        if not 1 <= width <= block:
            raise ConfigError(f"verify width is {width}, allowed are 1 to {block}")
        return width


def run_all(
    scheduler: Scheduler,
    requests: Iterable[tuple[Sequence[int], SamplingParams]],
    on_delta: Callable[[Delta], None] | None = None,
) -> list[Generation]:
    """Drive a scheduler until all requests are over: what `EngineLoop` does, without a thread."""
    coming = iter(requests)
    all_in = False
    made: dict[int, Collected] = {}
    try:
        while scheduler.has_work or not all_in:
            while not all_in and scheduler.has_room:
                job = next(coming, None)
                if job is None:
                    all_in = True
                    break
                request = scheduler.request(*job)
                scheduler.enqueue(request)
                made[request.request_id] = Collected(request)
            for delta in scheduler.step():
                if delta.finish_reason == "error":
                    raise StepError(delta.error) from scheduler.last_error
                made[delta.request_id].add(delta, time.perf_counter())
                if on_delta is not None:
                    on_delta(delta)
    finally:
        scheduler.end_all("cancelled")  # nothing, unless this was left by an exception
    return [collected.generation() for collected in made.values()]
