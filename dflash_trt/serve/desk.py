"""Serves requests that come as tensors, from Triton or from the process of another model."""

from __future__ import annotations

import asyncio
import logging
import weakref
from dataclasses import dataclass
from typing import Literal, Protocol

from dflash_trt.decode.generation import Generation
from dflash_trt.decode.handle import Handle
from dflash_trt.decode.request import Delta
from dflash_trt.errors import DFlashError, EngineStopped, QueueFull, StepError
from dflash_trt.serve.from_tensors import Arrays, TensorRequest, read_request
from dflash_trt.serve.host import EngineHost
from dflash_trt.serve.to_tensors import Answer

_LOG = logging.getLogger(__name__)
CUT_OFF = "the server shut down before the request was over"
TOO_LATE = "the request's time was over before its first token"
CANCEL_PERIOD_S = 0.05  # how often clients are asked whether they went away

Code = Literal["INVALID_ARG", "UNAVAILABLE", "INTERNAL", "CANCELLED"]


@dataclass(frozen=True)
class Refusal:
    """Why there is no output, with the name of Triton's status code."""

    code: Code
    text: str

    @classmethod
    def of(cls, error: Exception) -> Refusal:
        """What a client hears of an exception."""
        if not isinstance(error, DFlashError):
            _LOG.error("a request ended in a bug of ours", exc_info=error)
            return cls("INTERNAL", f"{type(error).__name__}: {error}")
        text = f"{error.message}; {error.hint}" if error.hint else error.message
        if isinstance(error, QueueFull | EngineStopped):
            return cls("UNAVAILABLE", text)
        return cls("INTERNAL" if isinstance(error, StepError) else "INVALID_ARG", text)

    @classmethod
    def at_end(cls, made: Generation) -> Refusal | None:
        """Why a request that is over has no answer; None where it has one, if only a cut one."""
        reason = made.finish_reason
        if reason == "error":
            return cls("INTERNAL", made.error)
        if reason == "cancelled":
            return cls("CANCELLED", "the request was cancelled")
        if reason == "shutdown":
            return cls("UNAVAILABLE", CUT_OFF)
        if reason == "timeout" and not made.token_ids:
            return cls("UNAVAILABLE", TOO_LATE)
        return None


class Client(Protocol):
    """Where a request came from. Methods are called in the front's thread, and must be quick."""

    def send(self, arrays: Arrays, refusal: Refusal | None, *, is_last: bool) -> None:
        """Hand over one response."""

    def is_gone(self) -> bool:
        """Whether nobody waits for more."""


def refuse(client: Client, refusal: Refusal) -> None:
    """Tell a client the end of its request. One that cannot be told is no fault for others."""
    try:
        client.send({}, refusal, is_last=True)
    except Exception:
        _LOG.exception("a client cannot be told: %s", refusal.text)


class RollCall:
    """Asks clients whether they went away. One that fails to answer is not asked again.

    It is taken to be there: its request then ends by itself, and no other client is the worse.
    """

    def __init__(self) -> None:
        self._silent: weakref.WeakSet[Client] = weakref.WeakSet()

    def is_gone(self, client: Client) -> bool:
        """Whether nobody waits for more, as far as can be known."""
        if client in self._silent:
            return False
        try:
            return client.is_gone()
        except Exception:
            _LOG.exception("a client cannot be asked whether it went away")
            self._silent.add(client)
            return False


class TensorDesk:
    """All tensor requests of one engine. Its methods run in the front's event loop."""

    def __init__(self, host: EngineHost) -> None:
        self._host = host
        self._running: dict[int, tuple[Client, Handle]] = {}
        self._roll_call = RollCall()

    async def serve(self, arrays: Arrays, client: Client) -> None:
        """Answer one request to its end. Raises nothing: the client hears of every failure."""
        try:
            with self._host.telemetry.refusals():
                self._host.loop.check_open()
                asked = read_request(arrays)
                handle = await self._host.submit_async(asked.generate)
            with handle:
                self._running[handle.request_id] = (client, handle)
                try:
                    await self._answer(asked, handle, client)
                finally:
                    del self._running[handle.request_id]
        except Exception as error:  # whatever it is
            refuse(client, Refusal.of(error))

    async def _answer(self, asked: TensorRequest, handle: Handle, client: Client) -> None:
        answer = Answer(asked, handle.prompt_tokens)
        unsent: list[Delta] = []
        async for delta in handle:
            unsent.append(delta)
            is_last = delta.finish_reason is not None
            if is_last or (asked.stream and delta.text):
                merged, unsent = Delta.merged(unsent), []
                whole = handle.result() if is_last else None
                refusal = None if whole is None else Refusal.at_end(whole)
                client.send(answer.part(merged, whole), refusal, is_last=is_last)

    async def watch(self) -> None:
        """Cancel the requests whose clients went away, for ever."""
        while True:
            await asyncio.sleep(CANCEL_PERIOD_S)
            for client, handle in list(self._running.values()):
                if self._roll_call.is_gone(client):
                    handle.cancel()
