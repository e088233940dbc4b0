"""Where an output ends inside an accepted block: limits, stop ids, stop strings, cancelling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from dflash_trt.decode.request import Delta, SamplingParams
from dflash_trt.errors import CapacityError, ConfigError, RequestError
from tiny import EngineMaker, PairMaker, Recording, Scripted, TinyEngine, TinyPair, greedy

BLOCK = 4
VOCAB = 160


@pytest.fixture(scope="module")
def prompt(prompts: list[list[int]]) -> list[int]:
    return prompts[0]


@pytest.fixture(scope="module")
def output(pair: TinyPair, prompt: list[int]) -> list[int]:
    """What the target says greedily."""
    return greedy(pair.target, prompt, 40)


def perfect(engine: TinyEngine, prompt: Sequence[int], output: Sequence[int]) -> Scripted:
    """A session whose drafts are all right: each decode step commits a whole block."""
    text = [*prompt, *output, *[0] * BLOCK]
    return Scripted(engine.session(), lambda slot, at, n: text[at + 1 : at + 1 + n])


def first_seen(output: list[int], start: int, stop: int) -> list[int]:
    """Indices whose token has not come before: stopping on it stops exactly there."""
    return [i for i in range(start, stop) if output[i] not in output[:i]]


@pytest.mark.parametrize("count", range(1, 2 * BLOCK + 3))
@pytest.mark.parametrize("drafts", ["right", "wrong"])
def test_exactly_max_tokens_come_and_no_more_is_verified(
    count: int, drafts: str, engine: TinyEngine, prompt: list[int], output: list[int]
) -> None:
    session = perfect(engine, prompt, output)
    if drafts == "wrong":
        session = Scripted(engine.session(), lambda slot, at, n: [-1] * n)
    made = engine.generate(prompt, count, session=session)
    assert made.token_ids == output[:count]
    assert made.finish_reason == "length"
    assert made.text == engine.tokenizer.decode(output[:count])
    assert made.stats.tokens == count - 1
    assert made.to_json()["completion_tokens"] == count
    for drafted, _ in session.blocks(len(prompt)):
        assert len(drafted) <= max(count - 2, 0)


@pytest.mark.parametrize("offset", range(1, 1 + 2 * BLOCK))
def test_an_eos_at_any_offset_of_an_accepted_block_ends_the_output_there(
    offset: int, engine: TinyEngine, prompt: list[int], output: list[int]
) -> None:
    eos = output[offset]
    end = output.index(eos) + 1
    session = perfect(engine, prompt, output)
    made = engine.generate(prompt, 30, session=session, eos=[VOCAB - 2, eos])
    assert made.token_ids == output[:end]
    assert made.finish_reason == "stop"
    assert made.text == engine.tokenizer.decode(output[: end - 1])
    assert made.stats.tokens == end - 1
    assert len(session.steps) == 2 + -(-(end - 1) // BLOCK)


def test_drafts_behind_the_end_are_not_counted_as_accepted(
    engine: TinyEngine, prompt: list[int], output: list[int]
) -> None:
    at = next(i for i in first_seen(output, 5, 20) if (i - 1) % BLOCK == 1)
    session = perfect(engine, prompt, output)
    made = engine.generate(prompt, 30, session=session, eos=[output[at]])
    blocks = (at - 1) // BLOCK
    assert made.stats.accepted == [blocks + 1, blocks + 1, blocks]
    assert made.stats.offered == [blocks + 1] * 3


def test_an_eos_as_the_very_first_token_gives_an_empty_text(
    engine: TinyEngine, prompt: list[int], output: list[int]
) -> None:
    made = engine.generate(prompt, 30, eos=[output[0]])
    assert (made.token_ids, made.text, made.finish_reason) == (output[:1], "", "stop")
    assert made.stats.steps == 0
    assert made.to_json()["decode_tokens_per_s"] is None


def test_ignore_eos_ignores_the_models_ids_and_not_the_requests(
    engine: TinyEngine, prompt: list[int], output: list[int]
) -> None:
    late = max(first_seen(output, 1, 25))
    made = engine.generate(prompt, 30, eos=[output[3]], ignore_eos=True)
    assert made.token_ids == output[:30]
    made = engine.generate(
        prompt, 30, eos=[output[3]], ignore_eos=True, stop_token_ids=[output[late]]
    )
    assert made.token_ids == output[: late + 1]
    assert made.finish_reason == "stop"


@pytest.mark.parametrize("extra", range(-2, 3))
def test_eos_and_max_tokens_in_one_block_whichever_comes_first_wins(
    extra: int, engine: TinyEngine, prompt: list[int], output: list[int]
) -> None:
    at = next(i for i in first_seen(output, 2, 12) if (i - 1) % BLOCK == 1)
    session = perfect(engine, prompt, output)
    made = engine.generate(prompt, at + 1 + extra, session=session, eos=[output[at]])
    assert made.token_ids == output[: min(at + 1, at + 1 + extra)]
    assert made.finish_reason == ("length" if extra < 0 else "stop")


@pytest.mark.parametrize("start", range(8))
@pytest.mark.parametrize("length", [1, 2, 5])
def test_a_stop_string_ends_the_text_before_it_wherever_it_lies_in_the_blocks(
    start: int, length: int, engine: TinyEngine, prompt: list[int], output: list[int]
) -> None:
    text = engine.tokenizer.decode(output)
    stop = text[start : start + length]
    assert len(text) == len(output), "one character per token"
    found = text.index(stop)
    deltas: list[Delta] = []
    session = perfect(engine, prompt, output)
    made = engine.engine(session).generate(
        prompt, SamplingParams(max_tokens=30, stop=[stop, "\x00never"]), on_delta=deltas.append
    )
    assert made.text == text[:found] == "".join(delta.text for delta in deltas)
    assert made.token_ids == output[: found + length]
    assert made.finish_reason == "stop"


def test_a_half_stop_string_is_kept_back_and_then_shown(
    engine: TinyEngine, prompt: list[int], output: list[int]
) -> None:
    text = engine.tokenizer.decode(output[:30])
    made = engine.generate(prompt, 30, stop=[text[-3:] + "\x01", text[5:9] + "\x01"])
    assert made.text == text
    assert made.finish_reason == "length"


def test_the_mask_id_as_a_real_token_is_kept(
    make_pair: PairMaker, make_engine: EngineMaker, pair: TinyPair, prompt: list[int],
    output: list[int],
) -> None:  # fmt: skip
    """The drafter's mask id is a token that the target really says, more than once."""
    mask = max(set(output), key=output.count)
    assert output.count(mask) > 1
    masked = make_pair(dflash={"mask_token_id": mask})
    engine = make_engine(masked)
    assert engine.generate(prompt, 40).token_ids == output
    session = perfect(engine, prompt, output)
    made = engine.generate(prompt, 40, session=session)
    assert made.token_ids == output
    assert made.stats.acceptance_length == pytest.approx(39 / 10)


def test_one_row_ends_early_and_the_others_go_on(
    engine: TinyEngine, pair: TinyPair, prompts: list[list[int]], output: list[int]
) -> None:
    eos = output[min(first_seen(output, 4, 30))]
    scheduler = engine.scheduler(eos=[eos])
    chosen = [prompts[0], prompts[24], prompts[31]]
    reasons: dict[int, Any] = {}
    made: dict[int, list[int]] = {}
    for tokens in chosen:
        made[scheduler.submit(tokens, SamplingParams(max_tokens=30))[0]] = []
    while scheduler.has_work:
        for delta in scheduler.step():
            assert delta.request_id not in reasons, "nothing may come after the end"
            made[delta.request_id].extend(delta.token_ids)
            if delta.finish_reason:
                reasons[delta.request_id] = delta.finish_reason
    for request, tokens in enumerate(chosen):
        wanted = greedy(pair.target, tokens, 30)
        end = wanted.index(eos) + 1 if eos in wanted else 30
        assert made[request] == wanted[:end]
        assert reasons[request] == ("stop" if eos in wanted else "length")
    assert len(made[0]) < 30


def test_a_cancelled_request_frees_its_slot_at_once_and_touches_no_other(
    engine: TinyEngine, pair: TinyPair, prompts: list[list[int]]
) -> None:
    session = Recording(engine.session(max_slots=2))
    scheduler = engine.scheduler(session)
    ids = [scheduler.submit(prompts[i], SamplingParams(max_tokens=25))[0] for i in (0, 1, 31, 24)]
    made: dict[int, list[int]] = {i: [] for i in ids}
    for _ in range(9):
        for delta in scheduler.step():
            made[delta.request_id].extend(delta.token_ids)
    assert made[ids[0]]
    assert not made[ids[2]], "it waits for a slot"
    scheduler.cancel(ids[0])
    scheduler.cancel(ids[3])
    scheduler.cancel(12345)
    count = len(made[ids[0]])
    while scheduler.has_work:
        for delta in scheduler.step():
            made[delta.request_id].extend(delta.token_ids)
    assert len(made[ids[0]]) == count
    assert made[ids[3]] == []
    assert made[ids[1]] == greedy(pair.target, prompts[1], 25)
    assert made[ids[2]] == greedy(pair.target, prompts[31], 25)


def test_prompts_and_decoding_alternate_so_that_neither_starves(
    engine: TinyEngine, prompts: list[list[int]]
) -> None:
    session = Recording(engine.session(prefill_chunk=2))
    scheduler = engine.scheduler(session)
    scheduler.submit(prompts[24], SamplingParams(max_tokens=30))
    for _ in range(3):
        scheduler.step()
    scheduler.submit(prompts[31], SamplingParams(max_tokens=5))
    before = len(session.steps)
    for _ in range(12):
        scheduler.step()
    kinds = [step.is_prompt for step in session.steps[before:]]
    assert kinds == [True, False] * 6


@pytest.mark.parametrize(
    ("tokens", "params", "error"),
    [
        ([], {}, RequestError),
        ([3, VOCAB], {}, RequestError),
        ([-1], {}, RequestError),
        ([1] * 96, {}, CapacityError),
        ([1] * 90, {"max_tokens": 7}, CapacityError),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_at_the_door(
    tokens: list[int], params: dict[str, Any], error: type[Exception], engine: TinyEngine
) -> None:
    scheduler = engine.scheduler()
    with pytest.raises(error) as caught:
        scheduler.submit(tokens, SamplingParams(**params))
    assert "\n" not in str(caught.value)
    assert not scheduler.has_work


@pytest.mark.parametrize("width", [0, 5, -1])
def test_a_width_beyond_the_block_is_refused(width: int, engine: TinyEngine) -> None:
    with pytest.raises(ConfigError, match=str(width)):
        engine.scheduler(width=width)


@pytest.mark.parametrize(
    "bad",
    [
        {"max_tokens": 0}, {"max_tokens": 1.5}, {"max_tokens": True}, {"temperature": -0.1},
        {"temperature": float("nan")}, {"temperature": 1e-4}, {"temperature": "1"},
        {"top_p": 0.0}, {"top_p": 1.01}, {"top_k": -1}, {"seed": -1}, {"seed": 2**62},
        {"seed": 1.0}, {"temperature": float("inf")},
    ],
)  # fmt: skip
def test_sampling_parameters_out_of_range_are_refused_by_name(bad: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=next(iter(bad))):
        SamplingParams(**bad)
