"""Requests of OpenAI's API that end early: by their time, by shutdown, by an engine that hangs."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from toy_loop import Gate
from toy_server import WAIT_S, Brake, ToyServer, eventually, toy_server

TWO_CHUNKS = "abcabcabc"  # so its first token comes with the second step


def in_background(work: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    made: list[Any] = []
    thread = threading.Thread(target=lambda: made.append(work()))
    thread.start()
    return thread, made


def test_text_that_a_deadline_cuts_is_of_that_length(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    brake = Brake(0.05)
    with toy_server(monkeypatch, brake) as server:
        brake.is_on = True
        status, whole = server.complete(max_tokens=80, timeout=0.5)
        assert status == 200
        assert whole["choices"][0]["finish_reason"] == "length"
        assert 0 < whole["usage"]["completion_tokens"] < 80
        status, events = server.complete(max_tokens=80, timeout=0.5, stream=True)
        assert (status, events[-1]) == (200, "[DONE]")
        assert json.loads(events[-2])["choices"][0]["finish_reason"] == "length"
        assert server.metric("requests_finished_total", reason="timeout") == 2
    assert ", timeout, " in caplog.text  # the log has our own reason


def test_no_token_in_time_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    brake = Brake(0.3)
    with toy_server(monkeypatch, brake) as server:
        brake.is_on = True
        for path in ("/v1/completions", "/v1/chat/completions"):
            fields: dict[str, Any] = {"prompt": TWO_CHUNKS}
            if "chat" in path:
                fields = {"messages": [{"role": "user", "content": TWO_CHUNKS}]}
            status, body = server.post(path, timeout=0.1, **fields)
            assert status == 504
            assert body["error"]["type"] == "timeout_error"
            assert "before its first token" in body["error"]["message"]
            status, (only,) = server.post(path, timeout=0.1, stream=True, **fields)
            assert json.loads(only) == body


@pytest.mark.parametrize("stream", [False, True])
def test_requests_cut_off_by_shutdown_have_a_reason_of_their_own(
    monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    brake = Brake(0.05)
    with toy_server(monkeypatch, brake) as server:
        brake.is_on = True
        thread, made = in_background(lambda: server.complete(max_tokens=80, stream=stream))
        assert eventually(lambda: server.metric("slots_in_use") == 1)
        assert server.inner.host.close()
        thread.join(WAIT_S)
        ((status, body),) = made
        assert status == (200 if stream else 503)
        error = json.loads(body[-1])["error"] if stream else body["error"]
        assert error["message"] == "the server shut down before the request was over"
        assert "[DONE]" not in body
        assert server.metric("requests_finished_total", reason="shutdown") == 1
        assert server.metric("requests_finished_total", reason="cancelled") == 0


def test_health_and_draining(monkeypatch: pytest.MonkeyPatch) -> None:
    brake = Brake(0.02)
    before = time.time()
    with toy_server(monkeypatch, brake) as server:
        assert before <= server.metric("start_time_seconds") <= time.time()
        assert (server.metric("healthy"), server.metric("draining")) == (1, 0)
        brake.is_on = True
        thread, made = in_background(lambda: server.complete(max_tokens=80))
        assert eventually(lambda: server.metric("slots_in_use") == 1)
        assert not server.inner.host.drain(0)
        assert (server.metric("healthy"), server.metric("draining")) == (1, 1)
        thread.join(WAIT_S)
        assert made[0][0] == 200
        server.inner.host.close()
        assert (server.metric("healthy"), server.metric("draining")) == (0, 1)


def test_a_step_that_hangs_ends_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(is_open=True)

    def ask(server: ToyServer) -> tuple[int, Any]:
        return server.complete(max_tokens=80)

    with toy_server(monkeypatch, gate, step_seconds=0.4) as server:
        assert server.send("GET", "/health/live")[0] == 200
        gate.go_on.clear()
        status, body = ask(server)
        assert status == 500
        assert "a step has not ended for 0.4 s" in body["error"]["message"]
        assert server.metric("healthy") == server.metric("draining") == 0
        assert server.send("GET", "/health/live")[0] == 503
        status, body = ask(server)
        assert (status, "is dead: a step has not ended" in body["error"]["message"]) == (503, True)
        started = time.monotonic()
        assert not server.close()
        assert time.monotonic() - started < 5
        gate.go_on.set()
        server.loop._thread.join(WAIT_S)
