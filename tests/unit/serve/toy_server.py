"""A whole engine server in this process, over the toy session, and a small HTTP client for it."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from toy import EOS, TOKENIZER, Call, ToySession, limits

from dflash_trt.decode.engine import Engine
from dflash_trt.serve import host
from dflash_trt.serve.desk import Refusal
from dflash_trt.serve.from_tensors import Arrays
from dflash_trt.serve.options import ServeOptions
from dflash_trt.serve.ports import bind
from dflash_trt.serve.server import EngineServer
from dflash_trt.text import Tokenizer

NAME = "toy"
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
WAIT_S = 60.0


def eventually(check: Callable[[], bool]) -> bool:
    """Whether it becomes true in time."""
    end = time.monotonic() + WAIT_S
    while time.monotonic() < end and not check():
        time.sleep(0.01)
    return check()


def tensors(text: str, max_tokens: int = 2) -> dict[str, Any]:
    """A request as it comes from Triton."""
    return {
        "text_input": np.array([[text.encode()]], object),
        "max_tokens": np.array([[max_tokens]], np.int32),
        "end_id": np.array([[-1]], np.int32),
    }


class Brake:
    """Slows steps down once the server is there: its test of itself must not be slow."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.is_on = seconds, False

    def __call__(self, call: Call) -> None:
        if self.is_on:
            time.sleep(self.seconds)


class FakeClient:
    """Waits for the last response to a tensor request. It may have left, or be broken."""

    def __init__(self, *, gone: bool = False, broken: tuple[str, ...] = ()) -> None:
        self.gone, self.broken = gone, broken
        self.arrays: list[Arrays] = []
        self.refusals: list[Refusal] = []
        self.over = threading.Event()
        self.num_asked = 0

    def send(self, arrays: Arrays, refusal: Refusal | None, *, is_last: bool) -> None:
        if "send" in self.broken:
            raise RuntimeError("send is broken")
        self.arrays.append(arrays)
        if refusal is not None:
            self.refusals.append(refusal)
        if is_last:
            self.over.set()

    def is_gone(self) -> bool:
        self.num_asked += 1
        if "is_gone" in self.broken:
            raise RuntimeError("is_gone is broken")
        return self.gone


def put_toy_in_place(
    on_step: Callable[[Call], None], replace: Callable[[Any, str, Any], None] = setattr
) -> None:
    """Let every `EngineHost` have a toy for its engine."""
    tokenizer = Tokenizer(
        TOKENIZER._backend, special_tokens={}, templates={"default": TEMPLATE}, source="toy"
    )
    facts = SimpleNamespace(backend="toy", choices=SimpleNamespace(precision="none"))
    replace(host, "open_engine", lambda path: SimpleNamespace(config=facts))
    session = ToySession(limits(max_slots=2), on_step=on_step, keep_calls=False)
    made = Engine(session, tokenizer, [EOS])
    replace(host, "Engine", SimpleNamespace(from_dir=lambda *_: made))


def free_port(address: str = "127.0.0.1") -> int:
    with bind(address, 0, "--port") as made:
        port: int = made.getsockname()[1]
        return port


class ToyServer:
    """What a test asks."""

    def __init__(self, inner: EngineServer) -> None:
        self.inner = inner
        self.loop = inner.host.loop
        self._has_ended: bool | None = None

    def close(self) -> bool:
        """What the server's `close` says, which is called once."""
        if self._has_ended is None:
            self._has_ended = self.inner.close()
        return self._has_ended

    def post(self, path: str, **fields: Any) -> tuple[int, Any]:
        """Status and body: JSON, or a list of events where it is a stream."""
        return self.send("POST", path, json.dumps(fields))

    def send(self, method: str, path: str, body: str | None = None) -> tuple[int, Any]:
        options = self.inner.host.options
        connection = http.client.HTTPConnection(options.address, options.openai_port, timeout=60)
        try:
            connection.request(method, path, body)
            answer = connection.getresponse()
            text, kind = answer.read().decode(), answer.headers.get("content-type", "")
        finally:
            connection.close()
        if kind.startswith("text/event-stream"):
            return answer.status, [
                event.removeprefix("data: ") for event in text.split("\n\n")[:-1]
            ]
        return answer.status, json.loads(text) if kind == "application/json" else text

    def complete(self, prompt: str = "abc", **fields: Any) -> tuple[int, Any]:
        fields = {"max_tokens": 8, "temperature": 0, "ignore_eos": True, **fields}
        return self.post("/v1/completions", prompt=prompt, **fields)

    def metric(self, name: str, **labels: str) -> float:
        value = self.inner.host.telemetry.registry.get_sample_value(f"dflash_{name}", labels)
        assert value is not None, name
        return float(value)


@contextmanager
def toy_server(
    monkeypatch: pytest.MonkeyPatch,
    on_step: Callable[[Call], None] = lambda call: None,
    **options: Any,
) -> Iterator[ToyServer]:
    """A server; afterwards it must end."""
    put_toy_in_place(on_step, monkeypatch.setattr)
    address = options.setdefault("address", "127.0.0.1")
    chosen = ServeOptions(
        engine="unused", model_name=NAME, width="4", openai_port=free_port(address), **options
    )
    socket = options.get("socket")
    made = ToyServer(EngineServer(chosen, Path(socket) if socket else None))
    try:
        yield made
    finally:
        made.close()
