"""What a training is for: the texts' target, and what of it the drafter reads."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch
from command import TARGET, fail
from drafter import Shape, shape_of
from origin import Origin, choose_layers
from target import DEVICE, ChatFormat, find_mask_token, find_target, read_facts

from dflash_trt.checkpoint import check_pair, load_tokenizer, open_drafter
from dflash_trt.config import DrafterConfig, LayerMask, TargetConfig

BLOCK, LAYERS = 8, 4


@dataclass(frozen=True)
class Task:
    """Whose drafter is trained, and what it reads."""

    target: Path
    shape: Shape
    columns: slice | torch.Tensor
    """Where its layers are in the texts' features."""
    mask_token_id: int


def make_task(origin: Origin, args: argparse.Namespace) -> Task:
    """What texts and train.py's arguments ask for together.

    Ends with a line, or raises `DFlashError`, where they contradict each other.
    """
    target = find_target(origin.target)
    facts, tokenizer = read_facts(target), load_tokenizer(target)
    start = None if args.init == TARGET else _start(Path(args.init), facts)
    source = start or facts
    whole = (
        shape_of(start)
        if start
        else Shape(origin.target_layer_ids, LAYERS, BLOCK, facts.intermediate_size)
    )
    shape = Shape(
        whole.layer_ids
        if args.features is None
        else choose_layers(args.features, facts.num_layers),
        args.layers or whole.layers,
        args.block or whole.block,
        args.intermediate or whole.intermediate,
    )
    if not set(shape.layer_ids) <= set(origin.target_layer_ids):
        fail(
            f"the texts have features of layers {origin.target_layer_ids}, "
            f"not all of {shape.layer_ids}"
        )
    if not set(shape.layer_ids) <= set(whole.layer_ids):
        fail(f"{args.init} reads layers {whole.layer_ids}, not all of {shape.layer_ids}")
    for name, has in (("layers", source.num_layers), ("intermediate", source.intermediate_size)):
        if getattr(shape, name) > has:
            fail(f"--{name} {getattr(shape, name)}: {args.init} has {has} to start from")
    if start and shape != whole and Path(args.init).resolve() == args.output.resolve():
        fail(f"{args.init} would be replaced by a drafter of another shape: give another --output")
    widest = max(args.widths or [0])
    if widest > shape.block:
        fail(f"--widths {widest} is above the block, {shape.block}")
    if DEVICE == "cuda" and (args.workers or 1) > 1:
        fail("--workers: one on a GPU, since all would share it")
    asked = args.mask_token or (str(start.mask_token_id) if start else None)
    mask_token_id = find_mask_token(asked, tokenizer, ChatFormat.of(tokenizer), facts.vocab_size)
    if start and start.mask_token_id != mask_token_id:
        fail(f"{args.init} has mask token {start.mask_token_id}, not {mask_token_id}")
    columns = origin.columns(shape.layer_ids, facts.hidden_size)
    return Task(target, shape, columns, mask_token_id)


def _start(folder: Path, facts: TargetConfig) -> DrafterConfig:
    """A drafter to start from, if it has nothing that training leaves out."""
    start = open_drafter(folder).config
    check_pair(facts, start)
    more = {
        "sliding windows or causal layers": set(start.masks) != {LayerMask(causal=False)},
        "an embedding or a head of its own": start.own_embedding or start.own_lm_head,
        "a draft vocabulary of its own": start.draft_vocab_size is not None,
        "DFlash 2's convolutions and selector": start.dflash2 is not None,
        "a scale or a cap of its own": (
            start.input_embedding_scale,
            start.output_multiplier,
            start.final_logit_softcapping,
        )
        != (1, 1, None),
    }
    for what, has in more.items():
        if has:
            fail(f"{folder}: a drafter with {what} cannot be trained on here")
    return start
