"""Requests of Triton that end early: what their clients hear."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from toy_server import WAIT_S, Brake, FakeClient, ToyServer, eventually, tensors, toy_server


def asked(text: str, seconds: float | None = None) -> dict[str, Any]:
    more: dict[str, Any] = {"return_finish_reason": np.array([[True]])}
    if seconds is not None:
        more["timeout_seconds"] = np.array([[seconds]], np.float32)
    return tensors(text, 80) | more


def test_text_that_a_deadline_cuts_says_so_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    brake = Brake(0.05)
    with toy_server(monkeypatch, brake) as server:
        brake.is_on = True
        client = FakeClient()
        server.inner.take(asked("abc", 0.5), client)
        assert client.over.wait(WAIT_S)
        assert client.refusals == []
        assert client.arrays[-1]["finish_reason"].tolist() == [[b"timeout"]]
        assert len(client.arrays[-1]["text_output"][0, 0]) > len("abc")


def test_no_token_in_time_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    brake = Brake(0.3)
    with toy_server(monkeypatch, brake) as server:
        brake.is_on = True
        client = FakeClient()
        server.inner.take(asked("abcabcabc", 0.1), client)  # two chunks, so two steps
        assert client.over.wait(WAIT_S)
        (refusal,) = client.refusals
        assert refusal.code == "UNAVAILABLE"
        assert refusal.text == "the request's time was over before its first token"


def leaves(server: ToyServer, client: FakeClient) -> None:
    client.gone = True


def shuts_down(server: ToyServer, client: FakeClient) -> None:
    server.inner.host.close()


@pytest.mark.parametrize(
    ("what", "code", "reason"),
    [(leaves, "CANCELLED", "cancelled"), (shuts_down, "UNAVAILABLE", "shutdown")],
)
def test_the_clients_end_and_ours(
    monkeypatch: pytest.MonkeyPatch,
    what: Callable[[ToyServer, FakeClient], None],
    code: str,
    reason: str,
) -> None:
    brake = Brake(0.05)
    with toy_server(monkeypatch, brake) as server:
        brake.is_on = True
        client = FakeClient()
        server.inner.take(asked("abc"), client)
        assert eventually(lambda: server.metric("slots_in_use") == 1)
        what(server, client)
        assert client.over.wait(WAIT_S)
        assert [refusal.code for refusal in client.refusals] == [code]
        assert server.metric("requests_finished_total", reason=reason) == 1
