"""The choice of tokens: against transformers' filters, and the same with and without drafting."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers.generation.logits_process import (
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from dflash_trt.decode.request import SamplingParams
from dflash_trt.graph import Tensor
from dflash_trt.nets.sampling import DraftVocabulary, Sampling, Special, choose
from dflash_trt.runtime.session import StepRows
from tiny import EngineMaker, ProbeMaker, Recording, Scripted, TinyEngine, TinyPair, greedy
from tiny.noise import draw_of
from tiny.ops import run_ops

LOGITS = np.array([2.0, 1.5, 1.4, 0.3, 0.0, -0.5, -1.0, -2.0, -3.5, 4.0, 3.9, -9.0], np.float32)
DRAWS = 50_000


def draw(
    folder: Path, logits: npt.NDArray[np.float32], temperature: Any, top_k: Any, top_p: Any,
    seed: Any, positions: Any = None, min_p: Any = 0.0, vocabulary: DraftVocabulary | None = None,
) -> npt.NDArray[np.int32]:  # fmt: skip
    """Tokens [B, R] for logits [B, R, V]; the rest are per slot. Greedy slots are not listed."""
    slots, rows, _ = logits.shape
    where = np.arange(rows) if positions is None else positions

    def body(
        logits: Tensor, positions: Tensor, listed: Tensor, source: Tensor, **sampling: Tensor
    ) -> Tensor:
        special = Special(listed, source, Sampling(**sampling))
        return choose(logits, positions, special, vocabulary)

    listed = np.flatnonzero(np.broadcast_to(temperature, slots)).astype(np.int32)
    source = np.arange(slots, dtype=np.int32)
    source[listed] = slots + np.arange(len(listed))
    inputs = {
        "logits": logits,
        "positions": np.broadcast_to(where, (slots, rows)).astype(np.int32),
        "listed": listed,
        "source": source,
        "temperature": np.broadcast_to(temperature, slots).astype(np.float32)[listed],
        "top_k": np.broadcast_to(top_k, slots).astype(np.int32)[listed],
        "top_p": np.broadcast_to(top_p, slots).astype(np.float32)[listed],
        "min_p": np.broadcast_to(min_p, slots).astype(np.float32)[listed],
        "seed": np.broadcast_to(seed, slots).astype(np.int64)[listed],
    }
    lines = ("listed", "temperature", "top_k", "top_p", "min_p", "seed")
    dims: dict[str, tuple[int | str, ...]] = {
        "logits": ("slots", "rows", logits.shape[2]), "positions": ("slots", "rows"),
        "source": ("slots",), **dict.fromkeys(lines, ("lines",)),
    }  # fmt: skip
    return run_ops(folder, body, inputs, dims)[0]


def probabilities(temperature: float, top_k: int, top_p: float) -> npt.NDArray[np.float64]:
    """By transformers' logits warpers."""
    scores = torch.from_numpy(LOGITS)[None].double()
    scores = TemperatureLogitsWarper(temperature)(None, scores)
    if top_k:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(None, scores)
    return scores.softmax(-1)[0].numpy()


def check_follows(tokens: npt.NDArray[np.int32], probability: npt.NDArray[np.float64]) -> None:
    """Pearson's chi-square of the draws; what is too rare for it is one more class."""
    counts = np.bincount(tokens, minlength=len(probability)).astype(float)
    wanted = probability * len(tokens)
    assert counts[wanted == 0].sum() == 0
    common = wanted >= 5
    rare, expected = counts[~common].sum(), wanted[~common].sum()
    assert rare <= expected + 5 * (expected + 1) ** 0.5
    freedom = max(int(common.sum()) - 1, 1)
    chi_square = ((counts - wanted)[common] ** 2 / wanted[common]).sum()
    assert chi_square < freedom + 4 * (2 * freedom) ** 0.5 + 4


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [
        (1.0, 0, 1.0), (0.3, 0, 1.0), (2.5, 0, 1.0), (50.0, 0, 1.0), (1.0, 3, 1.0), (2.0, 7, 1.0),
        (1.0, 0, 0.6), (1.0, 0, 0.9), (3.0, 0, 0.5), (1.5, 5, 0.8), (1.0, 99, 0.95), (1.0, 2, 0.2),
    ],
)  # fmt: skip
def test_draws_follow_the_distribution_of_transformers_filters(
    temperature: float, top_k: int, top_p: float, tmp_path: Path
) -> None:
    logits = np.broadcast_to(LOGITS, (1, DRAWS, len(LOGITS))).copy()
    tokens = draw(tmp_path, logits, temperature, top_k, top_p, seed=11)[0]
    check_follows(tokens, probabilities(temperature, top_k, top_p))


def test_draws_of_different_seeds_also_follow_the_distribution(tmp_path: Path) -> None:
    """Not one request's positions but many requests at one position."""
    logits = np.broadcast_to(LOGITS, (DRAWS, 1, len(LOGITS))).copy()
    tokens = draw(tmp_path, logits, 1.3, 0, 0.9, seed=np.arange(DRAWS), positions=[17])[:, 0]
    check_follows(tokens, probabilities(1.3, 0, 0.9))


@pytest.mark.parametrize("vocab", [151, 700, 2 * 331])  # a prime, many divisors, two
def test_draws_are_the_definitions(vocab: int, tmp_path: Path) -> None:
    logits = np.random.default_rng(0).normal(0, 4, (2, 60, vocab)).astype(np.float32)
    made = draw(tmp_path, logits, [1.0, 0.4], 0, 1.0, seed=[3, 2**40])
    for slot, (temperature, seed) in enumerate([(1.0, 3), (0.4, 2**40)]):
        for position, row in enumerate(logits[slot].astype(float)):
            weights = np.exp((row - row.max()) / temperature).tolist()
            assert made[slot, position] == draw_of(weights, seed, position)


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [
        (1.0, 0, 0.95), (1.0, 0, 0.1), (1.0, 0, 0.9999), (60.0, 0, 0.9), (0.02, 0, 0.9),
        (1.0, 128, 0.95), (1.0, 129, 0.95), (1.0, 129, 1.0), (3.0, 400, 0.7), (1.0, 5000, 1.0),
        (40.0, 0, 1e-6),
    ],
)  # fmt: skip
def test_filters_keep_the_tokens_that_a_sort_keeps(
    temperature: float, top_k: int, top_p: float, tmp_path: Path
) -> None:
    """Which tokens are left shows in the draws: with the rest gone, they are the definition's."""
    rng = np.random.default_rng(5)
    logits = rng.normal(0, 2.5, (1, 40, 1200)).astype(np.float32)
    made = draw(tmp_path, logits, temperature, top_k, top_p, seed=9)
    for position, row in enumerate(logits[0]):
        scaled = (row / np.float32(temperature)).astype(float)
        order = np.argsort(-scaled, kind="stable")[: top_k or None]
        share = np.exp(scaled[order]) / np.exp(scaled[order]).sum()
        kept = order[np.cumsum(share) - share < top_p]
        weights = np.zeros(len(row))
        weights[kept] = np.exp(scaled[kept] - scaled.max())
        assert made[0, position] == draw_of(weights.tolist(), 9, position)


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [
        (1, 1.0, 0.0), (1, 0.5, 0.0), (0, 1e-6, 0.0), (0, 1.0, 1.0),
        # Below float32's smallest number, and its smallest normal one.
        *((top_k, top_p, 0.0) for top_k in (0, 1, 5, 200) for top_p in (5e-324, 1e-39)),
    ],
)  # fmt: skip
def test_filters_that_leave_one_token_are_greedy(
    top_k: int, top_p: float, min_p: float, tmp_path: Path
) -> None:
    logits = np.random.default_rng(1).normal(0, 2, (1, 500, 300)).astype(np.float32)
    tokens = draw(tmp_path, logits, 5.0, top_k, top_p, seed=2, min_p=min_p)
    np.testing.assert_array_equal(tokens[0], logits[0].argmax(-1))


def test_ties_go_to_the_lower_id_when_greedy(tmp_path: Path) -> None:
    logits = np.zeros((1, 3, 30), np.float32)
    logits[0, 0, [9, 4, 21]] = logits[0, 1, [29, 28]] = 1.0
    np.testing.assert_array_equal(draw(tmp_path, logits, 0.0, 0, 1.0, 0)[0], [4, 28, 0])


def test_slots_with_unlike_settings_draw_as_they_would_alone(tmp_path: Path) -> None:
    logits = np.random.default_rng(2).normal(0, 2, (5, 60, 90)).astype(np.float32)
    settings = [(0.0, 0, 1.0, 1), (1.0, 0, 1.0, 1), (0.7, 5, 0.9, 2), (9.0, 0, 0.3, 3),
                (1.0, 1, 1.0, 4)]  # fmt: skip
    together = draw(tmp_path / "all", logits, *zip(*settings, strict=True))
    for row, one in enumerate(settings):
        alone = draw(tmp_path / str(row), logits[row : row + 1], *one)
        np.testing.assert_array_equal(together[row], alone[0])
    np.testing.assert_array_equal(together[0], logits[0].argmax(-1))


SAMPLED = {"temperature": 1.0, "top_p": 0.95}


@pytest.mark.parametrize("width", range(1, 7))
def test_a_seed_gives_the_same_tokens_at_every_verify_width(
    width: int, trained_engine: TinyEngine, prompts: list[list[int]]
) -> None:
    plain = trained_engine.generate(prompts[2], 40, width=1, seed=77, **SAMPLED)
    made = trained_engine.generate(prompts[2], 40, width=width, seed=77, **SAMPLED)
    assert made.token_ids == plain.token_ids


def test_a_seed_gives_the_same_tokens_whatever_is_drafted(
    engine: TinyEngine, trained_engine: TinyEngine, prompts: list[list[int]]
) -> None:
    plain = engine.generate(prompts[2], 40, width=1, seed=5, **SAMPLED)
    text = [*prompts[2], *plain.token_ids, *[0] * 8]
    for shift in (0, 1):

        def script(slot: int, position: int, count: int, shift: int = shift) -> list[int]:
            drafts = text[position + 1 : position + 1 + count]
            return [*drafts[:1], *[t + shift for t in drafts[1:]]]

        session = Scripted(engine.session(), script)
        made = engine.generate(prompts[2], 40, session=session, seed=5, **SAMPLED)
        assert made.token_ids == plain.token_ids
        assert made.stats.steps == (10 if shift == 0 else 20)


def test_target_and_drafter_draw_with_the_noise_of_the_tokens_own_position(
    pair: TinyPair, make_probe: ProbeMaker, prompts: list[list[int]]
) -> None:
    seed, temperature = 2**33 + 5, 0.8
    made = make_probe(pair).step(
        [prompts[31]], [0], known=[30], temperature=[temperature], seed=[seed]
    )
    bonus, *drafts = made["next_tokens"][0].tolist()

    def best(logits: npt.NDArray[np.float32], position: int) -> int:
        scaled = logits.astype(float) / temperature
        return draw_of(np.exp(scaled - scaled.max()).tolist(), seed, position)

    assert bonus == best(made["target_logits"][0, 0], 30)
    assert drafts == [best(row, 31 + j) for j, row in enumerate(made["draft_logits"][0])]


def test_seeds_differ_and_repeat(engine: TinyEngine, prompts: list[list[int]]) -> None:
    made = [engine.generate(prompts[0], 30, seed=s, temperature=1.0).token_ids for s in range(6)]
    again = [engine.generate(prompts[0], 30, seed=s, temperature=1.0).token_ids for s in range(6)]
    assert made == again
    assert len({tuple(tokens) for tokens in made}) == 6


def test_sampling_rows_beside_greedy_rows_change_neither(
    pair: TinyPair, engine: TinyEngine, prompts: list[list[int]]
) -> None:
    hot = SamplingParams(max_tokens=25, temperature=1.5, seed=9)
    alone = engine.generate(prompts[24], 25, temperature=1.5, seed=9).token_ids
    session = Recording(engine.session())
    scheduler = engine.scheduler(session)
    made: dict[int, list[int]] = {}
    for index, params in ((0, SamplingParams(max_tokens=25)), (24, hot),
                          (31, SamplingParams(max_tokens=25))):  # fmt: skip
        made[scheduler.submit(prompts[index], params)[0]] = []
    while scheduler.has_work:
        for delta in scheduler.step():
            made[delta.request_id].extend(delta.token_ids)
    assert any(len(step.rows.length) == 3 for step in session.steps)
    wanted = [greedy(pair.target, prompts[0], 25), alone, greedy(pair.target, prompts[31], 25)]
    assert list(made.values()) == wanted


@torch.no_grad()
def test_generated_tokens_follow_the_targets_distribution(
    trained_pair: TinyPair, make_engine: EngineMaker, prompts: list[list[int]]
) -> None:
    """End to end: the second token of 50,000 seeds, which a verified block brings.

    Its distribution is summed over every first token, by transformers.
    """
    temperature, slots = 1.1, 250
    prompt, vocab = prompts[1][:3], trained_pair.target.config.vocab_size
    after = torch.tensor([[*prompt, token] for token in range(vocab)])
    logits = trained_pair.target(after).logits.double()
    first, second = ((logits[:, at] / temperature).softmax(-1).numpy() for at in (-2, -1))
    session = make_engine(trained_pair, max_slots=slots).session()
    one, heat = np.ones(slots, np.int32), np.full(slots, temperature, np.float32)
    drawn: list[npt.NDArray[np.int32]] = []
    num_accepted = 0
    for seeds in np.arange(DRAWS, dtype=np.int64).reshape(-1, slots):
        rows = StepRows.greedy(
            np.tile(np.int32(prompt), (slots, 1)), one * 0, one * len(prompt), one * len(prompt)
        )
        rows = dataclasses.replace(rows, temperature=heat, seed=seeds)
        read = session.step(0, rows, 1)
        block = {"tokens": read.next_tokens, "length": read.committed, "count": one * 2}
        made = session.step(0, dataclasses.replace(rows, known=one, **block), 1)
        is_draft = made.committed > 1
        num_accepted += int(is_draft.sum())
        drawn.append(np.where(is_draft, read.next_tokens[:, 1], made.next_tokens[:, 0]))
    assert 0.02 * DRAWS < num_accepted < 0.98 * DRAWS
    check_follows(np.concatenate(drawn), first[0] @ second)


@pytest.mark.parametrize("ids", [[1, 2, 5, 8, 9], [9, 0, 4], [11], list(range(12))])
def test_a_draft_vocabulary_is_a_choice_among_all_tokens_of_which_most_are_impossible(
    ids: list[int], tmp_path: Path
) -> None:
    """With the very noise of the whole vocabulary, or drafts would not be what the target draws."""
    slots, rows = 40, 3
    rng = np.random.default_rng(4)
    every = rng.normal(0, 2, (slots, rows, 12)).astype(np.float32)
    impossible = np.full_like(every, -np.inf)
    impossible[..., ids] = every[..., ids]
    settings = {
        "temperature": np.tile([0.0, 0.7, 1.0, 1.3], 10), "top_k": np.tile([0, 0, 3, 2], 10),
        "top_p": np.tile([1.0, 0.8, 1.0, 0.9], 10), "seed": np.arange(slots),
        "min_p": np.tile([0.0, 0.1, 0.0, 0.0], 10),
    }  # fmt: skip
    vocabulary = DraftVocabulary(np.array(ids, np.int32), 12)
    made = draw(tmp_path / "some", every[..., ids], **settings, vocabulary=vocabulary)
    wanted = draw(tmp_path / "all", np.maximum(impossible, -1e30), **settings)
    np.testing.assert_array_equal(made, wanted)
    assert set(made.ravel().tolist()) <= set(ids)
