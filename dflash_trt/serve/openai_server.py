"""OpenAI's API on a port: uvicorn inside the front's event loop."""

from __future__ import annotations

import asyncio
import importlib
import logging
import socket
from dataclasses import dataclass
from pathlib import Path

from dflash_trt.errors import ConfigError
from dflash_trt.serve.host import EngineHost
from dflash_trt.serve.options import ServeOptions
from dflash_trt.serve.ports import bind

_LOG = logging.getLogger(__name__)
BACKLOG = 2048
FLAG = "--openai-port"


@dataclass(frozen=True)
class OpenAIDoor:
    """What OpenAI's API needs beside an engine: the port, bound, and the keys."""

    socket: socket.socket
    keys: tuple[str, ...]


def open_door(options: ServeOptions) -> OpenAIDoor:
    """Bind the port and read the keys: before an engine is loaded, which may take minutes.

    Raises `ConfigError` when the port is taken, a key file is bad, or a package is missing.
    """
    try:
        importlib.import_module("uvicorn")
        importlib.import_module("dflash_trt.serve.openai_app")
    except ImportError as error:
        raise ConfigError(
            f"OpenAI's API needs the package {error.name}", hint="pip install 'dflash-trt[serve]'"
        ) from error
    keys = read_keys(options.api_key_file)
    return OpenAIDoor(bind(options.address, options.openai_port, FLAG), tuple(keys))


class OpenAIServer:
    """One HTTP server around one engine. Needs the extra `serve`."""

    def __init__(self, host: EngineHost, door: OpenAIDoor) -> None:
        """Around an engine that is loaded, behind a door that is open."""
        import uvicorn

        from dflash_trt.serve.openai_app import OpenAIApp
        from dflash_trt.serve.openai_protocol import ImpatientH11

        app = OpenAIApp(host).asgi(door.keys)
        config = uvicorn.Config(
            app, http=ImpatientH11, log_config=None, access_log=False, lifespan="off", ws="none",
            backlog=BACKLOG, timeout_keep_alive=75, server_header=False,
        )  # fmt: skip
        self._server = uvicorn.Server(config)
        self._socket = door.socket
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Answer from now on. Raises what keeps the server from it."""
        self._task = asyncio.create_task(self._server.serve(sockets=[self._socket]))
        while not self._server.started and not self._task.done():
            await asyncio.sleep(0.01)
        if self._task.done():
            return self._task.result()
        self._task.add_done_callback(_log_failure)
        return None

    async def stop(self) -> None:
        """Close the port and idle connections; wait for the others."""
        self._server.should_exit = True
        if self._task is not None:
            await self._task


def read_keys(file: str) -> list[str]:
    """The keys in a file, one a line; none for an empty name. Raises `ConfigError`."""
    if not file:
        return []
    try:
        lines = Path(file).read_text().splitlines()
    except (OSError, ValueError) as error:
        raise ConfigError(f"the API keys in {file} cannot be read: {error}") from error
    keys = [line.strip() for line in lines if line.strip()]
    if not keys:
        raise ConfigError(f"{file} has no API key", hint="write one a line")
    return keys


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        _LOG.error("OpenAI's API has ended", exc_info=task.exception())
