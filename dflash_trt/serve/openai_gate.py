"""What stands before every HTTP request: its id, the key, limits, and one line in the log."""

from __future__ import annotations

import hmac
import json
import logging
import re
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dflash_trt.serve.metrics import RefusalReason
from dflash_trt.serve.openai_errors import error_body, printable
from dflash_trt.serve.options import ServeOptions

_LOG = logging.getLogger(__name__)
_ID = re.compile(r"[\w.:-]{1,128}")


class Gate:
    """ASGI middleware; the request's id is in `scope["request_id"]`."""

    def __init__(
        self,
        app: ASGIApp,
        keys: Sequence[str],
        options: ServeOptions,
        on_refused: Callable[[RefusalReason], None],
    ) -> None:
        """`keys` are those allowed under /v1; none: nobody is asked. `options` has the limits."""
        self._app = app
        self._keys = [key.encode() for key in keys]
        self._max_connections = options.max_connections
        self._max_body_bytes = options.max_body_bytes
        self._on_refused = on_refused
        self._num_open = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, if it may pass."""
        if scope["type"] != "http":
            return
        started = time.perf_counter()
        headers = {name: value for name, value in scope["headers"]}  # noqa: C416
        given = headers.get(b"x-request-id", b"").decode("latin-1")
        scope["request_id"] = request_id = given if _ID.fullmatch(given) else secrets.token_hex(12)
        status = 0

        async def send_on(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [
                    *message.get("headers", ()), (b"x-request-id", request_id.encode())
                ]  # fmt: skip
            await send(message)

        self._num_open += 1
        try:
            refusal = self._refusal(scope["path"], headers)
            if refusal is not None:
                await _send_json(send_on, *refusal)
            else:
                await self._app(scope, self._counted(receive), send_on)
        finally:
            self._num_open -= 1
            is_probe = scope["path"].startswith(("/health", "/metrics"))
            _LOG.log(
                logging.DEBUG if is_probe else logging.INFO,
                "%s %s %s %d %.0f ms%s", request_id, scope["method"], printable(scope["path"]),
                status, 1e3 * (time.perf_counter() - started), scope.get("note", ""),
            )  # fmt: skip

    def _refusal(self, path: str, headers: dict[bytes, bytes]) -> tuple[int, dict[str, Any]] | None:
        if not path.startswith("/v1"):
            return None
        if self._num_open > self._max_connections:
            self._on_refused("overload")
            return 503, error_body(503, f"more than {self._max_connections} requests are open")
        if self._keys and not self._has_key(headers.get(b"authorization", b"")):
            return 401, error_body(401, "the API key is missing or wrong", "invalid_api_key")
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length) > self._max_body_bytes:
            self._on_refused("invalid")
            return 413, error_body(413, self._too_large())
        return None

    def _has_key(self, authorization: bytes) -> bool:
        scheme, _, key = authorization.partition(b" ")
        # Each is compared, so that the time tells nothing about which is nearly right.
        matches = [hmac.compare_digest(key.strip(), known) for known in self._keys]
        return scheme.lower() == b"bearer" and any(matches)

    def _too_large(self) -> str:
        return f"the body is longer than {self._max_body_bytes} bytes"

    def _counted(self, receive: Receive) -> Receive:
        num_bytes = 0

        async def receive_on() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_body_bytes:
                self._on_refused("invalid")
                raise HTTPException(413, self._too_large())
            return message

        return receive_on


async def _send_json(send: Send, status: int, body: dict[str, Any]) -> None:
    data = json.dumps(body).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(data))]
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": data})
