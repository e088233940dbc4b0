"""A training that starts from a part of a drafter, or of a target's MLPs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import drafter as drafters
import pytest
import torch
from dflash.model import DFlashDraftModel
from drafter import Shape

SHAPE = Shape((0, 2, 4), layers=3, block=4, intermediate=96)


@pytest.fixture
def whole(target: Any) -> DFlashDraftModel:
    """A drafter whose parts are all of use."""
    torch.manual_seed(0)
    config = drafters.make_config(target.config, SHAPE, 5)
    drafter = drafters.from_target(config, target, torch.randn(20, 3 * 48)).eval()
    for parameter in drafter.parameters():
        noisy = parameter.data + 0.1 * torch.randn_like(parameter)
        parameter.data = noisy.bfloat16().float()  # what a file can hold
    return drafter


def inputs(features: torch.Tensor) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    return {
        "position_ids": torch.arange(10)[None],
        "noise_embedding": torch.randn(1, 4, 48, generator=draw),
        "target_hidden": features,
    }


FEATURES = torch.randn(1, 6, 3 * 48, generator=torch.Generator().manual_seed(2))


@torch.no_grad()
def test_a_start_as_large_is_the_same(whole: DFlashDraftModel, tmp_path: Path) -> None:
    drafters.save(whole, tmp_path)
    same = drafters.load(tmp_path, replace(SHAPE, block=6))
    assert same.config.block_size == 6
    assert torch.equal(same(**inputs(FEATURES)), whole(**inputs(FEATURES)))


@torch.no_grad()
def test_features_that_stay_keep_their_columns(whole: DFlashDraftModel, tmp_path: Path) -> None:
    drafters.save(whole, tmp_path)
    some = drafters.load(tmp_path, replace(SHAPE, layer_ids=(0, 4)))
    first, _, last = FEATURES.chunk(3, -1)
    silent = torch.cat([first, torch.zeros_like(first), last], -1)
    torch.testing.assert_close(
        some(**inputs(torch.cat([first, last], -1))), whole(**inputs(silent))
    )


@torch.no_grad()
@pytest.mark.parametrize("projection", ["up_proj", "down_proj"])
def test_channels_that_do_nothing_go_first(
    whole: DFlashDraftModel, projection: str, tmp_path: Path
) -> None:
    for layer in whole.layers:
        idle = torch.randperm(96, generator=torch.Generator().manual_seed(3))[:32]
        weight = getattr(layer.mlp, projection).weight
        (weight if projection == "up_proj" else weight.T)[idle] = 0
    drafters.save(whole, tmp_path)
    some = drafters.load(tmp_path, replace(SHAPE, intermediate=64))
    assert some.layers[0].mlp.up_proj.weight.shape == (64, 48)
    torch.testing.assert_close(some(**inputs(FEATURES)), whole(**inputs(FEATURES)))


@torch.no_grad()
def test_the_first_and_the_last_layer_stay(whole: DFlashDraftModel, tmp_path: Path) -> None:
    drafters.save(whole, tmp_path)
    some = drafters.load(tmp_path, replace(SHAPE, layers=2))
    middle = whole.layers[1]
    middle.self_attn.o_proj.weight.zero_()
    middle.mlp.down_proj.weight.zero_()
    torch.testing.assert_close(some(**inputs(FEATURES)), whole(**inputs(FEATURES)))


def test_a_target_lends_its_strongest_channels(target: Any) -> None:
    config = drafters.make_config(target.config, replace(SHAPE, intermediate=64), 5)
    some = drafters.from_target(config, target, torch.randn(20, 3 * 48))
    for mine, theirs in zip(some.layers, target.model.layers[3:], strict=True):
        rows = {tuple(row.tolist()) for row in theirs.mlp.up_proj.weight}
        assert all(tuple(row.tolist()) in rows for row in mine.mlp.up_proj.weight)
        assert torch.equal(mine.self_attn.q_proj.weight, theirs.self_attn.q_proj.weight)
