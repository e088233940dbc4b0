"""uvicorn's HTTP with an end to every wait for a client: for a request's head, and for a reader."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_SECONDS = 30.0  # from a connection, or a request's first byte, to the end of its head
READ_SECONDS = 60.0  # for a client that takes nothing of what is sent


class ImpatientH11(H11Protocol):
    """Cuts off who sends a request without end, or does not read: each holds a descriptor.

    uvicorn itself has a limit for idle connections only. A body's limit is the application's.
    """

    _head_timer: asyncio.TimerHandle | None = None
    _read_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A head must come."""
        super().connection_made(transport)
        self._watch_head()

    def data_received(self, data: bytes) -> None:
        """Bytes of a head do not give it more time."""
        super().data_received(data)
        self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is waited for any more."""
        _cancel(self._head_timer)
        _cancel(self._read_timer)
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """The client must read."""
        super().pause_writing()
        self._read_timer = self.loop.call_later(READ_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        """It did."""
        super().resume_writing()
        _cancel(self._read_timer)

    def _watch_head(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            _cancel(self._head_timer)
            self._head_timer = None
        elif self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_SECONDS, self.transport.close)


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
