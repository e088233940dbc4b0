"""Errors in the form of OpenAI's API: what a client reads that has no answer."""

from __future__ import annotations

from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from dflash_trt.decode.generation import Generation
from dflash_trt.errors import CapacityError, DFlashError, QueueFull, RequestError
from dflash_trt.serve.desk import Refusal

CLIENT_GONE = 499  # nginx's number for a client that went away before its answer
TOO_LATE = 504
RETRY = {"retry-after": "1"}
_STATUS = {"UNAVAILABLE": 503, "INTERNAL": 500, "INVALID_ARG": 400, "CANCELLED": CLIENT_GONE}
_KINDS = {
    400: "invalid_request_error", 401: "authentication_error", 404: "invalid_request_error",
    405: "invalid_request_error", 408: "timeout_error", 413: "invalid_request_error",
    503: "service_unavailable_error", TOO_LATE: "timeout_error",
}  # fmt: skip
_MAX_PATH = 200  # characters of a path in a message or the log: clients may send any


class UnknownModel(RequestError):
    """The request names a model that is not served here."""


def error_body(
    status: int, message: str, code: str | None = None, param: str | None = None
) -> dict[str, Any]:
    """An error in the form of OpenAI's API."""
    kind = _KINDS.get(status, "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def failure_of(made: Generation) -> tuple[int, dict[str, Any]] | None:
    """Status and body for a request that is over without an answer; None where it has one."""
    refusal = Refusal.at_end(made)
    if refusal is None:
        return None
    status = TOO_LATE if made.finish_reason == "timeout" else _STATUS[refusal.code]
    return status, error_body(status, refusal.text)


def error_response(status: int, body: dict[str, Any]) -> Response:
    """An error as a whole answer."""
    return JSONResponse(body, status, headers=RETRY if status == 503 else None)


def printable(path: str) -> str:
    """A client's path as it may stand in a message."""
    return "".join(char if char.isprintable() else "?" for char in path[:_MAX_PATH])


async def on_http_error(request: Request, error: Exception) -> Response:
    """An exception that has a status already, or a path or method that there is not."""
    assert isinstance(error, HTTPException)
    message = error.detail
    if error.status_code in (404, 405):  # the only sender of these is the router
        message = f"there is no {request.method} {printable(request.scope['path'])} here"
    body = error_body(error.status_code, message)
    return JSONResponse(body, error.status_code, headers=error.headers)


async def on_refusal(request: Request, error: Exception) -> Response:
    """Any error of ours."""
    assert isinstance(error, DFlashError)
    refusal = Refusal.of(error)
    if isinstance(error, UnknownModel):
        return error_response(404, error_body(404, refusal.text, "model_not_found", "model"))
    status = _STATUS[refusal.code]
    if isinstance(error, CapacityError) and not isinstance(error, QueueFull):
        # Clients that send less when a prompt was too long look for this code.
        is_chat = request.scope["path"].endswith("/chat/completions")
        param = "messages" if is_chat else "prompt"
        body = error_body(status, refusal.text, "context_length_exceeded", param)
        return error_response(status, body)
    return error_response(status, error_body(status, refusal.text))


async def on_bug(request: Request, error: Exception) -> Response:
    """What nobody foresaw."""
    return JSONResponse(error_body(500, "an error inside the server"), 500)
