"""The Triton models against the engine in this process: same requests, same text."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from running import Server
from tensors import over_grpc, over_http

from dflash_trt.decode.engine import Engine, Generation
from dflash_trt.decode.request import SamplingParams

NUM_MIXED = 100


def mixed_request(rng: random.Random) -> tuple[dict[str, Any], SamplingParams]:
    """The fields of a request of any kind, and the same in the package's own terms."""
    text = "".join(chr(rng.randrange(0x20, 0x7F)) for _ in range(rng.randint(1, 60)))
    fields: dict[str, Any] = {"text_input": text, "max_tokens": rng.randint(1, 60)}
    params: dict[str, Any] = {"max_tokens": fields["max_tokens"]}
    if rng.random() < 0.6:  # values that float32 holds exactly
        fields |= {"temperature": rng.choice([0.5, 1.0]), "seed": rng.randrange(1 << 40)}
        params |= {"temperature": fields["temperature"], "seed": fields["seed"]}
        if rng.random() < 0.5:
            fields["top_k"] = params["top_k"] = rng.choice([5, 40])
        if rng.random() < 0.5:
            fields["top_p"] = params["top_p"] = 0.75
    if rng.random() < 0.4:
        words = ["".join(chr(rng.randrange(0x20, 0x7F)) for _ in range(rng.randint(1, 2)))]
        fields["stop_words"], params["stop"] = [*words, ""], words
    if rng.random() < 0.2:
        fields["bad_words"] = params["bad_words"] = [chr(rng.randrange(0x21, 0x7F))]
    if rng.random() < 0.2:
        fields["repetition_penalty"] = params["repetition_penalty"] = 1.25
    return fields, SamplingParams(**params)


@pytest.fixture(scope="module")
def mixed(engine: Engine) -> list[tuple[dict[str, Any], Generation]]:
    """Requests and what the engine makes of each, in this process."""
    rng = random.Random(5)
    requests = [mixed_request(rng) for _ in range(NUM_MIXED)]
    prompts = [(engine.tokenizer.encode(f["text_input"]), params) for f, params in requests]
    made = engine.generate_all(prompts)
    return [(fields, one) for (fields, _), one in zip(requests, made, strict=True)]


def test_mixed_requests_at_once(
    server: Server, mixed: list[tuple[dict[str, Any], Generation]]
) -> None:
    ways = [
        (send, model, stream)
        for send in (over_http, over_grpc)
        for model in ("ensemble", "tensorrt_llm_bls")
        for stream in (False, True)
    ]

    def ask(index: int) -> None:
        (fields, expected), (send, model, stream) = mixed[index], ways[index % len(ways)]
        answer = send(
            server, model, **fields, stream=stream, exclude_input_in_output=True,
            return_token_ids=True, return_finish_reason=True,
        )  # fmt: skip
        assert answer.error == ""
        assert answer.ids == expected.token_ids
        assert answer.text == expected.text
        assert answer.last["finish_reason"] == expected.finish_reason
        assert stream or len(answer.responses) == 1

    with ThreadPoolExecutor(32) as pool:
        for done in [pool.submit(ask, index) for index in range(NUM_MIXED)]:
            done.result()
    assert len({expected.finish_reason for _, expected in mixed}) == 2
    assert server.is_idle()
