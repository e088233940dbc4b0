"""A stream of OpenAI's API whose client is gone before the first event: nothing may run on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from dflash_trt.serve.openai_app import EventStream


class FakeHandle:
    """Remembers whether it was left."""

    left = False

    def __enter__(self) -> FakeHandle:
        return self

    def __exit__(self, *_: object) -> None:
        self.left = True


def test_request_ends_when_its_stream_never_starts() -> None:
    handle: Any = FakeHandle()
    asked: list[str] = []

    async def events() -> AsyncIterator[bytes]:
        asked.append("event")
        yield b"data: x\n\n"

    async def receive() -> dict[str, str]:
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        await asyncio.sleep(10)  # a client that reads nothing

    scope = {"type": "http", "asgi": {"spec_version": "2.3"}}
    asyncio.run(asyncio.wait_for(EventStream(events(), handle)(scope, receive, send), 5))
    assert handle.left
    assert asked == []
