"""Requests that end early: cancelled, disconnected, refused because too many wait."""

from __future__ import annotations

import http.client
import json
import queue
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tritonclient.grpc as grpcclient
from running import Server, eventually, serving
from tensors import grpc_input, over_grpc, over_http

from dflash_trt.decode.engine import Engine
from dflash_trt.decode.request import SamplingParams

LONG = 4000  # tokens: seconds, of which a test waits only for the first
FULL_QUEUE = 8
CLIENTS = 60


def cancelled_total(server: Server) -> float:
    return server.metrics().get('dflash_requests_finished_total{reason="cancelled"}', 0.0)


def grpc_cancelled(server: Server, model: str) -> None:
    fields: dict[str, Any] = {
        "text_input": "long", "max_tokens": LONG, "end_id": -1, "stream": True,
    }  # fmt: skip
    first: queue.SimpleQueue[Any] = queue.SimpleQueue()
    with grpcclient.InferenceServerClient(f"127.0.0.1:{server.grpc}") as client:
        client.start_stream(lambda result, error: first.put((result, error)))
        client.async_stream_infer(model, [grpc_input(*item) for item in fields.items()])
        assert first.get(timeout=30)[1] is None
        client.stop_stream(cancel_requests=True)


def disconnect(port: int, path: str, body: dict[str, Any], *, after_first: bool) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("POST", path, json.dumps(body))
    if after_first:
        answer = connection.getresponse()
        assert answer.status == 200
        answer.read(20)
    else:
        time.sleep(0.1)
    connection.close()


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
def test_cancelled_streams_leave_their_slot(server: Server, model: str) -> None:
    before = cancelled_total(server)
    grpc_cancelled(server, model)
    assert eventually(lambda: cancelled_total(server) == before + 1, 3)
    body: dict[str, Any] = {
        "text_input": "long", "max_tokens": LONG, "end_id": -1, "stream": True,
    }  # fmt: skip
    disconnect(server.http, f"/v2/models/{model}/generate_stream", body, after_first=True)
    assert eventually(lambda: cancelled_total(server) == before + 2, 3)
    assert server.is_idle()


@pytest.mark.parametrize("stream", [True, False])
def test_openai_clients_that_go_away(server: Server, stream: bool) -> None:
    before = cancelled_total(server)
    body = {"prompt": "long", "max_tokens": LONG, "ignore_eos": True, "stream": stream}
    disconnect(server.openai, "/v1/completions", body, after_first=stream)
    assert eventually(lambda: cancelled_total(server) == before + 1, 3)
    assert server.is_idle()


def test_many_disconnects_leave_the_others_alone(server: Server, engine: Engine) -> None:
    """Clients go away at random moments while steady ones read their whole text."""
    expected = engine.generate(engine.tokenizer.encode("steady"), SamplingParams(max_tokens=200))
    done = threading.Event()
    texts: list[str] = []

    def steady() -> None:
        while not done.is_set():
            answer = over_http(server, text_input="steady", max_tokens=200, stream=True)
            texts.append(answer.text)

    def leave(seed: int) -> None:
        rng = random.Random(seed)
        body: dict[str, Any] = {"max_tokens": LONG, "stream": True}
        if seed % 2:
            body |= {"prompt": "gone", "ignore_eos": True}
            port, path = server.openai, "/v1/completions"
        else:
            body |= {"text_input": "gone", "end_id": -1}
            port, path = server.http, "/v2/models/ensemble/generate_stream"
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        connection.request("POST", path, json.dumps(body))
        time.sleep(rng.uniform(0, 0.3))
        connection.close()

    reader = threading.Thread(target=steady)
    reader.start()
    with ThreadPoolExecutor(12) as pool:
        for left in [pool.submit(leave, seed) for seed in range(120)]:
            left.result()
    done.set()
    reader.join()
    assert texts
    assert set(texts) == {expected.text}
    assert eventually(server.is_idle, 10)


@pytest.fixture(scope="module")
def busy_server(engine_path: Path) -> Iterator[Server]:
    with serving(engine_path, "--queue", str(FULL_QUEUE)) as made:
        yield made


def test_full_queue(busy_server: Server, engine: Engine) -> None:
    """Every client gets its whole text or, at once, a refusal."""
    expected = engine.generate(engine.tokenizer.encode("q"), SamplingParams(max_tokens=150)).text

    def ask(index: int) -> str:
        fields: dict[str, Any] = {"text_input": "q", "max_tokens": 150, "stream": True}
        if index % 3 == 2:
            answer = over_http(busy_server, **fields)
            refused = "requests run or wait" in answer.error
        else:
            model = ("ensemble", "tensorrt_llm_bls")[index % 3]
            answer = over_grpc(busy_server, model, **fields)
            refused = "requests run or wait" in answer.error
        if answer.error:
            assert refused, answer.error
            assert not answer.responses
            return "refused"
        assert answer.text == expected
        return "served"

    with ThreadPoolExecutor(CLIENTS) as pool:
        ends = list(pool.map(ask, range(CLIENTS)))
    assert set(ends) == {"served", "refused"}
    assert ends.count("served") >= FULL_QUEUE
    assert eventually(busy_server.is_idle)


def test_deadline(server: Server) -> None:
    answer = over_http(
        server, text_input="x", max_tokens=LONG, end_id=-1, timeout_seconds=0.3,
        return_finish_reason=True,
    )  # fmt: skip
    assert answer.last["finish_reason"] == "timeout"
    assert 0 < len(answer.text) < LONG
