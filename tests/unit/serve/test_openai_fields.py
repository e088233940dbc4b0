"""What OpenAI's clients send beside the prompt, and the codes of errors that they look for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from toy_server import NAME, ToyServer, toy_server

MESSAGES = [{"role": "user", "content": "abc"}]


@pytest.fixture(scope="module")
def server() -> Iterator[ToyServer]:
    with pytest.MonkeyPatch.context() as patch, toy_server(patch) as made:
        yield made


def chat(server: ToyServer, **fields: Any) -> tuple[int, Any]:
    return server.post("/v1/chat/completions", messages=MESSAGES, max_tokens=3, **fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"parallel_tool_calls": False}, {"parallel_tool_calls": True}, {"modalities": ["text"]},
        {"function_call": "none"}, {"function_call": "auto"}, {"functions": []}, {"tools": []},
        {"tool_choice": "none"}, {"tool_choice": "auto"}, {"verbosity": None},
        {"verbosity": "medium"}, {"prompt_cache_retention": "24h"}, {"prompt_cache_key": "k"},
        {"safety_identifier": "s"}, {"service_tier": "auto"}, {"metadata": {"a": "b"}},
        {"store": False}, {"user": "u"}, {"audio": None}, {"prediction": None},
        {"reasoning_effort": None}, {"web_search_options": None}, {"logit_bias": {}},
        {"response_format": {"type": "text"}}, {"stream_options": None}, {"n": 1},
    ],
    ids=str,
)  # fmt: skip
def test_fields_that_ask_for_nothing_are_taken(server: ToyServer, fields: dict[str, Any]) -> None:
    assert chat(server, **fields)[0] == 200


@pytest.mark.parametrize("fields", [{"suffix": ""}, {"suffix": None}, {"best_of": 1}], ids=str)
def test_the_same_for_completions(server: ToyServer, fields: dict[str, Any]) -> None:
    assert server.complete(**fields)[0] == 200


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"modalities": ["text", "audio"]}, "modalities.1: Input should be 'text'"),
        ({"function_call": {"name": "f"}}, "function_call: Input should be 'none' or 'auto'"),
        ({"functions": [{"name": "f"}]}, "functions: calls are not parsed"),
        ({"verbosity": "low"}, "verbosity: Input should be 'medium'"),
        ({"audio": {"voice": "x"}}, "audio: Extra inputs are not permitted"),
        ({"reasoning_effort": "high"}, "reasoning_effort: Extra inputs are not permitted"),
    ],
    ids=str,
)
def test_fields_that_ask_for_something_else_are_refused(
    server: ToyServer, fields: dict[str, Any], message: str
) -> None:
    status, body = chat(server, **fields)
    assert status == 400
    assert message in body["error"]["message"]
    status, body = server.complete(suffix="end")
    assert (status, "suffix" in body["error"]["message"]) == (400, True)


def test_a_top_p_of_0_is_the_likeliest_token(server: ToyServer) -> None:
    fields: dict[str, Any] = {"prompt": "abc", "max_tokens": 20, "ignore_eos": True}
    greedy = server.post("/v1/completions", temperature=0, **fields)[1]["choices"]
    for temperature in (0, 0.8, 2):
        more = {"temperature": temperature, "seed": 5}
        assert server.post("/v1/completions", top_p=0, **more, **fields)[1]["choices"] == greedy
        sampled = server.post("/v1/completions", top_p=1, **more, **fields)[1]["choices"]
        assert (sampled == greedy) == (temperature == 0)
    assert server.post("/v1/completions", top_p=0, temperature=-1, **fields)[0] == 400


@pytest.mark.parametrize("method", ["POST", "GET"])
@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/responses", "/v2", "/v1/nothing\t"])
def test_a_path_that_there_is_not_is_no_unknown_model(
    server: ToyServer, method: str, path: str
) -> None:
    sent = path.replace("\t", "%09")
    status, body = server.send(method, sent, "{}")
    assert status == 404
    assert body["error"]["type"] == "invalid_request_error"
    assert body["error"]["code"] is None
    name = path.replace("\t", "?")
    assert body["error"]["message"] == f"there is no {method} {name} here"


def test_a_method_that_there_is_not(server: ToyServer) -> None:
    status, body = server.send("GET", "/v1/completions")
    assert (status, body["error"]["code"]) == (405, None)


def test_an_unknown_model_says_so(server: ToyServer) -> None:
    for status, body in (chat(server, model="other"), server.send("GET", "/v1/models/other")):
        assert status == 404
        error = body["error"]
        assert (error["code"], error["param"]) == ("model_not_found", "model")
        assert error["type"] == "invalid_request_error"
        assert error["message"].startswith("the model 'other' does not exist")
    assert chat(server, model=NAME)[0] == 200


@pytest.mark.parametrize("length", [96, 5000], ids=["beyond the engine", "not even read"])
def test_a_prompt_that_is_too_long_has_the_code_that_clients_look_for(
    server: ToyServer, length: int
) -> None:
    long = "a" * length
    answers = {
        "messages": server.post(
            "/v1/chat/completions", messages=[{"role": "user", "content": long}]
        ),
        "prompt": server.complete(long),
    }
    for param, (status, body) in answers.items():
        assert status == 400
        assert body["error"]["code"] == "context_length_exceeded"
        assert body["error"]["param"] == param
        assert body["error"]["type"] == "invalid_request_error"
    status, body = server.complete("a" * 90, max_tokens=7)  # both together
    assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
    assert server.complete(temperature=-1)[1]["error"]["code"] is None
