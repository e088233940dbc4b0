"""The engine as a thread: requests from any thread or event loop in, streams of deltas out."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from enum import Enum
from types import TracebackType

from dflash_trt.decode.handle import Handle
from dflash_trt.decode.request import Delta, SamplingParams
from dflash_trt.decode.scheduler import Scheduler
from dflash_trt.decode.slots import Request
from dflash_trt.errors import EngineStopped
from dflash_trt.text.stop import FinishReason

_LOG = logging.getLogger(__name__)
WATCH_PERIOD_S = 1.0  # how often a step that runs is looked at; more often if it may take less


class LoopState(Enum):
    """What an engine loop does with requests."""

    RUNNING = "runs"
    DRAINING = "drains: it takes no new requests"
    CLOSED = "is closed"
    DEAD = "is dead"


class EngineLoop:
    """Owns a scheduler, in a thread of its own that sleeps while there is nothing to do.

    A step that raises ends the requests on its slots with the reason "error", and the others go
    on. After `RunConfig.max_failed_steps` such steps in a row the loop is dead: all requests end
    with "error", `is_healthy` is false, and `submit` raises. The same after an exception of our
    own code, and when a step has not ended after `RunConfig.max_step_s`: its thread is then left
    alone, as nothing can end it. Nobody is left waiting in any of these cases, nor by `close`.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        """Start the thread. From now on only the loop may use the scheduler and its session."""
        self._scheduler = scheduler
        self._lock = threading.Condition()  # for all below; notified of work and of ends
        self._state = LoopState.RUNNING
        self._death = ""
        self._arrived: list[Request] = []
        self._cancelled: list[int] = []
        self._handles: dict[int, Handle] = {}  # of all requests that are not over
        self._turn_at: float | None = None  # since when the thread is at work; None: it is idle
        self._hangs = False  # the thread is not waited for any more
        self._over = threading.Event()  # it has ended, or hangs
        self._thread = threading.Thread(target=self._run, name="dflash-trt", daemon=True)
        self._thread.start()
        threading.Thread(target=self._watch, name="dflash-trt-watch", daemon=True).start()

    @property
    def is_healthy(self) -> bool:
        """Whether requests are taken and answered, or at least those that run are."""
        return self._state in (LoopState.RUNNING, LoopState.DRAINING) and self._thread.is_alive()

    @property
    def state(self) -> LoopState:
        """What the loop does."""
        return self._state

    @property
    def num_requests(self) -> int:
        """Requests that wait or run."""
        return len(self._handles)

    def submit(
        self, prompt: Sequence[int], params: SamplingParams, deadline_s: float | None = None
    ) -> Handle:
        """Queue a request; after `deadline_s` seconds it ends as it is, with reason "timeout".

        Raises `RequestError`, `CapacityError` (does not fit), `QueueFull` (try later) or
        `EngineStopped`, at once and in the caller's thread.
        """
        self.check_open()  # before the work of looking at the request
        request = self._scheduler.request(prompt, params, deadline_s)
        handle = Handle(request, self.cancel)
        with self._lock:
            self.check_open()
            self._handles[request.request_id] = handle
            self._arrived.append(request)
            self._lock.notify_all()
        return handle

    def check_open(self) -> None:
        """Raises what `submit` would raise for any request now: `QueueFull`, `EngineStopped`."""
        if self._state is not LoopState.RUNNING:
            raise EngineStopped(f"the engine {self._state.value}{self._death}")
        self._scheduler.check_room(len(self._handles))

    def cancel(self, request_id: int) -> None:
        """End a request before the next step; one that is over or unknown is passed over."""
        with self._lock:
            if request_id in self._handles:
                self._cancelled.append(request_id)
                self._lock.notify_all()

    def drain(self, timeout: float | None = None) -> bool:
        """Take no new requests and wait for those that run; whether all ended in time."""
        with self._lock:
            if self._state is LoopState.RUNNING:
                self._state = LoopState.DRAINING
            return self._lock.wait_for(lambda: not self._handles, timeout)

    def close(self, timeout: float | None = None) -> bool:
        """End every request, with the reason "shutdown", and the thread; whether that ended.

        If it did not within `timeout` seconds, or is known to hang, the session hangs in a step:
        the requests are over all the same.
        """
        with self._lock:
            if self._state is not LoopState.DEAD:
                self._state = LoopState.CLOSED
            self._lock.notify_all()
        is_waiting = threading.current_thread() is not self._thread
        if is_waiting and self._over.wait(timeout) and not self._hangs:
            self._thread.join()
        if self._thread.is_alive():
            self._end_handles("shutdown", "")
        return not self._thread.is_alive()

    def wait_end(self, timeout: float) -> bool:
        """Wait until it is closed or dead, all requests over; whether it is within `timeout` s."""
        return self._over.wait(timeout)

    def __enter__(self) -> EngineLoop:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _run(self) -> None:
        scheduler = self._scheduler
        try:
            while self._take_in():
                self._deliver(scheduler.sweep())
                failed_before = scheduler.num_failed_steps
                self._deliver(scheduler.step())
                if scheduler.num_failed_steps > failed_before:
                    _LOG.error("the session raised in a step", exc_info=scheduler.last_error)
                if scheduler.is_dead:
                    return self._die(scheduler.last_error)
            # Dead, and here: a step ended after all, when it was not waited for any more.
            scheduler.end_all("shutdown" if self._state is LoopState.CLOSED else "error")
            self._deliver(scheduler.sweep())
        except Exception as error:  # a bug of ours, or of a telemetry: nobody may wait for ever
            _LOG.exception("the engine loop ends")
            self._die(error)
        finally:
            self._over.set()
        return None

    def _take_in(self) -> bool:
        """Sleep until there is work and hand it to the scheduler; False when closed or dead."""
        with self._lock:
            self._turn_at = None
            self._lock.wait_for(self._has_work)
            self._turn_at = time.perf_counter()
            arrived, self._arrived = self._arrived, []
            cancelled, self._cancelled = self._cancelled, []
            is_open = not self._is_ended
        for request in arrived:
            self._scheduler.enqueue(request)
        for request_id in cancelled:
            self._scheduler.cancel(request_id)
        return is_open

    def _has_work(self) -> bool:
        is_new = self._arrived or self._cancelled
        return bool(self._is_ended or is_new or self._scheduler.has_work)

    @property
    def _is_ended(self) -> bool:
        return self._state in (LoopState.CLOSED, LoopState.DEAD)

    def _deliver(self, deltas: Sequence[Delta]) -> None:
        now = time.perf_counter()
        over = []
        for delta in deltas:
            handle = self._handles.get(delta.request_id)
            if handle is not None:  # else `close` did not wait for this step
                handle.push(delta, now)
            if delta.finish_reason is not None:
                over.append(delta.request_id)
        if over:
            with self._lock:
                for request_id in over:
                    self._handles.pop(request_id, None)
                self._lock.notify_all()

    def _die(self, error: Exception | None) -> None:
        reason = f": {type(error).__name__}: {error}"
        with self._lock:
            self._state, self._death = LoopState.DEAD, reason
        try:
            self._scheduler.end_all("error", f"the engine died{reason}")
            self._deliver(self._scheduler.sweep())
        except Exception:  # the scheduler itself may be what is broken
            _LOG.exception("the requests of a dead engine could not be ended in order")
        self._end_handles("error", f"the engine died{reason}")

    def _watch(self) -> None:
        """See to the requests of a step that does not end, and give it up after its time.

        The time is counted in looks: a process that was stopped for an hour has no step that hangs.
        """
        limit = self._scheduler.config.max_step_s
        period = min(WATCH_PERIOD_S, limit / 4) if limit else WATCH_PERIOD_S
        turn: float | None = None
        num_looks = 0
        while not self._over.wait(period):
            before, turn = turn, self._turn_at
            num_looks = num_looks + 1 if turn is not None and turn == before else 0
            try:
                if num_looks:
                    self._end_overdue()
                if limit and num_looks * period >= limit:
                    self._give_up(f"a step has not ended for {limit:g} s")
            except Exception:  # a bug of ours: the next look may do without it
                _LOG.exception("a look at the engine loop failed")

    def _end_overdue(self) -> None:
        """End handles whose time is over, or whose clients left, while a step holds everything up.

        Their requests keep their seats until the step ends, so they still count as not over. Text
        that was kept back for stop strings is the other thread's, and is left out.
        """
        now = time.perf_counter()
        with self._lock:
            cancelled, handles = set(self._cancelled), list(self._handles.values())
        for handle in handles:
            if handle.request_id in cancelled:
                handle.push(Delta(handle.request_id, (), "", "cancelled"), now)
            elif handle.deadline <= now:
                handle.push(Delta(handle.request_id, (), "", "timeout"), now)

    def _give_up(self, reason: str) -> None:
        """Die without the thread: only handles can be ended, the scheduler is the thread's."""
        _LOG.critical("%s: the engine is given up", reason)
        with self._lock:
            self._hangs = True
            is_closed = self._state is LoopState.CLOSED
            if not is_closed:
                self._state, self._death = LoopState.DEAD, f": {reason}"
        try:
            if is_closed:
                self._end_handles("shutdown", "")
            else:
                self._end_handles("error", f"the engine died: {reason}")
        finally:
            self._over.set()

    def _end_handles(self, reason: FinishReason, error: str) -> None:
        """End what the scheduler did not."""
        with self._lock:
            handles, self._handles = self._handles, {}
            self._lock.notify_all()
        for handle in handles.values():
            handle.push(Delta(handle.request_id, (), "", reason, error), time.perf_counter())
