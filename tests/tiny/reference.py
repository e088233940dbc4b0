"""What transformers and the dflash package compute, without any code of dflash_trt."""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import dflash.model
import numpy as np
import numpy.typing as npt
import pytest
import torch
from dflash.model import dflash_generate

from tiny.models import TinyPair

F32 = npt.NDArray[np.float32]


@dataclass(frozen=True)
class DFlashRun:
    """One run of `dflash_generate`: new tokens, and per step the drafts and tokens produced."""

    tokens: list[int]
    drafts: list[list[int]]
    produced: list[int]


def greedy(target: Any, prompt: Sequence[int], count: int) -> list[int]:
    """The next `count` tokens by transformers' own greedy generate."""
    return greedy_rows(target, [prompt], count)[0]


def greedy_rows(target: Any, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """`greedy` of several prompts of one length."""
    ids = torch.tensor([list(prompt) for prompt in prompts])
    # Without a mask, generate would take a prompt's pad ids for padding.
    made = target.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False,
        pad_token_id=0,
    )  # fmt: skip
    return made[:, ids.shape[1] :].tolist()


@torch.no_grad()
def target_states(target: Any, tokens: Sequence[int]) -> tuple[F32, list[F32]]:
    """Logits [T, V] of one text, and the stream into layer 0 and out of every layer [T, H]."""
    outputs: list[F32] = []

    def keep(module: Any, inputs: Any, output: Any) -> None:
        value = output[0] if isinstance(output, tuple) else output
        outputs.append(value[0].numpy())

    hooks = [layer.register_forward_hook(keep) for layer in target.model.layers]
    try:
        made = target(torch.tensor([list(tokens)]), output_hidden_states=True)
    finally:
        for hook in hooks:
            hook.remove()
    return made.logits[0].numpy(), [made.hidden_states[0][0].numpy(), *outputs]


@torch.no_grad()
def draft_states(pair: TinyPair, features: F32, anchor: int, block: int) -> tuple[F32, F32, F32]:
    """Context [T, H], hidden rows and logits [block - 1, ..] of a block behind `features`."""
    drafter, target = pair.drafter, pair.target
    ids = torch.full((1, block), drafter.mask_token_id)
    ids[0, 0] = anchor
    scale = drafter.config.dflash_config.get("input_embedding_scale", 1.0)
    table = target.get_input_embeddings().weight
    context = torch.from_numpy(features)[None]
    hidden = drafter(
        target_hidden=context,
        noise_embedding=torch.nn.functional.embedding(ids, table) * scale,
        position_ids=torch.arange(len(features) + block)[None],
    )[:, 1:]
    fused = drafter.hidden_norm(drafter.fc(context))
    logits = drafter.compute_logits(hidden, target.lm_head)
    return fused[0].numpy(), hidden[0].numpy(), logits[0].numpy()


@torch.no_grad()
def draft_choice(pair: TinyPair, hidden: F32, logits: F32, anchor: int) -> list[int]:
    """The package's greedy drafts: the likeliest tokens, or the path of DFlash 2's selector.

    Of a draft vocabulary, if the pair has one.
    """
    ids = range(logits.shape[1]) if pair.draft_ids is None else pair.draft_ids
    barred = torch.full(logits.shape, -torch.inf)
    barred[:, list(ids)] = torch.from_numpy(logits)[:, list(ids)]
    selector = getattr(pair.drafter, "candidate_selector", None)
    if selector is None:
        return barred.argmax(-1).tolist()
    rows = torch.from_numpy(hidden)[None]
    path, _, _ = selector.select(rows, barred[None], torch.tensor([anchor]), 0.0)
    return path[0].tolist()


def close(found: Any, wanted: Any) -> None:
    """Equal within 1e-4 of the largest value: both sides sum in float32, in unlike orders."""
    scale = float(np.abs(wanted).max())
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-4 * scale)


def dflash_run(
    pair: TinyPair, prompt: Sequence[int], count: int, block: int | None = None
) -> DFlashRun:
    """The dflash package's own greedy generation."""
    drafts: list[list[int]] = []
    watches = "propose" if hasattr(pair.drafter, "propose") else "compute_logits"  # DFlash 2, or 1
    method = getattr(pair.drafter, watches)

    def watched(*args: Any) -> Any:
        made = method(*args)
        drafts.append((made[0][0] if watches == "propose" else made[0].argmax(-1)).tolist())
        return made

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of transformers, about a name dflash uses
        patch.setattr(dflash.model, "_cuda_time", time.perf_counter)
        patch.setattr(pair.drafter, watches, watched)
        made = dflash_generate(
            pair.drafter, pair.target, torch.tensor([list(prompt)]), count, None,
            block_size=block, return_stats=True,
        )  # fmt: skip
    tokens = made.output_ids[0, len(prompt) :].tolist()
    return DFlashRun(tokens, drafts, made.acceptance_lengths)
