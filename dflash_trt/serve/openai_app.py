"""OpenAI's API over HTTP, as an ASGI application around one engine."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from dflash_trt.decode.generation import Generation
from dflash_trt.decode.handle import Handle
from dflash_trt.errors import DFlashError
from dflash_trt.serve.host import EngineHost
from dflash_trt.serve.openai_answer import DONE, ChatAnswer, CompletionAnswer, event
from dflash_trt.serve.openai_errors import (
    CLIENT_GONE,
    UnknownModel,
    error_response,
    failure_of,
    on_bug,
    on_http_error,
    on_refusal,
)
from dflash_trt.serve.openai_gate import Gate
from dflash_trt.serve.openai_schema import ChatRequest, CompletionRequest

BODY_SECONDS = 60.0  # to send a body; who takes longer is cut off


Asked = TypeVar("Asked", ChatRequest, CompletionRequest)


class OpenAIApp:
    """The routes."""

    def __init__(self, host: EngineHost) -> None:
        self._host = host

    def asgi(self, keys: Sequence[str]) -> ASGIApp:
        """The application, behind its gate."""
        routes = [
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/completions", self.complete, methods=["POST"]),
            Route("/v1/models", self.models),
            Route("/v1/models/{name:path}", self.model),
            Route("/health/live", self.live),
            Route("/health/ready", self.ready),
            Route("/metrics", self.metrics),
        ]
        app = Starlette(
            routes=routes,
            exception_handlers={
                HTTPException: on_http_error, DFlashError: on_refusal, Exception: on_bug,
            },
        )  # fmt: skip
        return Gate(app, keys, self._host.options, self._host.telemetry.on_refused)

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        asked, handle = await self._take_in(request, ChatRequest)
        answer = ChatAnswer(request.scope["request_id"], self._host.name, self._host.tokenizer)
        return await self._serve(request, asked, handle, answer)

    async def complete(self, request: Request) -> Response:
        """POST /v1/completions."""
        asked, handle = await self._take_in(request, CompletionRequest)
        echo = asked.prompt if asked.echo and isinstance(asked.prompt, str) else ""
        answer = CompletionAnswer(
            request.scope["request_id"], self._host.name, self._host.tokenizer, echo
        )
        return await self._serve(request, asked, handle, answer)

    async def _take_in(self, request: Request, kind: type[Asked]) -> tuple[Asked, Handle]:
        """Read a request and queue it. Raises what is wrong with it."""
        body = await _body(request)
        with self._host.telemetry.refusals():
            asked = kind.parse(body)
            self._check_model(asked.model)
            return asked, await self._host.submit_async(asked.to_generate())

    async def _serve(
        self,
        request: Request,
        asked: ChatRequest | CompletionRequest,
        handle: Handle,
        answer: ChatAnswer,
    ) -> Response:
        if asked.stream:
            options = asked.stream_options
            with_usage = options is not None and options.include_usage
            return EventStream(self._events(request, handle, answer, with_usage), handle)
        with handle:
            made = await _unless_disconnected(request, handle)
        _note(request, made)
        if made is None:
            return Response(status_code=CLIENT_GONE)  # nobody reads it
        failure = failure_of(made)
        return JSONResponse(answer.whole(made)) if failure is None else error_response(*failure)

    async def _events(
        self, request: Request, handle: Handle, answer: ChatAnswer, with_usage: bool
    ) -> AsyncIterator[bytes]:
        async for delta in handle:
            failure = None if delta.finish_reason is None else failure_of(handle.result())
            if failure is not None:
                _note(request, handle.result())
                yield event(failure[1])
                return
            parts = answer.parts(delta)
            if parts:
                yield b"".join(parts)
        made = handle.result()
        _note(request, made)
        if with_usage:
            yield answer.usage_part(made.prompt_tokens, len(made.token_ids))
        yield DONE

    def _check_model(self, name: str | None) -> None:
        if name is not None and name != self._host.name:
            raise UnknownModel(f"the model {name[:200]!r} does not exist")

    async def models(self, request: Request) -> Response:
        """GET /v1/models."""
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        """GET /v1/models/NAME."""
        self._check_model(request.path_params["name"])
        return JSONResponse(self._model())

    def _model(self) -> dict[str, object]:
        return {
            "id": self._host.name,
            "object": "model",
            "created": self._host.created,
            "owned_by": "dflash-trt",
            "max_model_len": self._host.limits.max_seq_len,
        }

    async def live(self, request: Request) -> Response:
        """GET /health/live: 200 until the engine is dead."""
        return Response(status_code=200 if self._host.loop.is_healthy else 503)

    async def ready(self, request: Request) -> Response:
        """GET /health/ready: 200 while new requests are taken."""
        return Response(status_code=200 if self._host.is_ready else 503)

    async def metrics(self, request: Request) -> Response:
        """GET /metrics, for Prometheus."""
        text = await asyncio.to_thread(self._host.telemetry.text)
        return Response(text, media_type="text/plain; version=0.0.4")


class EventStream(StreamingResponse):
    """A stream of events; its request ends with it, as when the client goes away."""

    def __init__(self, events: AsyncIterator[bytes], handle: Handle) -> None:
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._handle = handle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it. A client may be gone before the first event is asked for."""
        with self._handle:
            await super().__call__(scope, receive, send)


async def _body(request: Request) -> bytes:
    try:
        async with asyncio.timeout(BODY_SECONDS):
            return await request.body()
    except ClientDisconnect:
        raise HTTPException(CLIENT_GONE, "the client went away") from None
    except TimeoutError:
        raise HTTPException(408, f"the body took longer than {BODY_SECONDS:g} s") from None


async def _unless_disconnected(request: Request, handle: Handle) -> Generation | None:
    """The output; None when the client goes away before it is there."""
    result = asyncio.ensure_future(handle.result_async())
    gone = asyncio.ensure_future(_disconnected(request))
    await asyncio.wait({result, gone}, return_when=asyncio.FIRST_COMPLETED)
    for task in (result, gone):
        if not task.done():
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
    return None if result.cancelled() else result.result()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _note(request: Request, made: Generation | None) -> None:
    """What the gate adds to its line in the log."""
    if made is None:
        request.scope["note"] = ", client gone"
        return
    first = "-" if made.ttft_s is None else f"{1e3 * made.ttft_s:.0f} ms"
    length = made.stats.acceptance_length
    request.scope["note"] = (
        f", {made.prompt_tokens}+{len(made.token_ids)} tokens, {made.finish_reason}, "
        f"first token {first}, acceptance length {'-' if length is None else f'{length:.2f}'}"
    )
