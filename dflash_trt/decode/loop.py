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
    own code. Nobody is left waiting in any of these cases, nor by `close`.
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
        self._thread = threading.Thread(target=self._run, name="dflash-trt", daemon=True)
        self._thread.start()

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
        """Cancel every request and end the thread; whether it ended within `timeout` seconds.

        If it did not, the session hangs in a step: the requests are over all the same.
        """
        with self._lock:
            if self._state is not LoopState.DEAD:
                self._state = LoopState.CLOSED
            self._lock.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout)
        if self._thread.is_alive():
            self._end_handles("cancelled", "")
        return not self._thread.is_alive()

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
            scheduler.end_all("cancelled")
            self._deliver(scheduler.sweep())
        except Exception as error:  # a bug of ours, or of a telemetry: nobody may wait for ever
            _LOG.exception("the engine loop ends")
            self._die(error)
        return None

    def _take_in(self) -> bool:
        """Sleep until there is work and hand it to the scheduler; False when closed."""
        with self._lock:
            self._lock.wait_for(self._has_work)
            arrived, self._arrived = self._arrived, []
            cancelled, self._cancelled = self._cancelled, []
            is_open = self._state is not LoopState.CLOSED
        for request in arrived:
            self._scheduler.enqueue(request)
        for request_id in cancelled:
            self._scheduler.cancel(request_id)
        return is_open

    def _has_work(self) -> bool:
        is_closed = self._state is LoopState.CLOSED
        return bool(is_closed or self._arrived or self._cancelled or self._scheduler.has_work)

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

    def _end_handles(self, reason: FinishReason, error: str) -> None:
        """End what the scheduler did not."""
        with self._lock:
            handles, self._handles = self._handles, {}
            self._lock.notify_all()
        for handle in handles.values():
            handle.push(Delta(handle.request_id, (), "", reason, error), time.perf_counter())
