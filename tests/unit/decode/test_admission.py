"""What is refused at the door: a full queue, requests and choices out of range."""

from __future__ import annotations

from typing import Any

import pytest
from toy import VOCAB, Client, ToySession, limits, scheduler

from dflash_trt.decode.admission import RunConfig
from dflash_trt.decode.request import SamplingParams
from dflash_trt.errors import CapacityError, ConfigError, DFlashError, QueueFull, RequestError


def test_the_queue_is_bounded_and_says_so_at_once() -> None:
    running = scheduler(ToySession(limits(max_slots=2)), config=RunConfig(max_waiting=3))
    client = Client()
    job = ([5, 6], SamplingParams(max_tokens=9))
    for _ in range(5):
        client.submit(running, job)
    with pytest.raises(QueueFull, match="5 requests") as caught:
        client.submit(running, job)
    assert isinstance(caught.value, CapacityError)
    assert not running.has_room
    client.run(running)
    client.check()
    client.submit(running, job)


@pytest.mark.parametrize(
    ("config", "prompt", "max_tokens", "kind", "allowed"),
    [
        ({"max_prompt_tokens": 4}, [1] * 5, 1, CapacityError, "4"),
        # No shorter prompt would help here.
        ({"max_output_tokens": 7}, [1], 8, RequestError, "1 to 7"),
        ({}, [1] * 90, 7, CapacityError, "at most 6"),
    ],
)
def test_limits_of_one_request(
    config: dict[str, int],
    prompt: list[int],
    max_tokens: int,
    kind: type[DFlashError],
    allowed: str,
) -> None:
    running = scheduler(ToySession(limits()), config=RunConfig(**config))
    with pytest.raises(kind) as caught:
        running.submit(prompt, SamplingParams(max_tokens=max_tokens))
    assert allowed in caught.value.message + caught.value.hint
    assert not running.has_work


def test_max_tokens_defaults_to_the_limit_or_what_the_engine_holds() -> None:
    params = SamplingParams(ignore_eos=True)
    for config, wanted in ((RunConfig(max_output_tokens=7), 7), (RunConfig(), 95)):
        running, client = scheduler(ToySession(limits()), config=config), Client()
        request, _ = running.submit([1], params)
        client.run(running)
        assert len(client.tokens[request]) == wanted
        assert client.last[request].finish_reason == "length"


@pytest.mark.parametrize("prompt", [[], [VOCAB], [-1], [1.5], ["a"], [None]])
def test_a_bad_prompt_is_refused(prompt: list[Any]) -> None:
    with pytest.raises(RequestError):
        scheduler(ToySession(limits())).submit(prompt, SamplingParams())


@pytest.mark.parametrize("deadline", [0, -1.0, float("nan"), float("inf")])
def test_a_bad_deadline_is_refused(deadline: float) -> None:
    with pytest.raises(RequestError, match="deadline"):
        scheduler(ToySession(limits())).submit([1], SamplingParams(), deadline)


@pytest.mark.parametrize("bad", [{"max_waiting": -1}, {"max_prompt_tokens": 0},
                                 {"max_output_tokens": 0}, {"max_failed_steps": 0},
                                 {"max_step_s": -1.0}, {"max_step_s": float("nan")}])  # fmt: skip
def test_a_bad_run_config_is_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(bad))):
        RunConfig(**bad)
