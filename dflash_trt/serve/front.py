"""The thread in which a serving process talks to its clients: one asyncio event loop."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
_LOG = logging.getLogger(__name__)


class Front:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="dflash-trt-front", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    def start(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Start a coroutine there, from any other thread."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Start a coroutine that nobody waits for: the log hears of what it raises."""
        self.start(work).add_done_callback(_log_failure)

    def close(self) -> None:
        """Cancel what still runs there, and end the thread."""

        async def cancel_all() -> None:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self.loop.shutdown_default_executor()

        self.start(cancel_all()).result()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


def _log_failure(done: concurrent.futures.Future[None]) -> None:
    if not done.cancelled() and done.exception() is not None:
        _LOG.error("work of the front ended in a bug of ours", exc_info=done.exception())
