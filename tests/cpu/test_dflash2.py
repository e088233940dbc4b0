"""DFlash 2 engines: outputs as without drafting, blocks as the package's, how drafts are drawn."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from dflash_trt import contract as c
from dflash_trt.decode.request import SamplingParams
from tiny import (
    PairMaker,
    ProbeMaker,
    Recording,
    TinyEngine,
    TinyPair,
    dflash_run,
    draft_choice,
    greedy,
)
from tiny.noise import draw_of
from tiny.trt_sessions import EvaluatedSession

ADJUSTED: dict[str, Any] = {"repetition_penalty": 1.3, "logit_bias": {5: 3.0, 9: -2.0}}
PARAMS = [
    SamplingParams(max_tokens=24),
    SamplingParams(max_tokens=24, temperature=0.9, seed=3),
    SamplingParams(max_tokens=24, temperature=1.2, top_k=9, top_p=0.9, seed=4),
    SamplingParams(max_tokens=24, **ADJUSTED),
    SamplingParams(max_tokens=24, temperature=0.6, seed=5, **ADJUSTED),
]


def jobs_of(prompts: list[list[int]]) -> list[tuple[list[int], SamplingParams]]:
    """Greedy, sampled and adjusted requests, more than there are slots."""
    return list(zip(prompts, PARAMS, strict=False))


def test_blocks_are_those_of_the_dflash_package(
    dflash2_pair: TinyPair, dflash2_engine: TinyEngine, prompts: list[list[int]]
) -> None:
    """Drafts and how many are accepted, of whole generations but for their last blocks.

    Those the package makes narrower, which a drafter was not trained on.
    """
    num_blocks = num_accepted = 0
    for prompt in (prompts[0], prompts[5], prompts[9], prompts[28]):
        session = Recording(dflash2_engine.session())
        made = dflash2_engine.generate(prompt, 40, session=session)
        wanted = dflash_run(dflash2_pair, prompt, 60)
        assert made.token_ids == wanted.tokens[:40]
        ours = [b for b in session.blocks(len(prompt)) if len(b[0]) == dflash2_pair.block - 1]
        theirs = list(zip(wanted.drafts, wanted.produced, strict=True))
        assert ours == theirs[: len(ours)]
        num_blocks += len(ours)
        num_accepted += sum(produced - 1 for _, produced in ours)
    assert num_accepted > num_blocks > 20


@pytest.mark.parametrize("width", [None, 2, 4])
def test_outputs_do_not_depend_on_drafting(
    width: int | None, dflash2_pair: TinyPair, dflash2_engine: TinyEngine,
    prompts: list[list[int]],
) -> None:  # fmt: skip
    """Together at any verify width, against each alone without drafts."""
    engine, jobs = dflash2_engine.engine(), jobs_of(prompts)
    made = engine.generate_all(jobs, width=width)
    alone = [engine.generate(prompt, params, width=1).token_ids for prompt, params in jobs]
    assert [generation.token_ids for generation in made] == alone
    assert alone[0] == greedy(dflash2_pair.target, prompts[0], 24)
    assert sum(sum(generation.stats.accepted) for generation in made) > 8


@pytest.mark.parametrize("precision", ["fp32", "bf16", "nvfp4"])
def test_nor_on_the_tensorrt_network(
    precision: str, dflash2_engine: TinyEngine, prompts: list[list[int]]
) -> None:
    engine = dflash2_engine.engine(EvaluatedSession(dflash2_engine, precision))
    jobs = jobs_of(prompts)[:: 1 if precision == "fp32" else 3]
    drafted = [made.token_ids for made in engine.generate_all(jobs)]
    plain = [engine.generate(prompt, params, width=1).token_ids for prompt, params in jobs]
    assert drafted == plain


@pytest.mark.parametrize("draft_ids", [None, range(2, 160, 3)])
def test_sampled_drafts_race_as_the_target_does(
    draft_ids: Any, make_pair: PairMaker, make_probe: ProbeMaker,
    prompts: list[list[int]],
) -> None:  # fmt: skip
    """Each row among its candidates, scored behind the greedy path; beside a greedy slot."""
    pair = make_pair(block=6, dflash2={"selector_top_k": 9}, draft_ids=draft_ids)
    probe = make_probe(pair, slots=2)
    seed, heat = 2**33 + 5, 3.0
    text = prompts[31]
    made = probe.step([text, text], [0, 0], known=[30, 30], temperature=[0.0, heat], seed=[0, seed])
    bonus, *drafts = made[c.NEXT][1].tolist()
    # The path starts from the slot's own bonus, and so do its candidates.
    selector, hidden = pair.drafter.candidate_selector, made["draft_hidden"][1]
    logits = made["draft_logits"][1]
    ids = np.arange(160) if draft_ids is None else np.array(draft_ids)
    whole = np.full((len(logits), 160), -1e30, np.float32)
    whole[:, ids] = logits
    path = draft_choice(pair, hidden, whole, bonus)
    assert made[c.NEXT][0, 0] != bonus  # else slot 0's would do
    assert path != made[c.NEXT][0, 1:].tolist()
    with torch.no_grad():
        state = selector.hidden_projection(torch.from_numpy(hidden))
        before = selector.predecessor_codebook(torch.tensor([bonus, *path[:-1]]))
        fit = ((before * state) @ selector.successor_codebook.weight.T).numpy()
    wanted = []
    for row, (unary, bilinear) in enumerate(zip(whole, fit, strict=True)):
        weights = np.zeros(160)
        best = np.argsort(-unary)[:9]
        scaled = (unary + bilinear)[best].astype(float) / heat
        weights[best] = np.exp(scaled - scaled.max())
        wanted.append(draw_of(weights.tolist(), seed, 31 + row))
    assert drafts == wanted
    assert drafts != path
