"""Requests that cannot be served: an error each, and the server lives."""

from __future__ import annotations

import json
import random
import urllib.error
import urllib.request
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from running import Server
from tensors import TYPES, grpc_infer, grpc_input, over_grpc, over_http

NUM_FUZZED = 150


@pytest.fixture(autouse=True)
def _the_server_lives(server: Server) -> Any:
    yield
    assert over_grpc(server, text_input="alive?", max_tokens=2).error == ""
    assert server.is_idle()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_tokens": 1}, "the prompt is empty"),
        ({"text_input": ""}, "the prompt is empty"),
        ({"text_input": "x", "input_ids": [1]}, "exactly one of"),
        ({"text_input": "x", "max_tokens": 0}, "max_tokens is 0"),
        ({"text_input": "x", "max_tokens": 5000}, "exceed the engine's 4096"),
        ({"text_input": "x" * 4096, "max_tokens": 1}, "the prompt has 4096 tokens"),
        ({"text_input": "x", "temperature": -1.0}, "temperature is -1.0"),
        ({"text_input": "x", "temperature": float("nan")}, "temperature is nan"),
        ({"text_input": "x", "top_k": -5}, "top_k is -5"),
        ({"text_input": "x", "stop_words": ["a"] * 100}, "stop"),
        ({"text_input": b"\xff\xfe"}, "text_input is not UTF-8 at byte 0"),
        ({"text_input": "x", "stop_words": [b"\xc3"]}, "stop_words is not UTF-8"),
        ({"input_ids": [5, 10**6]}, "outside the vocabulary"),
        ({"input_ids": [-1]}, "outside the vocabulary"),
        ({"messages": "{"}, "messages is not JSON"),
        ({"messages": "[" * 100000}, "messages is not JSON"),
        ({"messages": '{"role": "user"}'}, "messages is not a JSON list"),
        ({"messages": "[5]"}, "messages[0]"),
    ],
    ids=lambda value: str(value)[:30],
)  # fmt: skip
def test_bad_values(server: Server, fields: dict[str, Any], message: str) -> None:
    for model in ("ensemble", "tensorrt_llm_bls"):
        answer = over_grpc(server, model, **fields)
        assert message in answer.error


def test_a_stream_that_asks_is_told_the_status(server: Server) -> None:
    for name, value in (("max_tokens", 0), ("text_input", b"\xff"), ("input_ids", [-1])):
        inputs = [grpc_input(name, value)]
        answer = grpc_infer(server, inputs, "tensorrt_llm_bls", with_status=True)
        assert answer.error.startswith("StatusCode.INVALID_ARGUMENT ")
        assert grpc_infer(server, inputs, "tensorrt_llm_bls").error == answer.error.split(" ", 1)[1]


@pytest.mark.parametrize(
    ("name", "kind", "array"),
    [
        ("beam_width", "INT32", np.array([[2]], np.int32)),
        ("num_return_sequences", "INT32", np.array([[3]], np.int32)),
        ("return_context_logits", "BOOL", np.array([[True]])),
        ("lora_task_id", "UINT64", np.array([[4]], np.uint64)),
        ("guided_decoding_guide", "BYTES", np.array([[b"{}"]], np.object_)),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    server: Server, name: str, kind: str, array: Any
) -> None:
    extra = grpcclient.InferInput(name, list(array.shape), kind)
    extra.set_data_from_numpy(array)
    answer = grpc_infer(server, [grpc_input("text_input", "x"), extra])
    assert answer.error == f"{name} is not supported"


def test_what_asks_for_nothing_is_no_reason_to_refuse(server: Server) -> None:
    fields = {"beam_width": 1, "guided_decoding_guide": "", "length_penalty": 1.0, "pad_id": 0}
    assert over_http(server, text_input="x", max_tokens=2, **fields).error == ""


def test_long_prompts_are_refused_before_they_are_read(server: Server) -> None:
    answer = over_http(server, text_input="word " * 2_000_000, max_tokens=1)
    assert "the prompt has 10000000 characters" in answer.error


def test_fuzzed_tensors(server: Server) -> None:
    """Random names, types, shapes and bytes: each ends, whatever it ends in."""
    rng = random.Random(11)
    kinds = {"BYTES": np.object_, "INT32": np.int32, "UINT64": np.uint64, "FP32": np.float32,
             "BOOL": np.bool_, "FP16": np.float16, "INT64": np.int64}  # fmt: skip
    num_errors = 0
    for _ in range(NUM_FUZZED):
        inputs = [grpc_input("text_input", "fuzz"), grpc_input("max_tokens", 3)]
        for name in rng.sample([*sorted(TYPES), "nonsense", "batch_index", "\u00e9\n"], 2):
            if name in ("text_input", "max_tokens"):
                continue
            kind = TYPES.get(name, ("INT32", 0))[0] if rng.random() < 0.6 else rng.choice([*kinds])
            shape = [rng.choice([0, 1, 1, 2, 7]) for _ in range(rng.choice([0, 1, 2, 2, 2, 3]))]
            count = int(np.prod(shape))
            if kind == "BYTES":
                values: Any = [rng.randbytes(rng.randrange(9)) for _ in range(count)]
            else:
                values = [rng.choice([0, 1, 1, 3, 120]) for _ in range(count)]
            array = np.array(values, kinds[kind]).reshape(shape)
            made = grpcclient.InferInput(name, shape, kind)
            made.set_data_from_numpy(array)
            inputs.append(made)
        answer = grpc_infer(server, inputs, rng.choice(["ensemble", "tensorrt_llm_bls"]))
        num_errors += bool(answer.error)
        assert answer.error or answer.responses
    assert 0 < num_errors < NUM_FUZZED


def test_fuzzed_bodies(server: Server) -> None:
    """The same for JSON, on both front ends."""
    rng = random.Random(12)
    whole = json.dumps({"text_input": "x", "prompt": "x", "max_tokens": 2, "messages": []}).encode()
    for number in range(60):
        body = bytearray(whole)
        for _ in range(rng.randint(1, 6)):
            body[rng.randrange(len(body))] = rng.randrange(256)
        places = [
            server.url("/v2/models/ensemble/generate"),
            server.openai_url("/v1/completions"),
            server.openai_url("/v1/chat/completions"),
        ]
        request = urllib.request.Request(places[number % 3], bytes(body))
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                status = answer.status
        except urllib.error.HTTPError as error:
            with error:
                status, text = error.code, error.read().decode()
            if number % 3 == 0 and "failed to parse the request JSON" in text:
                status = 400  # what Triton itself calls an error of its own
        assert status == 200 or 400 <= status < 500
