"""The process that has the engine: host, front thread, and everyone who talks to it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from pathlib import Path

from dflash_trt.serve.desk import Client, TensorDesk
from dflash_trt.serve.from_tensors import Arrays
from dflash_trt.serve.front import Front
from dflash_trt.serve.host import EngineHost
from dflash_trt.serve.openai_server import OpenAIServer, open_door
from dflash_trt.serve.options import ServeOptions
from dflash_trt.serve.sharing import SharingServer

_LOG = logging.getLogger(__name__)
CLOSE_SECONDS = 5.0  # for the last bytes to clients, after their requests are over


class EngineServer:
    """The engine and its ways in: `take`, a socket for other processes, OpenAI's HTTP."""

    def __init__(self, options: ServeOptions, socket: Path | None = None) -> None:
        """Load, try out, and open. Raises what `open_door` and `EngineHost` raise."""
        door = open_door(options) if options.openai_port else None
        try:
            self.host = EngineHost(options)
        except BaseException:
            if door is not None:
                door.socket.close()
            raise
        self._front = Front()
        self._desk = TensorDesk(self.host)
        self._front.spawn(self._desk.watch())
        self._openai = None if door is None else OpenAIServer(self.host, door)
        self._sharing = SharingServer(self.host, self._desk, self._drained) if socket else None
        self._draining: asyncio.Task[None] | None = None
        try:
            if self._openai is not None:
                self._front.start(self._openai.start()).result()
            if self._sharing is not None and socket is not None:
                self._front.start(self._sharing.start(socket)).result()
        except BaseException:
            self.host.close()
            self._front.close()
            raise

    def take(self, arrays: Arrays, client: Client) -> None:
        """Serve a tensor request, from any thread."""
        self._front.spawn(self._desk.serve(arrays, client))

    async def _drained(self) -> None:
        """Take no new requests; end those that run when the options' time is over."""
        if self._draining is None:
            self._draining = asyncio.create_task(self._drain())
        await self._draining

    async def _drain(self) -> None:
        _LOG.info("draining %d requests", self.host.loop.num_requests)
        seconds = self.host.options.drain_seconds
        if not await asyncio.to_thread(self.host.drain, seconds):
            _LOG.warning("%d requests are cut off", self.host.loop.num_requests)
            await asyncio.to_thread(self.host.close)

    def cut_off(self) -> None:
        """End what still runs, while `close` waits for it. A signal handler may call this."""
        _LOG.warning("a second signal: %d requests are cut off", self.host.loop.num_requests)
        threading.Thread(target=self.host.close, daemon=True).start()  # it takes locks

    def close(self) -> bool:
        """Drain, then end everything; False when a step hangs, whose thread lives on."""

        async def finish() -> None:
            await self._drained()
            if self._openai is not None:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._openai.stop(), CLOSE_SECONDS)
            if self._sharing is not None:
                await self._sharing.stop()

        self._front.start(finish()).result()
        has_ended = self.host.close()
        self._front.close()
        return has_ended
