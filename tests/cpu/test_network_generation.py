"""Whole generations on the TensorRT network, by the evaluator, against the CPU session.

In fp32 form tokens, drafts and committed counts are equal, step by step. The network starts from
caches full of NaN, so a row that is read before it was written would show.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from dflash_trt.decode.request import SamplingParams
from tiny import EngineMaker, PairMaker, Recording, TinyEngine
from tiny.sessions import Step
from tiny.trt_sessions import EvaluatedSession

SLIDING: dict[str, Any] = {
    "target": {
        "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip
PAIRS: dict[str, tuple[str, dict[str, Any]]] = {
    "biases": ("llama", {
        "target": {"attention_bias": True, "mlp_bias": True}, "layer_ids": [0, 1, 2],
    }),
    "tied, causal drafter": ("llama", {
        "target": {"tie_word_embeddings": True}, "is_causal": True,
    }),
    "sliding windows": ("qwen3", SLIDING),
    "draft vocabulary": ("qwen3", {"draft_ids": range(1, 160, 2), "has_own_head": True}),
    "draft vocabulary of a tied target": ("llama", {
        "target": {"tie_word_embeddings": True}, "draft_ids": range(0, 160, 3),
    }),
    "DFlash 2, block of 6": ("qwen3", {"block": 6, "dflash2": {"selector_top_k": 5}}),
    "DFlash 2, sliding windows and a draft vocabulary": ("llama", {
        "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"], "is_causal": False,
        "draft_ids": range(1, 160, 2), "dflash2": {"conv_kernel_size": 3, "selector_rank": 9},
    }),
    "soft cap, biases": ("qwen3", {
        "target": {"attention_bias": True}, "dflash": {"final_logit_softcapping": 3.0},
    }),
}  # fmt: skip

GREEDY = SamplingParams(max_tokens=16)
SAMPLED = SamplingParams(max_tokens=12, temperature=0.9, seed=5)
FILTERED = SamplingParams(max_tokens=12, temperature=1.3, top_k=20, top_p=0.9, min_p=0.02, seed=6)
LONG_FILTERED = SamplingParams(max_tokens=8, temperature=1.1, top_k=140, top_p=0.8, seed=7)
ADJUSTED = SamplingParams(
    max_tokens=14, repetition_penalty=1.4, frequency_penalty=0.3, presence_penalty=0.1,
    logit_bias={3: 2.0, 9: -4.0},
)  # fmt: skip
STOPPED = SamplingParams(max_tokens=40, stop=("e", "q"), temperature=0.7, top_p=0.5, seed=1)

Job = tuple[list[int], SamplingParams]


def run_both(tiny: TinyEngine, jobs: list[Job]) -> list[Step]:
    """The jobs at once on both sessions; fails unless every step of one is that of the other."""
    watched = [Recording(EvaluatedSession(tiny)), Recording(tiny.session())]
    made, wanted = (tiny.engine(session).generate_all(jobs) for session in watched)
    assert [g.token_ids for g in made] == [g.token_ids for g in wanted]
    mine, theirs = (session.steps for session in watched)
    assert len(mine) == len(theirs)
    for a, b in zip(mine, theirs, strict=True):
        live = a.rows.count > 0
        np.testing.assert_array_equal(a.rows.tokens, b.rows.tokens)
        np.testing.assert_array_equal(a.result.committed[live], b.result.committed[live])
        np.testing.assert_array_equal(a.result.next_tokens[live], b.result.next_tokens[live])
    return mine


def test_requests_of_all_kinds_share_slots(
    trained_engine: TinyEngine, prompts: list[list[int]]
) -> None:
    """Prompts of one and of several chunks, all ways of choosing, more requests than slots."""
    params = [GREEDY, SAMPLED, ADJUSTED, FILTERED, STOPPED, LONG_FILTERED, GREEDY]
    order = [0, 31, 1, 24, 30, 2, 28]
    steps = run_both(trained_engine, [(prompts[i], p) for i, p in zip(order, params, strict=True)])
    committed = Counter(int(n) for s in steps if not s.is_prompt for n in s.result.committed)
    assert committed[0]  # an idle slot between others
    assert committed[1] > 5  # no draft accepted
    assert committed[trained_engine.pair.block]  # all of them


@pytest.mark.parametrize("name", PAIRS)
def test_every_kind_of_pair(
    name: str, make_pair: PairMaker, make_engine: EngineMaker, prompts: list[list[int]]
) -> None:
    family, options = PAIRS[name]
    tiny = make_engine(make_pair(family, **options))
    run_both(tiny, [(prompts[31], GREEDY), (prompts[0], SAMPLED), (prompts[26], ADJUSTED)])


def test_to_the_last_row_of_the_caches(
    trained_engine: TinyEngine, prompts: list[list[int]]
) -> None:
    """A request that ends with the engine's length, beside one that ends before it."""
    prompt = [token for text in prompts[:6] for token in text]
    steps = run_both(trained_engine, [
        (prompt, SamplingParams(max_tokens=None)), (prompts[2], GREEDY),
    ])  # fmt: skip
    longest = trained_engine.limits().max_seq_len
    assert max(int((s.rows.length + s.result.committed).max()) for s in steps) >= longest - 1


@pytest.mark.parametrize("precision", ["bf16", "nvfp4"])
def test_drafting_changes_no_token_in_a_low_precision_either(
    precision: str, trained_engine: TinyEngine, prompts: list[list[int]]
) -> None:
    """No scale, and no sum, depends on which rows share a step."""
    jobs = [(prompts[0], GREEDY), (prompts[25], SAMPLED)]
    engine = trained_engine.engine(EvaluatedSession(trained_engine, precision))
    drafted = [made.token_ids for made in engine.generate_all(jobs)]
    plain = [engine.generate(prompt, params, width=1).token_ids for prompt, params in jobs]
    assert drafted == plain
