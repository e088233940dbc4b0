"""Clients that send without end or never read, on a real socket: each is cut off in time."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import uvicorn

from dflash_trt.serve import openai_protocol
from dflash_trt.serve.openai_protocol import ImpatientH11
from dflash_trt.serve.ports import bind

WAIT_S = 0.5
SERVERS: list[uvicorn.Server] = []
GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"


async def app(scope: Any, receive: Any, send: Any) -> None:
    """A short answer; at /much one without end, until the client is gone."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    while scope["path"] == "/much":
        try:
            await send({"type": "http.response.body", "body": bytes(1 << 20), "more_body": True})
        except OSError:
            return
        if not SERVERS[-1].server_state.connections:
            return
    await send({"type": "http.response.body", "body": b"ok"})


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.setattr(openai_protocol, "HEAD_SECONDS", WAIT_S)
    monkeypatch.setattr(openai_protocol, "READ_SECONDS", WAIT_S)
    listener = bind("127.0.0.1", 0, "--port")
    config = uvicorn.Config(app, http=ImpatientH11, lifespan="off", log_config=None, ws="none")
    server = uvicorn.Server(config)

    SERVERS.append(server)
    thread = threading.Thread(target=lambda: server.run(sockets=[listener]), daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield listener.getsockname()[1]
    server.should_exit = True
    thread.join(10)
    assert not thread.is_alive()


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=10)


def seconds_to_the_end(client: socket.socket, drip: bytes = b"") -> float:
    """How long it takes until the server hangs up on a client that sends `drip` slowly."""
    started = time.monotonic()
    client.settimeout(0.1)
    while time.monotonic() - started < 10:
        try:
            if drip:
                client.sendall(drip)
            if client.recv(1 << 16) == b"":
                break
        except TimeoutError:
            continue
        except OSError:
            break
    return time.monotonic() - started


@pytest.mark.parametrize("sent", [b"", b"G", b"GET / HTTP/1.1\r\nhost: x\r\n", GET + b"GET /"])
@pytest.mark.parametrize("drip", [b"", b"x"])
def test_a_head_that_never_ends(port: int, sent: bytes, drip: bytes) -> None:
    with connect(port) as client:
        client.sendall(sent)
        assert WAIT_S * 0.6 < seconds_to_the_end(client, drip) < 8


def test_a_body_that_comes_after_the_answer(port: int) -> None:
    with connect(port) as client:
        client.sendall(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n\r\n")
        assert seconds_to_the_end(client, b"x") < 8


def test_a_client_that_does_not_read(port: int) -> None:
    with connect(port) as client:
        client.sendall(b"GET /much HTTP/1.1\r\nhost: x\r\n\r\n")
        assert client.recv(10)
        ends = time.monotonic() + 8
        while SERVERS[-1].server_state.connections and time.monotonic() < ends:
            time.sleep(0.05)
        assert not SERVERS[-1].server_state.connections


def test_a_slow_answer_and_the_next_request_are_not_cut_off(port: int) -> None:
    with connect(port) as client:
        for _ in range(4):
            client.sendall(GET[:10])
            time.sleep(WAIT_S / 4)
            client.sendall(GET[10:])
            answer = b""
            while not answer.endswith(b"0\r\n\r\n"):
                answer += client.recv(4096)
            assert b"ok" in answer
            time.sleep(WAIT_S * 1.5)  # idle, not in a head: keep-alive's own limit is longer
