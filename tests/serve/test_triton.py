"""The Triton models against the engine in this process: same requests, same text."""

from __future__ import annotations

import json
import random
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from running import Server, eventually, read_metrics
from tensors import over_grpc, over_http

from dflash_trt.decode.engine import Engine, Generation
from dflash_trt.decode.request import SamplingParams

NUM_MIXED = 100
RETURNS = (
    "log_probs", "perf_metrics", "num_input_tokens", "num_output_tokens", "token_ids",
    "finish_reason",
)  # fmt: skip


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


def test_prompt_is_repeated_as_tensorrtllm_backend_does(server: Server) -> None:
    fields: dict[str, Any] = {"text_input": "Once", "max_tokens": 5}
    plain = over_http(server, **fields, exclude_input_in_output=True).text
    assert over_http(server, **fields).text == "Once" + plain
    assert over_http(server, **fields, stream=True).text == plain


def test_other_forms_of_a_prompt(server: Server, engine: Engine) -> None:
    messages = [{"role": "user", "content": "hi"}]
    ids = engine.tokenizer.encode_chat(messages)
    expected = engine.generate(ids, SamplingParams(max_tokens=9)).text
    fields: dict[str, Any] = {"max_tokens": 9, "exclude_input_in_output": True}
    assert over_http(server, messages=json.dumps(messages), **fields).text == expected
    assert over_grpc(server, input_ids=ids, **fields).text == expected
    assert over_grpc(server, text_input="<u>hi<a>", **fields).text == expected


def test_figures_on_request(server: Server, engine: Engine) -> None:
    params = SamplingParams(max_tokens=30, logprobs=0)
    expected = engine.generate(engine.tokenizer.encode("figures"), params)
    assert expected.logprobs is not None
    log_probs = [entry.logprob for entry in expected.logprobs]
    wants = {f"return_{name}": True for name in RETURNS}
    for stream in (False, True):
        answer = over_grpc(server, text_input="figures", max_tokens=30, stream=stream, **wants)
        got = [value for response in answer.responses for value in response["output_log_probs"]]
        assert got == pytest.approx(log_probs, abs=1e-4)
        last = answer.last
        assert last["cum_log_probs"] == pytest.approx(sum(log_probs), abs=1e-3)
        assert {response["num_input_tokens"] for response in answer.responses} == {7}
        assert sum(response["num_output_tokens"] for response in answer.responses) == 30
        assert last["finish_reason"] == "length"
        assert 0 <= last["total_accepted_draft_tokens"] <= last["total_draft_tokens"]
        share = last["total_accepted_draft_tokens"] / last["total_draft_tokens"]
        assert last["acceptance_rate"] == pytest.approx(share)
        assert last["acceptance_length"] >= 1
        assert last["arrival_time_ns"] < last["first_token_time_ns"] <= last["last_token_time_ns"]


def test_what_is_not_asked_for_is_not_sent(server: Server) -> None:
    answer = over_grpc(server, text_input="x", max_tokens=3)
    assert set(answer.last) == {"text_output", "batch_index", "sequence_index"}


def test_end_id(server: Server, engine: Engine) -> None:
    made = engine.generate(engine.tokenizer.encode("end"), SamplingParams(max_tokens=20))
    end = made.token_ids[7]
    first = made.token_ids.index(end)
    answer = over_grpc(server, text_input="end", max_tokens=20, end_id=end, return_token_ids=True)
    assert answer.ids == made.token_ids[: first + 1]
    unending = over_grpc(server, text_input="end", max_tokens=20, end_id=-1, return_token_ids=True)
    assert unending.ids == made.token_ids


def test_seeds(server: Server) -> None:
    def ask(**seed: int) -> str:
        fields: dict[str, Any] = {"text_input": "s", "max_tokens": 24, "temperature": 1.0}
        return over_grpc(server, **fields, **seed, exclude_input_in_output=True).text

    assert ask(seed=7) == ask(random_seed=7)
    assert ask(seed=7) != ask(seed=8)
    assert ask() != ask()
    assert ask(seed=2**64 - 1) == ask(seed=2**64 - 1)


def test_metrics_are_those_of_the_engine(server: Server) -> None:
    over_http(server, text_input="count me", max_tokens=4)

    def agree() -> bool:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.metrics_port}/metrics") as page:
            triton = read_metrics(page.read().decode())
        own = {
            name: value
            for name, value in server.metrics().items()
            if "_created" not in name and "heartbeat" not in name and "python_" not in name
        }
        return own == pytest.approx({name: triton.get(name, -1.0) for name in own})

    assert eventually(agree)
    assert server.metrics()['dflash_requests_finished_total{reason="length"}'] >= 1
    assert server.metrics()["dflash_healthy"] == 1
