"""The real pair against transformers and z-lab's dflash: logits, tokens, acceptance."""

from __future__ import annotations

import time
import warnings
from pathlib import Path
from typing import Any

import dflash.model
import numpy as np
import pytest
import torch
from dflash.model import DFlashDraftModel, dflash_generate

from dflash_trt.decode.request import SamplingParams
from dflash_trt.lossless.verify import verify
from dflash_trt.runtime.session import StepRows

pytestmark = pytest.mark.slow
DRAFTER = Path(__file__).parents[2] / "demo-drafter"


def read(engine: Any, ids: list[int]) -> Any:
    """Logits [1, R, V] of the last rows of a text, read in one step with the last 8 verified."""
    one, known = np.ones(1, np.int32), len(ids) - 7
    rows = StepRows.greedy(np.array([ids], np.int32), one * 0, one * len(ids), one * known)
    return engine.session.step(0, rows, 0, want_logits=True).logits


@torch.no_grad()
def test_logits_equal_transformers(make_engine: Any, target: Any, prompts: Any) -> None:
    for ids in prompts[:4]:
        wanted = target(torch.tensor([ids])).logits[0, -8:].numpy()
        found = read(make_engine("fp32"), ids)[0, :8]
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-4 * np.abs(wanted).max())


def test_int4_weights_are_the_checkpoints_own(make_engine: Any, target: Any, prompts: Any) -> None:
    """Q4_1 blocks are kept as they are: only activations are rounded (8 bits per block)."""
    for ids in prompts[:3]:
        with torch.no_grad():
            wanted = target(torch.tensor([ids])).logits[0, -8:].numpy()
        found = read(make_engine("int4"), ids)[0, :8]
        assert np.abs(found - wanted).max() < 0.1 * np.abs(wanted).max()
        assert (found.argmax(-1) == wanted.argmax(-1)).mean() >= 7 / 8


@pytest.mark.parametrize("precision", ["fp32", "int4"])
def test_lossless_at_every_width(precision: str, make_engine: Any, prompts: Any) -> None:
    engine, params = make_engine(precision), SamplingParams(max_tokens=32)
    for width in (4, engine.session.limits.block):
        report = verify(engine, prompts[:3], params, width=width)
        assert report.lossless, report.mismatches
        assert report.tokens >= 60
        # A wrong feature, position or mask would still be lossless, but not accepted.
        assert report.acceptance_length is not None
        assert report.acceptance_length > 1.5


def test_sampling_is_the_same_with_and_without_drafter(make_engine: Any, prompts: Any) -> None:
    engine = make_engine("fp32")
    params = SamplingParams(max_tokens=24, temperature=0.8, top_p=0.95, top_k=100, seed=11)
    report = verify(engine, prompts[:4], params, width=8)
    assert report.lossless, report.mismatches
    other = SamplingParams(max_tokens=24, temperature=0.8, top_p=0.95, top_k=100, seed=12)
    texts = {engine.generate(prompts[0], p).text for p in (params, other)}
    assert len(texts) == 2


def test_greedy_equals_transformers(make_engine: Any, target: Any, prompts: Any) -> None:
    for ids in prompts[:3]:
        made = target.generate(torch.tensor([ids]), max_new_tokens=32, do_sample=False)
        wanted = made[0, len(ids) :].tolist()
        found = make_engine("fp32").generate(ids, SamplingParams(max_tokens=32))
        assert found.token_ids == wanted


def test_generation_equals_the_dflash_package(
    make_engine: Any, target: Any, prompts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens are those of z-lab's own loop, in about as many steps."""
    drafter = DFlashDraftModel.from_pretrained(str(DRAFTER), dtype=torch.float32).eval()
    monkeypatch.setattr(dflash.model, "_cuda_time", time.perf_counter)
    for ids in prompts[:3]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # about a name that dflash uses
            made = dflash_generate(
                drafter, target, torch.tensor([ids]), 33, None, return_stats=True
            )
        params = SamplingParams(max_tokens=33, ignore_eos=True)
        found = make_engine("fp32").generate(ids, params)
        assert found.token_ids == made.output_ids[0, len(ids) : len(ids) + 33].tolist()
        # A draft at a near tie may fall either way: sums in unlike orders. Tiny pairs are exact.
        assert abs(found.stats.steps - len(made.acceptance_lengths)) <= 2
