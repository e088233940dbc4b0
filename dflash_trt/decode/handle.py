"""A client's end of a running request: a stream of deltas, for threads and for event loops."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from types import TracebackType

from dflash_trt.decode.generation import Collected, Generation
from dflash_trt.decode.request import Delta
from dflash_trt.decode.slots import Request

_Waker = tuple[asyncio.AbstractEventLoop, "asyncio.Future[None]"]


class Handle:
    """One request. Iterate over it (`for` or `async for`) for its deltas; the last has a reason.

    The engine never waits for a reader. What was not read yet is one delta when it is read, and
    is bounded by the request's max_tokens. Several readers share one stream: each delta goes to
    one of them. As a context manager, leaving it cancels a request that is not over.
    """

    def __init__(self, request: Request, cancel: Callable[[int], None]) -> None:
        self.request_id = request.request_id
        self.prompt_tokens = len(request.prompt)
        self.deadline = request.deadline
        self._collected = Collected(request)
        self._num_read = 0
        self._cancel = cancel
        self._news = threading.Condition()
        self._wakers: list[_Waker] = []

    @property
    def is_over(self) -> bool:
        """Whether the last delta is there, read or not."""
        return self._collected.is_over

    def cancel(self) -> None:
        """End the request before the engine's next step; one that is over stays as it is."""
        self._cancel(self.request_id)

    def result(self, timeout: float | None = None) -> Generation:
        """Wait for the end; the whole output, whatever was read of it.

        An engine that failed is a finish reason and `error`, not an exception. Raises
        `TimeoutError` when it takes longer than `timeout` seconds.
        """
        with self._news:
            if not self._news.wait_for(lambda: self.is_over, timeout):
                raise TimeoutError(f"request {self.request_id} is not over after {timeout} s")
            return self._collected.generation()

    async def result_async(self) -> Generation:
        """`result`, without blocking the event loop."""
        while not self.is_over:
            await self._wait_async(lambda: self.is_over)
        return self.result()

    def push(self, delta: Delta, now: float) -> None:
        """Take the next delta and wake the readers; after the end, do nothing."""
        with self._news:
            if self.is_over:
                return
            self._collected.add(delta, now)
            self._news.notify_all()
            wakers, self._wakers = self._wakers, []
        for loop, future in wakers:
            try:
                loop.call_soon_threadsafe(_wake, future)
            except RuntimeError:  # the reader's event loop was closed: nobody waits there
                continue

    def __iter__(self) -> Handle:
        return self

    def __next__(self) -> Delta:
        with self._news:
            self._news.wait_for(self._has_news)
            delta = self._take()
        if delta is None:
            raise StopIteration
        return delta

    def __aiter__(self) -> Handle:
        return self

    async def __anext__(self) -> Delta:
        while True:
            with self._news:
                if self._has_news():
                    delta = self._take()
                    break
            await self._wait_async(self._has_news)
        if delta is None:
            raise StopAsyncIteration
        return delta

    def __enter__(self) -> Handle:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self.is_over:
            self.cancel()

    def _has_news(self) -> bool:
        return self._num_read < len(self._collected.deltas) or self.is_over

    def _take(self) -> Delta | None:
        """What was not read yet, as one delta; None after the last."""
        unread = self._collected.deltas[self._num_read :]
        self._num_read += len(unread)
        return Delta.merged(unread) if unread else None

    async def _wait_async(self, ready: Callable[[], bool]) -> None:
        """Wait for the next delta, unless `ready`. Cancelling the wait loses nothing."""
        loop = asyncio.get_running_loop()
        waker: _Waker = (loop, loop.create_future())
        with self._news:
            if ready():
                return
            self._wakers.append(waker)
        try:
            await waker[1]
        finally:
            with self._news:
                if waker in self._wakers:
                    self._wakers.remove(waker)


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
