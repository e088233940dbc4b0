"""Requests that are not taken in: each is counted once, with its reason, on every way in."""

from __future__ import annotations

import http.client
import socket
import threading
from typing import Any

import pytest
from toy_loop import Gate
from toy_server import WAIT_S, FakeClient, ToyServer, eventually, tensors, toy_server

from dflash_trt.serve.desk import Refusal

REASONS = ("queue_full", "stopping", "invalid", "overload")


def ask_with_tensors(server: ToyServer, text: str, max_tokens: int = 2) -> list[Refusal]:
    client = FakeClient()
    server.inner.take(tensors(text, max_tokens), client)
    assert client.over.wait(WAIT_S)
    return client.refusals


def refused(server: ToyServer) -> dict[str, float]:
    counts = {r: server.metric("requests_refused_total", reason=r) for r in REASONS}
    return {reason: count for reason, count in counts.items() if count}


def test_every_reason_is_there_from_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    with toy_server(monkeypatch) as server:
        assert refused(server) == {}
        assert server.complete()[0] == 200
        assert ask_with_tensors(server, "abc") == []
        assert refused(server) == {}


def test_invalid(monkeypatch: pytest.MonkeyPatch) -> None:
    with toy_server(monkeypatch, max_body_bytes=2000) as server:
        bad: list[dict[str, Any]] = [
            {"temperature": -1}, {"nonsense": 1}, {"model": "other"}, {"prompt": "a" * 90},
            {"prompt": ""}, {"prompt": "a" * 3000},
        ]  # fmt: skip
        for number, fields in enumerate(bad, 1):
            assert server.complete(**fields)[0] in (400, 404, 413)
            assert refused(server) == {"invalid": number}
        assert [r.code for r in ask_with_tensors(server, "a" * 90, 30)] == ["INVALID_ARG"]
        assert refused(server) == {"invalid": len(bad) + 1}
        with socket.create_connection(("127.0.0.1", server.inner.host.options.openai_port)) as raw:
            head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
            raw.sendall(head + b"bb8\r\n" + b"x" * 3000 + b"\r\n0\r\n\r\n")
            assert b" 413 " in raw.recv(4096)
        assert refused(server) == {"invalid": len(bad) + 2}


def test_queue_full_and_stopping(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(is_open=True)
    with toy_server(monkeypatch, gate, queue=1) as server:
        gate.go_on.clear()
        threads = [threading.Thread(target=server.complete) for _ in range(3)]
        for thread in threads:
            thread.start()
        assert eventually(lambda: server.loop.num_requests == 3)
        assert server.complete()[0] == 503
        assert [r.code for r in ask_with_tensors(server, "abc")] == ["UNAVAILABLE"]
        assert refused(server) == {"queue_full": 2}
        server.inner.host.drain(0)
        assert server.complete()[0] == 503
        assert [r.code for r in ask_with_tensors(server, "abc")] == ["UNAVAILABLE"]
        assert refused(server) == {"queue_full": 2, "stopping": 2}
        gate.go_on.set()
        for thread in threads:
            thread.join(WAIT_S)


def test_overload(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(is_open=True)
    with toy_server(monkeypatch, gate, max_connections=1) as server:
        gate.go_on.clear()
        thread = threading.Thread(target=server.complete)
        thread.start()
        assert eventually(lambda: server.loop.num_requests == 1)
        assert server.complete()[0] == 503
        assert refused(server) == {"overload": 1}
        gate.go_on.set()
        thread.join(WAIT_S)


def test_who_only_leaves_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with toy_server(monkeypatch) as server:
        port = server.inner.host.options.openai_port
        connection = http.client.HTTPConnection("127.0.0.1", port)
        connection.putrequest("POST", "/v1/completions")
        connection.putheader("content-length", "100")
        connection.endheaders(b"{")
        connection.close()
        assert server.complete()[0] == 200
        assert refused(server) == {}
