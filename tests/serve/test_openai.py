"""OpenAI's API, driven by OpenAI's own client, against the engine in this process."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from running import Server, eventually, serving

from dflash_trt.decode.engine import Engine
from dflash_trt.decode.request import SamplingParams

MESSAGES: Any = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def alone(engine_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """OpenAI's API without Triton, with keys and small limits."""
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("first-key\nsecond-key\n")
    flags = ("--api-key-file", str(keys), "--model-name", "tiny", "--max-body-bytes", "20000")
    with serving(engine_path, *flags, triton=False) as made:
        yield made


@pytest.fixture(scope="module")
def client(alone: Server) -> Iterator[openai.OpenAI]:
    base = alone.openai_url("/v1")
    with openai.OpenAI(base_url=base, api_key="second-key", max_retries=0) as made:
        yield made


def test_chat(client: openai.OpenAI, engine: Engine) -> None:
    ids = engine.tokenizer.encode_chat(MESSAGES)
    params = SamplingParams(max_tokens=40, temperature=0.5, top_p=0.75, seed=3)
    expected = engine.generate(ids, params)
    fields: Any = {
        "model": "tiny", "messages": MESSAGES, "max_tokens": 40, "temperature": 0.5, "top_p": 0.75,
        "seed": 3,
    }  # fmt: skip
    whole = client.chat.completions.create(**fields)
    assert whole.choices[0].message.content == expected.text
    assert whole.choices[0].message.role == "assistant"
    assert whole.choices[0].finish_reason == expected.finish_reason
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == len(ids)
    assert whole.usage.completion_tokens == len(expected.token_ids)

    stream = client.chat.completions.create(
        **fields, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == expected.text
    assert chunks[-2].choices[0].finish_reason == expected.finish_reason
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage


def test_chat_logprobs(client: openai.OpenAI, engine: Engine) -> None:
    ids = engine.tokenizer.encode_chat(MESSAGES)
    expected = engine.generate(ids, SamplingParams(max_tokens=6, logprobs=2)).logprobs
    assert expected is not None
    fields: Any = {
        "model": "tiny", "messages": MESSAGES, "max_completion_tokens": 6, "temperature": 0,
        "logprobs": True, "top_logprobs": 2,
    }  # fmt: skip
    whole = client.chat.completions.create(**fields).choices[0].logprobs
    assert whole is not None
    assert whole.content is not None
    streamed = [
        entry
        for chunk in client.chat.completions.create(**fields, stream=True)
        if chunk.choices[0].logprobs is not None
        for entry in chunk.choices[0].logprobs.content or ()
    ]
    for content in (whole.content, streamed):
        assert [e.logprob for e in content] == pytest.approx([e.logprob for e in expected])
        for entry, own in zip(content, expected, strict=True):
            assert entry.token == engine.tokenizer.decode([own.token_id], False)
            assert bytes(entry.bytes or ()) == entry.token.encode()
            top = [one.logprob for one in entry.top_logprobs]
            assert top == pytest.approx([value for _, value in own.top])


def test_completion(client: openai.OpenAI, engine: Engine) -> None:
    ids = engine.tokenizer.encode("Once upon")
    made = engine.generate(ids, SamplingParams(max_tokens=30))
    stop = made.text[10:12]
    expected = made.text[: made.text.index(stop)]
    fields: Any = {"model": "tiny", "max_tokens": 30, "temperature": 0, "stop": [stop]}
    for prompt in ("Once upon", ids, ["Once upon"], [ids]):
        whole = client.completions.create(prompt=prompt, **fields)
        assert whole.choices[0].text == expected
        assert whole.choices[0].finish_reason == "stop"
    chunks = client.completions.create(prompt="Once upon", **fields, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected
    echoed = client.completions.create(prompt="Once upon", **fields, echo=True)
    assert echoed.choices[0].text == "Once upon" + expected
    default = client.completions.create(model="tiny", prompt="x", extra_body={"ignore_eos": True})
    assert default.usage is not None
    assert default.usage.completion_tokens == 16


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.completions.create(model="other", prompt="x")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temprature": 1}, "temprature: Extra inputs are not permitted"),
        ({"max_tokens": "many"}, "max_tokens: Input should be a valid integer"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"max_tokens": 10**6}, "exceed the engine's 4096"),
        ({"temperature": 1e9}, "temperature is 1000000000.0"),
        ({"n": 2}, "n: Input should be 1"),
        ({"messages": []}, "messages is empty"),
        ({"messages": [{"role": "user"}]}, "has no content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "only text"),
        ({"top_logprobs": 3}, "needs logprobs"),
        ({"logit_bias": {"a": 1}}, "'a' is not a token id"),
        ({"tools": [{"type": "function"}]}, "calls are not parsed"),
        ({"response_format": {"type": "json_object"}}, "response_format.type"),
    ],
    ids=str,
)
def test_bad_fields(client: openai.OpenAI, fields: dict[str, Any], message: str) -> None:
    body = {"messages": MESSAGES, "max_tokens": 2, **fields}
    with pytest.raises(openai.BadRequestError) as caught:
        client.post("/chat/completions", body=body, cast_to=object)
    assert message in str(caught.value)
    assert caught.value.type == "invalid_request_error"


def test_keys(alone: Server) -> None:
    for key in ("wrong", "first-key2", "\u00fc"):
        with (
            openai.OpenAI(base_url=alone.openai_url("/v1"), api_key=key, max_retries=0) as other,
            pytest.raises((openai.AuthenticationError, UnicodeEncodeError)),
        ):
            other.models.list()
    assert _get(alone, "/v1/models", {})[0] == 401
    assert _get(alone, "/v1/models", {"authorization": "Bearer first-key"})[0] == 200
    for path in ("/health/live", "/health/ready", "/metrics"):
        assert _get(alone, path, {})[0] == 200
    assert _get(alone, "/nothing", {})[0] == 404


def test_body_limit(alone: Server, client: openai.OpenAI) -> None:
    with pytest.raises(openai.APIStatusError, match="longer than 20000 bytes") as caught:
        client.completions.create(model="tiny", prompt="x" * 30000)
    assert caught.value.status_code == 413
    # Without a length in its head, a body is counted as it comes.
    pieces = (b"x" * 1000 for _ in range(40))
    headers = {"authorization": "Bearer first-key"}
    request = urllib.request.Request(alone.openai_url("/v1/completions"), pieces, headers)
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=20)
    with refused.value as error:
        assert error.code == 413


def test_request_ids(alone: Server) -> None:
    headers = {"authorization": "Bearer first-key", "x-request-id": "my-id:7"}
    assert _get(alone, "/v1/models", headers)[1] == "my-id:7"
    bad = {**headers, "x-request-id": "no good\t"}
    made = _get(alone, "/v1/models", bad)[1]
    assert made not in ("", "no good")
    said = "my-id:7 GET /v1/models 200"  # on another thread than the answer
    assert eventually(lambda: any(said in line for line in alone.lines))


def _get(server: Server, path: str, headers: dict[str, str]) -> tuple[int, str]:
    request = urllib.request.Request(server.openai_url(path), headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, answer.headers["x-request-id"]
    except urllib.error.HTTPError as error:
        with error:
            status, headers_, text = error.code, error.headers, error.read()
    if path.startswith("/v1"):
        assert set(json.loads(text)["error"]) == {"message", "type", "param", "code"}
    return status, headers_["x-request-id"]
