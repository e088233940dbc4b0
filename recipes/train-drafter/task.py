"""What a training is for: the texts' target, and what of it the drafter reads."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from command import TARGET, fail
from origin import Origin, choose_layers
from target import ChatFormat, find_mask_token, find_target, load_tokenizer, read_facts

from dflash_trt.checkpoint import check_pair, open_drafter


@dataclass(frozen=True)
class Task:
    """Whose drafter is trained, and what it reads."""

    target: Path
    num_layers: int
    """Of the target."""
    layer_ids: tuple[int, ...]
    columns: slice | torch.Tensor
    """Where those layers are in the texts' features."""
    mask_token_id: int


def make_task(
    origin: Origin,
    init: str,
    features: int | tuple[int, ...] | None = None,
    mask_token: str | None = None,
) -> Task:
    """What texts and the arguments of these names ask for together.

    Ends with a line, or raises `DFlashError`, where they contradict each other.
    """
    target = find_target(origin.target)
    facts, tokenizer = read_facts(target), load_tokenizer(target)
    layer_ids = origin.target_layer_ids
    if features is not None:
        layer_ids = choose_layers(features, facts.num_layers)
    if not set(layer_ids) <= set(origin.target_layer_ids):
        fail(f"the texts have features of layers {origin.target_layer_ids}, not all of {layer_ids}")
    start = None if init == TARGET else open_drafter(Path(init)).config
    asked = mask_token or (str(start.mask_token_id) if start else None)
    mask_token_id = find_mask_token(asked, tokenizer, ChatFormat.of(tokenizer), facts.vocab_size)
    if start:
        check_pair(facts, start)
        reads, wanted = (start.target_layer_ids, start.mask_token_id), (layer_ids, mask_token_id)
        if reads != wanted:
            fail(f"{init} reads layers and mask token {reads}, not {wanted}")
    columns = origin.columns(layer_ids, facts.hidden_size)
    return Task(target, facts.num_layers, layer_ids, columns, mask_token_id)
