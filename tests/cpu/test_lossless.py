"""Drafts change the number of steps and nothing else: every accept length, every pattern."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from dflash_trt.decode.request import SamplingParams
from tiny import EngineMaker, ProbeMaker, Scripted, TinyEngine, TinyPair, greedy

VOCAB = 160
BLOCK = 4
Script = Callable[[int, int, int], Sequence[int]]


@pytest.fixture(scope="module")
def truth(pair: TinyPair, prompts: list[list[int]]) -> dict[int, list[int]]:
    """Prompt index -> the target's greedy continuation, long enough for every test here."""
    return {index: greedy(pair.target, prompts[index], 84 - len(prompts[index]))
            for index in (0, 24, 27, 31)}  # fmt: skip


def oracle(text: list[int], lengths: Sequence[int], wrong: Callable[[int, int], int]) -> Script:
    """Drafts whose accepted prefix has `lengths[step]` tokens; `wrong(right, j)` is the rest's."""
    pending = itertools.cycle(lengths)

    def script(slot: int, position: int, count: int) -> list[int]:
        accept = next(pending)
        right = [*text[position + 1 : position + 1 + count], *[0] * count][:count]
        return [t if j < accept else wrong(t, j) for j, t in enumerate(right)]

    return script


def other(right: int, j: int) -> int:
    """Some valid token that is not the right one."""
    return (right + 1 + 7 * j) % VOCAB


def accepted(session: Scripted, prompt: list[int]) -> list[int]:
    return [committed - 1 for _, committed in session.blocks(len(prompt))]


@pytest.mark.parametrize("index", [0, 24, 27, 31])
def test_every_pair_of_accept_lengths_is_exact(
    index: int, engine: TinyEngine, truth: dict[int, list[int]], prompts: list[list[int]]
) -> None:
    prompt, wanted = prompts[index], truth[index]
    patterns = list(itertools.product(range(BLOCK), repeat=2))
    for shift in range(4):  # 16 pairs in runs that fit the engine
        lengths = [n for pattern in patterns[shift * 4 : shift * 4 + 4] for n in pattern]
        count = sum(lengths) + len(lengths) + 1
        session = Scripted(engine.session(), oracle([*prompt, *wanted], lengths, other))
        made = engine.generate(prompt, count + BLOCK, session=session)
        assert made.token_ids == wanted[: count + BLOCK]
        assert accepted(session, prompt)[: len(lengths)] == lengths


def test_counts_of_offered_and_accepted_drafts_are_those_of_the_steps(
    engine: TinyEngine, truth: dict[int, list[int]], prompts: list[list[int]]
) -> None:
    lengths = [2, 0, 3, 1, 3, 0, 2]  # 11 drafts and 7 bonus tokens behind the first token
    session = Scripted(engine.session(), oracle([*prompts[0], *truth[0]], lengths, other))
    made = engine.generate(prompts[0], 1 + 18, session=session)
    assert accepted(session, prompts[0]) == lengths
    assert made.stats.accepted == [5, 4, 2]
    assert (made.stats.steps, made.stats.tokens) == (7, 18)
    assert made.stats.acceptance_length == 18 / 7
    # The last step has 3 tokens left: an anchor's successor, and no use for a third draft.
    assert made.stats.offered == [7, 7, 6]
    assert made.stats.accepted_per_position == [5 / 7, 4 / 7, 2 / 6]


@pytest.mark.parametrize("block", [2, 3, 5, 8])
def test_every_accept_length_in_ascending_and_descending_runs(
    block: int, pair: TinyPair, truth: dict[int, list[int]], prompts: list[list[int]],
    make_pair: Any, make_engine: EngineMaker,
) -> None:  # fmt: skip
    engine = make_engine(make_pair(block=block))
    lengths = [*range(block), *reversed(range(block))]
    count = min(sum(lengths) + len(lengths), 60)
    session = Scripted(engine.session(), oracle([*prompts[24], *truth[24]], lengths, other))
    made = engine.generate(prompts[24], count, session=session)
    assert made.token_ids == truth[24][:count]
    full = accepted(session, prompts[24])[:-1]
    assert full[: len(lengths)] == lengths[: len(full)]


def test_a_right_draft_behind_a_wrong_one_is_not_accepted(
    engine: TinyEngine, truth: dict[int, list[int]], prompts: list[list[int]]
) -> None:
    text = [*prompts[0], *truth[0]]

    def script(slot: int, position: int, count: int) -> list[int]:
        right = text[position + 1 : position + 1 + count]
        return [other(right[0], 0), *right[1:]]

    session = Scripted(engine.session(), script)
    assert engine.generate(prompts[0], 30, session=session).token_ids == truth[0][:30]
    assert set(accepted(session, prompts[0])) == {0}


ADVERSARIES: dict[str, Script] = {
    "minus-one": lambda slot, position, count: [-1] * count,
    "vocab": lambda slot, position, count: [VOCAB] * count,
    "vocab-and-five": lambda slot, position, count: [VOCAB + 5] * count,
    "int32-ends": lambda slot, position, count: [2**31 - 1, -(2**31), 2**30][:count],
    "all-zero": lambda slot, position, count: [0] * count,
    "mask-id": lambda slot, position, count: [VOCAB - 1] * count,
    "random": lambda slot, position, count: (
        np.random.default_rng(position).integers(-3, VOCAB + 3, count).tolist()
    ),
}


@pytest.mark.parametrize("adversary", ADVERSARIES)
@pytest.mark.parametrize("index", [0, 31])
def test_bad_and_impossible_drafts_change_only_the_number_of_steps(
    adversary: str, index: int, engine: TinyEngine, truth: dict[int, list[int]],
    prompts: list[list[int]],
) -> None:  # fmt: skip
    session = Scripted(engine.session(), ADVERSARIES[adversary])
    made = engine.generate(prompts[index], 40, session=session)
    assert made.token_ids == truth[index][:40]
    assert made.stats.steps > 25


@pytest.mark.parametrize("bad", [-1, VOCAB, VOCAB + 5])
def test_an_impossible_draft_behind_right_ones_is_rejected_where_it_stands(
    bad: int, engine: TinyEngine, truth: dict[int, list[int]], prompts: list[list[int]]
) -> None:
    lengths = [0, 1, 2, 1, 0, 2]
    text = [*prompts[27], *truth[27]]
    session = Scripted(engine.session(), oracle(text, lengths, lambda right, j: bad))
    assert engine.generate(prompts[27], 40, session=session).token_ids == truth[27][:40]
    assert accepted(session, prompts[27])[:6] == lengths


@pytest.mark.parametrize(("right", "draft"), [(0, -1), (0, -(2**31)), (VOCAB - 1, VOCAB)])
def test_an_impossible_draft_is_not_taken_for_the_nearest_real_token(
    right: int, draft: int, pair: TinyPair, make_probe: ProbeMaker
) -> None:
    """Where the target's choice is the first or last id, the id beside it is still wrong."""
    texts = torch.cartesian_prod(torch.arange(VOCAB), torch.arange(0, VOCAB, 9))
    with torch.no_grad():
        chosen = pair.target(texts).logits[:, -1].argmax(-1)
    text = texts[chosen == right][0].tolist()
    made = make_probe(pair).step([[*text, draft]], [0], known=[2])
    assert made["committed"].tolist() == [2]
    assert made["next_tokens"][0, 0] == right
    made = make_probe(pair).step([[*text, right]], [0], known=[2])
    assert made["committed"].tolist() == [3]


def test_perfect_drafts_need_one_step_per_block(
    engine: TinyEngine, truth: dict[int, list[int]], prompts: list[list[int]]
) -> None:
    text = [*prompts[24], *truth[24]]
    session = Scripted(engine.session(), oracle(text, [BLOCK], other))
    made = engine.generate(prompts[24], 41, session=session)
    assert made.token_ids == truth[24][:41]
    assert made.stats.steps == 10
    assert made.stats.acceptance_length == 4.0
    assert made.stats.accepted_per_position == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("seed", range(6))
def test_rows_that_accept_different_lengths_in_one_step_stay_exact(
    seed: int, engine: TinyEngine, truth: dict[int, list[int]], prompts: list[list[int]]
) -> None:
    rng = np.random.default_rng(seed)
    chosen = rng.permutation([0, 24, 27, 31])[:3].tolist()
    texts = [[*prompts[i], *truth[i]] for i in chosen]
    lengths = [rng.integers(0, BLOCK, 50).tolist() for _ in chosen]
    scripts = [oracle(t, n, other) for t, n in zip(texts, lengths, strict=True)]
    session = Scripted(engine.session(), lambda slot, at, n: scripts[slot](slot, at, n))
    scheduler = engine.scheduler(session)
    made: dict[int, list[int]] = {}
    for index in chosen:
        request, _ = scheduler.submit(prompts[index], SamplingParams(max_tokens=40))
        made[request] = []
    while scheduler.has_work:
        for delta in scheduler.step():
            made[delta.request_id].extend(delta.token_ids)
    assert list(made.values()) == [truth[i][:40] for i in chosen]
    mixed = [s for s in session.steps if len(set(s.result.committed.tolist())) > 1]
    assert len(mixed) > 3
