"""What a training is for: the texts' target, and what of it the drafter reads."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from command import TARGET, fail
from drafter import Shape
from origin import Origin, choose_layers
from target import ChatFormat, find_mask_token, find_target, load_tokenizer, read_facts

from dflash_trt.checkpoint import check_pair, open_drafter

BLOCK, LAYERS = 8, 4


@dataclass(frozen=True)
class Task:
    """Whose drafter is trained, and what it reads."""

    target: Path
    shape: Shape
    columns: slice | torch.Tensor
    """Where its layers are in the texts' features."""
    mask_token_id: int


def make_task(
    origin: Origin,
    init: str,
    features: int | tuple[int, ...] | None = None,
    mask_token: str | None = None,
    block: int | None = None,
    layers: int | None = None,
    intermediate: int | None = None,
) -> Task:
    """What texts and the arguments of these names ask for together.

    Ends with a line, or raises `DFlashError`, where they contradict each other.
    """
    target = find_target(origin.target)
    facts, tokenizer = read_facts(target), load_tokenizer(target)
    start = None if init == TARGET else open_drafter(Path(init)).config
    source = start or facts
    layer_ids = start.target_layer_ids if start else origin.target_layer_ids
    if features is not None:
        layer_ids = choose_layers(features, facts.num_layers)
    if not set(layer_ids) <= set(origin.target_layer_ids):
        fail(f"the texts have features of layers {origin.target_layer_ids}, not all of {layer_ids}")
    shape = Shape(
        layer_ids,
        layers or (start.num_layers if start else LAYERS),
        block or (start.block_size if start else BLOCK),
        intermediate or source.intermediate_size,
    )
    for name, has in (("layers", source.num_layers), ("intermediate", source.intermediate_size)):
        if getattr(shape, name) > has:
            fail(f"--{name} {getattr(shape, name)}: {init} has {has} to start from")
    asked = mask_token or (str(start.mask_token_id) if start else None)
    mask_token_id = find_mask_token(asked, tokenizer, ChatFormat.of(tokenizer), facts.vocab_size)
    if start:
        check_pair(facts, start)
        if not set(layer_ids) <= set(start.target_layer_ids):
            fail(f"{init} reads layers {start.target_layer_ids}, not all of {layer_ids}")
        if start.mask_token_id != mask_token_id:
            fail(f"{init} has mask token {start.mask_token_id}, not {mask_token_id}")
    columns = origin.columns(layer_ids, facts.hidden_size)
    return Task(target, shape, columns, mask_token_id)
