"""OpenAI's API on a port: uvicorn inside the front's event loop."""

from __future__ import annotations

import asyncio
import logging
import socket
from pathlib import Path

from dflash_trt.errors import ConfigError
from dflash_trt.serve.host import EngineHost

_LOG = logging.getLogger(__name__)
BACKLOG = 2048


class OpenAIServer:
    """One HTTP server around one engine. Needs the extra `serve`."""

    def __init__(self, host: EngineHost) -> None:
        """Bind the port. Raises `ConfigError` when it is taken, or a package is missing."""
        try:
            import uvicorn

            from dflash_trt.serve.openai_app import OpenAIApp
        except ImportError as error:
            raise ConfigError(
                f"OpenAI's API needs the package {error.name}",
                hint="pip install 'dflash-trt[serve]'",
            ) from error
        options = host.options
        app = OpenAIApp(host).asgi(read_keys(options.api_key_file))
        config = uvicorn.Config(
            app, log_config=None, access_log=False, lifespan="off", ws="none", backlog=BACKLOG,
            timeout_keep_alive=75, server_header=False,
        )  # fmt: skip
        self._server = uvicorn.Server(config)
        self._socket = bind(options.address, options.openai_port)
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Answer from now on."""
        self._task = asyncio.create_task(self._server.serve(sockets=[self._socket]))
        while not self._server.started and not self._task.done():
            await asyncio.sleep(0.01)

    async def stop(self) -> None:
        """Close the port and idle connections; wait for the others."""
        self._server.should_exit = True
        if self._task is not None:
            await self._task


def bind(address: str, port: int) -> socket.socket:
    """A bound socket. Raises `ConfigError` when the address and port cannot be had."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    # With the protocol named, asyncio switches Nagle's delay off: it costs a stream 40 ms.
    made = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind((address, port))
    except OSError as error:
        made.close()
        raise ConfigError(
            f"port {port} of {address} cannot be had: {error.strerror}",
            hint="another server may run there; choose another port",
        ) from error
    return made


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
