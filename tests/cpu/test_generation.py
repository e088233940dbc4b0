"""Whole generations against transformers' greedy generate and the dflash package's own loop."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from dflash_trt.decode.request import SamplingParams
from tiny import EngineMaker, PairMaker, Recording, TinyEngine, TinyPair, dflash_run, greedy

LONG = 48


@pytest.mark.parametrize("index", [0, 1, 2, 3, 24, 25, 27, 31])
def test_tokens_drafts_and_acceptance_equal_dflash_generate(
    index: int, trained_pair: TinyPair, trained_engine: TinyEngine, prompts: list[list[int]]
) -> None:
    prompt, block = prompts[index], trained_pair.block
    session = Recording(trained_engine.session())
    made = trained_engine.generate(prompt, LONG, session=session)
    # dflash_generate narrows the block near its end, so it is asked for more than is compared.
    reference = dflash_run(trained_pair, prompt, LONG + block)
    assert made.token_ids == reference.tokens[:LONG]
    assert made.token_ids == greedy(trained_pair.target, prompt, LONG)
    steps = session.blocks(len(prompt))
    full = [step for step in steps if len(step[0]) == block - 1]
    assert len(full) > LONG // block - 1
    assert [drafts for drafts, _ in full] == reference.drafts[: len(full)]
    committed = [count for _, count in full]
    assert committed == reference.produced[: len(full)]


def test_the_trained_drafter_has_every_kind_of_step(
    trained_engine: TinyEngine, prompts: list[list[int]]
) -> None:
    """Without this the comparisons above could all be of rejected blocks."""
    counts: Counter[int] = Counter()
    for prompt in prompts[:6]:
        session = Recording(trained_engine.session())
        trained_engine.generate(prompt, LONG, session=session)
        counts.update(committed for _, committed in session.blocks(len(prompt)))
    assert counts[1] > 5
    assert counts[6] > 5
    assert sum(counts[n] for n in (2, 3, 4, 5)) > 5


@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 7, 8, 12, 64])
def test_the_size_of_prompt_chunks_changes_nothing(
    chunk: int, trained_pair: TinyPair, trained_engine: TinyEngine, prompts: list[list[int]]
) -> None:
    prompt = prompts[3]
    session = Recording(trained_engine.session(prefill_chunk=chunk))
    made = trained_engine.generate(prompt, 20, session=session)
    assert made.token_ids == greedy(trained_pair.target, prompt, 20)
    reference = dflash_run(trained_pair, prompt, 20 + trained_pair.block)
    full = [drafts for drafts, _ in session.blocks(len(prompt)) if len(drafts) == 5]
    assert full == reference.drafts[: len(full)]
    assert sum(step.rows.length[0] < len(prompt) for step in session.steps) == -(-12 // chunk)


@pytest.mark.parametrize("width", range(1, 7))
def test_every_verify_width_gives_the_same_tokens(
    width: int, trained_pair: TinyPair, trained_engine: TinyEngine, prompts: list[list[int]]
) -> None:
    session = Recording(trained_engine.session())
    made = trained_engine.generate(prompts[1], 30, session=session, width=width)
    assert made.token_ids == greedy(trained_pair.target, prompts[1], 30)
    assert {step.rows.tokens.shape[1] for step in session.steps[2:]} <= set(range(1, width + 1))
    if width == 1:
        assert made.stats.acceptance_length == 1.0
        assert all(step.num_drafts == 0 for step in session.steps)
    else:
        assert made.stats.acceptance_length > 1.2


def test_a_narrow_width_keeps_the_first_drafts_of_the_full_block(
    trained_pair: TinyPair, trained_engine: TinyEngine, prompts: list[list[int]]
) -> None:
    session = Recording(trained_engine.session())
    trained_engine.generate(prompts[1], 30, session=session, width=3)
    wide = dflash_run(trained_pair, prompts[1], 6)
    assert session.blocks(12)[0][0] == wide.drafts[0][:2]


def run_all(engine: TinyEngine, jobs: list[tuple[list[int], int]], **options: Any) -> list[Any]:
    """Token ids of all jobs, submitted at once to one scheduler."""
    scheduler = engine.scheduler(**options)
    ids = [scheduler.submit(p, SamplingParams(max_tokens=n))[0] for p, n in jobs]
    made: dict[int, list[int]] = {request: [] for request in ids}
    while scheduler.has_work:
        for delta in scheduler.step():
            made[delta.request_id].extend(delta.token_ids)
    return list(made.values())


def test_each_row_of_a_batch_equals_its_solo_run(
    trained_pair: TinyPair, trained_engine: TinyEngine, prompts: list[list[int]]
) -> None:
    jobs = [(prompts[0], 30), (prompts[28], 9), (prompts[31], 21)]
    wanted = [greedy(trained_pair.target, prompt, count) for prompt, count in jobs]
    assert run_all(trained_engine, jobs) == wanted
    solo = [trained_engine.generate(prompt, count).token_ids for prompt, count in jobs]
    assert solo == wanted


@pytest.mark.parametrize(
    ("family", "target", "drafter"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True}, {"layer_ids": [0, 1, 2]}),
        ("llama", {"tie_word_embeddings": True}, {"is_causal": True}),
        (
            "qwen3",
            {
                "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 4,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            {
                "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2,
                "layer_types": ["sliding_attention", "full_attention"],
            },
        ),
        ("qwen3", {"attention_bias": True}, {"dflash": {"final_logit_softcapping": 3.0}}),
    ],
)  # fmt: skip
def test_other_families_and_masks_generate_the_same_tokens_and_drafts(
    family: str, target: dict[str, Any], drafter: dict[str, Any],
    make_pair: PairMaker, make_engine: EngineMaker, prompts: list[list[int]],
) -> None:  # fmt: skip
    pair = make_pair(family, target=target, **drafter)
    engine = make_engine(pair)
    for prompt in (prompts[0], prompts[31]):
        session = Recording(engine.session())
        made = engine.generate(prompt, 24, session=session)
        reference = dflash_run(pair, prompt, 24 + pair.block)
        assert made.token_ids == reference.tokens[:24]
        drafts = [d for d, _ in session.blocks(len(prompt)) if len(d) == pair.block - 1]
        assert drafts == reference.drafts[: len(drafts)]
