"""One engine for several processes: a Unix socket to the process that has it.

Who connects: the processes of alias models, with requests; and the supervisor, which learns from
the end of the connection that the engine's process is gone, and tells it to drain.
Both ends are processes of one user, and the socket lies in a folder that only that user may enter.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import tempfile
import threading
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

from dflash_trt.errors import ConfigError
from dflash_trt.serve import wire
from dflash_trt.serve.desk import CANCEL_PERIOD_S, Client, Refusal, RollCall, TensorDesk, refuse
from dflash_trt.serve.from_tensors import Arrays
from dflash_trt.serve.host import EngineHost
from dflash_trt.serve.wire import packed

_LOG = logging.getLogger(__name__)
ALIAS_OF = "alias_of"  # a model parameter: the model that has the engine
HEALTH_PERIOD_S = 0.5

# Kinds of messages, and what follows them.
REQUEST = "request"  # number, arrays
CANCEL = "cancel"  # number
DRAIN = "drain"
RESPONSE = "response"  # number, arrays, refusal, is_last
DRAINED = "drained"  # nothing runs any more
DEAD = "dead"  # reason: the process lives, its engine does not


def default_socket(tritonserver_pid: int, model: str) -> str:
    """Where the models of one tritonserver meet, unless they are told another path."""
    folder = Path(tempfile.gettempdir()) / f"dflash-trt-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    facts = folder.lstat()
    if facts.st_uid != os.getuid() or facts.st_mode & 0o077:
        raise ConfigError(f"{folder} is open to other users", hint="remove it")
    return str(folder / f"{tritonserver_pid}-{model}")


class SharingServer:
    """The engine's end."""

    def __init__(
        self, host: EngineHost, desk: TensorDesk, drain: Callable[[], Awaitable[None]]
    ) -> None:
        """`drain` takes no new requests from now on, and returns when none runs."""
        self._host = host
        self._desk = desk
        self._drain = drain
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._path: Path | None = None

    async def start(self, path: Path) -> None:
        """Listen at a path; a file that is there is of a process that is gone."""
        path.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._talk, path)
        self._path = path

    async def stop(self) -> None:
        """Hang up."""
        assert self._server is not None
        assert self._path is not None
        self._server.close()
        for writer in self._writers:
            writer.close()
        self._path.unlink(missing_ok=True)

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        clients: dict[int, _SocketClient] = {}
        tell = asyncio.create_task(self._tell_of_death(writer))
        try:
            while True:
                kind, *content = await wire.read_async(reader)
                if kind == DRAIN:
                    self._start(self._tell_when_drained(writer))
                elif kind == CANCEL and content[0] in clients:
                    clients[content[0]].gone = True
                elif kind == REQUEST:
                    number, arrays = content
                    clients[number] = _SocketClient(number, writer, clients)
                    self._start(self._desk.serve(arrays, clients[number]))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the other process went away, and with it all that it waited for
        except Exception:  # after a message that cannot be read, what follows means nothing
            _LOG.exception("a process of this server is hung up on")
        finally:
            tell.cancel()
            for client in clients.values():
                client.gone = True
            self._writers.discard(writer)
            writer.close()

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)  # the event loop itself keeps no task alive
        task.add_done_callback(self._end)

    def _end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            _LOG.error("work for another process failed", exc_info=task.exception())

    async def _tell_when_drained(self, writer: asyncio.StreamWriter) -> None:
        await self._drain()
        if not writer.is_closing():
            writer.write(packed(DRAINED))

    async def _tell_of_death(self, writer: asyncio.StreamWriter) -> None:
        while self._host.loop.is_healthy:
            await asyncio.sleep(HEALTH_PERIOD_S)
        if not self._host.is_closed:
            writer.write(packed(DEAD, "the engine died, see its log"))


class _SocketClient:
    """A request of another process."""

    def __init__(
        self, number: int, writer: asyncio.StreamWriter, clients: dict[int, _SocketClient]
    ) -> None:
        self._number = number
        self._writer = writer
        self._clients = clients
        self.gone = False

    def send(self, arrays: Arrays, refusal: Refusal | None, *, is_last: bool) -> None:
        """See `Client`."""
        if is_last:
            self._clients.pop(self._number, None)
        if not self._writer.is_closing():
            self._writer.write(packed(RESPONSE, self._number, arrays, refusal, is_last))

    def is_gone(self) -> bool:
        """See `Client`."""
        return self.gone


class SharedEngine:
    """The other end: passes requests of this process on, from any thread."""

    def __init__(self, path: Path) -> None:
        """Connects when there is a first request."""
        self._path = path
        self._lock = threading.Lock()  # for all below, and for writing
        self._line: socket.socket | None = None
        self._clients: dict[int, Client] = {}
        self._next = 0
        self._roll_call = RollCall()
        self._closed = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="watch", daemon=True)
        self._watcher.start()

    @property
    def is_ready(self) -> bool:
        """Whether the engine's process answers."""
        try:
            with self._lock:
                self._connect()
        except OSError:
            return False
        return True

    def take(self, arrays: Arrays, client: Client) -> None:
        """Pass a request on. Raises `OSError` when nobody answers; the client is then the caller's.

        The same after any other exception.
        """
        with self._lock:
            number, self._next = self._next, self._next + 1
            message = packed(REQUEST, number, arrays)
            line = self._connect()
            self._clients[number] = client
            try:
                line.sendall(message)
            except BaseException:
                self._clients.pop(number, None)
                raise

    def close(self) -> None:
        """Hang up."""
        self._closed.set()
        self._watcher.join()
        with self._lock:
            if self._line is not None:
                with contextlib.suppress(OSError):
                    self._line.shutdown(socket.SHUT_RDWR)

    def _connect(self) -> socket.socket:
        if self._line is None:
            line = socket.socket(socket.AF_UNIX)
            try:
                line.connect(str(self._path))
            except OSError:
                line.close()
                raise
            self._line = line
            threading.Thread(target=self._read, args=(line,), name="read", daemon=True).start()
        return self._line

    def _read(self, line: socket.socket) -> None:
        """Hand responses over until the other end hangs up; then the next request connects anew."""
        try:
            with line, line.makefile("rb") as stream:
                while message := wire.read(stream):
                    kind, *content = message
                    if kind == RESPONSE:
                        self._hand_over(*content)
        except OSError:
            pass  # an end like any other
        except Exception:  # after a message that cannot be read, what follows means nothing
            _LOG.exception("the engine's process is hung up on")
        finally:
            with self._lock:
                self._line = None
                lost, self._clients = self._clients, {}
            for client in lost.values():
                refuse(client, Refusal("UNAVAILABLE", "the engine's process ended"))

    def _hand_over(
        self, number: int, arrays: Arrays, refusal: Refusal | None, is_last: bool
    ) -> None:
        with self._lock:
            client = self._clients.get(number)
            if is_last:
                self._clients.pop(number, None)
        if client is None:
            return
        try:
            client.send(arrays, refusal, is_last=is_last)
        except Exception:
            _LOG.exception("a response cannot be handed over: its request ends")
            with self._lock:
                self._clients.pop(number, None)
            self._cancel(number)
            refuse(client, Refusal("INTERNAL", "a response could not be handed over"))

    def _cancel(self, number: int) -> None:
        with self._lock, contextlib.suppress(OSError):
            if self._line is not None:
                self._line.sendall(packed(CANCEL, number))

    def _watch(self) -> None:
        while not self._closed.wait(CANCEL_PERIOD_S):
            with self._lock:
                waiting = list(self._clients.items())
            for number, client in waiting:
                if self._roll_call.is_gone(client):
                    self._cancel(number)
