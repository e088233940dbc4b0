"""What hostile clients sent: each is told what is wrong, none ends in a 500, a trace or a hang."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from running import ALONE, Server, eventually, free_ports, serving
from tensors import over_grpc

ASK = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
SHORT = {"max_tokens": 2}
CHAT = {"messages": [{"role": "user", "content": "x"}], **SHORT}
ODD_NUMBERS = (
    "NaN", "Infinity", "-Infinity", "-1", "1e400", "1e-400", "9" * 30, "-" + "9" * 30, '"1"',
    "true", "[]", "{}", "-0.0", "2147483648", "9" * 5000, "0.5",
)  # fmt: skip
NUMBERS = (
    "max_tokens", "temperature", "top_p", "n", "seed", "presence_penalty", "frequency_penalty",
    "top_k", "min_p", "repetition_penalty", "min_tokens", "timeout", "logprobs",
)  # fmt: skip


@pytest.fixture(scope="module")
def alone(engine_path: Path) -> Iterator[Server]:
    with serving(engine_path, triton=False) as made:
        yield made


@pytest.fixture(autouse=True)
def _the_server_lives(alone: Server) -> Any:
    yield
    assert eventually(alone.is_idle)
    assert post(alone, json.dumps({"prompt": "x", **SHORT}).encode())[0] == 200
    assert "Traceback" not in alone.log


def post(server: Server, body: bytes, path: str = "/v1/completions") -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.openai, timeout=60)
    connection.request("POST", path, body)
    answer = connection.getresponse()
    made = answer.status, answer.read()
    connection.close()
    return made


@pytest.mark.parametrize("field", NUMBERS)
def test_every_number_that_is_odd(alone: Server, field: str) -> None:
    for number in ODD_NUMBERS:
        limit = "" if field == "max_tokens" else ', "max_tokens": 2'
        body = f'{{"prompt": "x"{limit}, "{field}": {number}}}'.encode()
        status, text = post(alone, body)
        assert status in (200, 400), (number, text)
        assert len(text) < 1000


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("completions", {"prompt": "x", "logit_bias": {"9" * 5000: 1}}),
        ("completions", {"prompt": "x", "logit_bias": {"\u0663": 1}}),
        ("completions", {"prompt": "x", "logit_bias": {"-1": 1}}),
        ("completions", {"prompt": "x", "y" * 100_000: 1}),
        ("chat/completions", CHAT | {"chat_template_kwargs": {"messages": []}}),
        ("chat/completions", CHAT | {"chat_template_kwargs": {"tools": []}}),
        ("chat/completions", CHAT | {"chat_template_kwargs": {"documents": 1}}),
        ("chat/completions", CHAT | {"messages": [{"role": {}, "content": "x"}]}),
    ],
    ids=lambda value: str(value)[:60],
)
def test_names_that_are_odd(alone: Server, path: str, body: Any) -> None:
    status, text = post(alone, json.dumps({**body, **SHORT}).encode(), f"/v1/{path}")
    assert status == 400, text
    assert len(text) < 1000


def test_a_template_flag_may_have_any_other_name(alone: Server) -> None:
    body = CHAT | {"chat_template_kwargs": {"self": 1, "a b": 2, "": 3, "loop": 4}}
    assert post(alone, json.dumps(body).encode(), "/v1/chat/completions")[0] == 200


@pytest.mark.parametrize(
    "body",
    [b"[" * 200_000, b'{"a":' * 100_000, b'{"prompt": "\xff"}', b'{"prompt": "\\ud800"}',
     '{"prompt": "x"}'.encode("utf-16"), b"", b"null", b"1", b'{"prompt": [[[1]]]}',
     b'{"prompt": [99999999999999999999]}', b'{"prompt": [true]}', b'{"prompt": {}}'],
    ids=lambda body: str(body)[:30],
)  # fmt: skip
def test_bodies_that_are_odd(alone: Server, body: bytes) -> None:
    for path in ("/v1/completions", "/v1/chat/completions"):
        status, text = post(alone, body, path)
        assert status == 400, text
        assert json.loads(text)["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "sent",
    [
        ASK + b"Content-Length: 100\r\n\r\n{", ASK + b"Transfer-Encoding: chunked\r\n\r\nZZ\r\n",
        ASK + b"Transfer-Encoding: chunked\r\n\r\nFFFFFFFFFFFFFFFFFF\r\nx",
        ASK + b"Content-Length: -5\r\n\r\n", ASK + b"X: " + b"a" * 1_000_000 + b"\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", bytes(range(256)) * 50,
        b"GET /v1/models/%ed%a0%80%00 HTTP/1.1\r\nHost: x\r\n\r\n",
    ],
    ids=lambda sent: str(sent[-30:]),
)  # fmt: skip
@pytest.mark.parametrize("is_half_closed", [True, False])
def test_broken_http(alone: Server, sent: bytes, is_half_closed: bool) -> None:
    """The client goes away in the middle: that is no error of the server's, and leaves nothing."""
    with socket.create_connection(("127.0.0.1", alone.openai), timeout=1) as client:
        answer = b""
        with contextlib.suppress(OSError):  # the server may have hung up already
            client.sendall(sent)
            if is_half_closed:
                client.shutdown(socket.SHUT_WR)
            answer = client.recv(65536)
    assert b" 500 " not in answer.split(b"\r\n")[0]
    assert " 500 " not in alone.log


def test_many_that_leave_at_once(alone: Server) -> None:
    body = b'{"prompt": "x", "max_tokens": 4000, "ignore_eos": true, "stream": true}'
    head = ASK + b"Content-Length: %d\r\n\r\n" % len(body)
    clients = [socket.create_connection(("127.0.0.1", alone.openai)) for _ in range(60)]
    for client in clients:
        client.sendall(head + body)
    time.sleep(0.3)
    for number, client in enumerate(clients):
        if number % 2:  # a reset, not an end
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, bytes([1, 0, 0, 0, 0, 0, 0, 0]))
        client.close()
    assert eventually(alone.is_idle)


def test_a_log_that_cannot_be_written(engine_path: Path) -> None:
    """A full disk under the log is no reason to stop serving."""
    (port,) = free_ports(1)
    command = [str(ALONE), "serve", str(engine_path), "--no-triton", "--address", "127.0.0.1",
               "--openai-port", str(port), "--threads", "1"]  # fmt: skip
    full = os.open("/dev/full", os.O_WRONLY)
    pid = os.posix_spawn(
        command[0], command, os.environ,
        file_actions=[(os.POSIX_SPAWN_DUP2, full, 1), (os.POSIX_SPAWN_DUP2, full, 2)],
    )  # fmt: skip
    os.close(full)

    def answers() -> bool:
        url = f"http://127.0.0.1:{port}/v1/completions"
        try:
            with urllib.request.urlopen(
                url, b'{"prompt": "x", "max_tokens": 2}', timeout=5
            ) as made:
                return bool(made.status == 200)
        except OSError:
            return False

    try:
        assert eventually(answers, 90)
        assert answers()
        os.kill(pid, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        pid = 0
    finally:
        if pid:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def test_template_flags_over_triton(server: Server) -> None:
    messages = '[{"role": "user", "content": "x"}]'
    for name in ("messages", "tools"):
        flags = json.dumps({name: []})
        answer = over_grpc(server, messages=messages, chat_template_kwargs=flags, max_tokens=2)
        assert answer.error.startswith("chat template flag")
        assert "reserved" in answer.error
