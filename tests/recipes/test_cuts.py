"""A training that starts from a part of a drafter, or of a target's MLPs."""

from __future__ import annotations

import json
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import drafter as drafters
import pytest
import torch
from dflash.model import DFlashDraftModel
from drafter import Shape
from origin import Origin
from safetensors.torch import load_file, save_file
from task import make_task

from dflash_trt.checkpoint import open_drafter
from dflash_trt.errors import DFlashError

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
        up, down = theirs.mlp.up_proj.weight, theirs.mlp.down_proj.weight
        strength = [float(up[i].norm() * down[:, i].norm()) for i in range(96)]
        strongest = sorted(sorted(range(96), key=strength.__getitem__)[-64:])
        assert torch.equal(mine.mlp.up_proj.weight, up[strongest])
        assert torch.equal(mine.mlp.down_proj.weight, down[:, strongest])
        assert torch.equal(mine.self_attn.q_proj.weight, theirs.self_attn.q_proj.weight)


def rewrite(folder: Path, **changes: Any) -> None:
    """Change config.json; None leaves a key out."""
    facts = json.loads((folder / "config.json").read_text()) | changes
    kept = {name: value for name, value in facts.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(kept))


@torch.no_grad()
def test_configs_that_say_it_in_other_words(whole: DFlashDraftModel, tmp_path: Path) -> None:
    """What `dflash-trt build` reads, a training reads too."""
    drafters.save(whole, tmp_path)
    nested = {"mask_token_id": 5, "target_layer_ids": [0, 2, 4]}
    for changes in (
        {"layer_types": None, "num_target_layers": None},
        {"dflash_config": None, **nested},
        {"block_size": None, "dflash_config": {**nested, "block_size": 4}},
    ):
        rewrite(tmp_path, **changes)
        same = drafters.load(tmp_path, num_target_layers=6)
        assert torch.equal(same(**inputs(FEATURES)), whole(**inputs(FEATURES)))
        drafters.save(same, tmp_path / "again")
        again = open_drafter(tmp_path / "again").config
        assert drafters.shape_of(again) == SHAPE
    weights = load_file(tmp_path / "model.safetensors")
    save_file({f"model.{name}": w for name, w in weights.items()}, tmp_path / "model.safetensors")
    same = drafters.load(tmp_path, num_target_layers=6)
    assert torch.equal(same(**inputs(FEATURES)), whole(**inputs(FEATURES)))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"layer_types": ["sliding_attention"] * 3, "sliding_window": 4,
             "use_sliding_window": True},
            "sliding windows",
        ),
        ({"input_embedding_scale": 24.0}, "a scale or a cap"),
        ({"final_logit_softcapping": 30.0}, "a scale or a cap"),
        ({"num_target_layers": 36}, "36"),
    ],
)  # fmt: skip
def test_what_training_would_leave_out_is_no_start(
    whole: DFlashDraftModel, target_folder: Path, tmp_path: Path, changes: dict[str, Any],
    said: str, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    start = tmp_path / "start"
    drafters.save(whole, start)
    rewrite(start, **changes)
    args = Namespace(
        init=str(start), output=tmp_path / "new", features=None, mask_token=None, layers=None,
        block=None, intermediate=None, widths=None, workers=1,
    )  # fmt: skip
    with pytest.raises((SystemExit, DFlashError)) as error:
        make_task(Origin(str(target_folder), (0, 2, 4), 0), args)
    assert said in f"{error.value} {capsys.readouterr().err}"


def test_no_folder_has_the_weights_of_another_shape(
    whole: DFlashDraftModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill between the two files leaves one that says so."""
    drafters.save(whole, tmp_path)
    small = drafters.load(tmp_path, replace(SHAPE, layers=1))

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(drafters, "write_file", killed)
    with pytest.raises(KeyboardInterrupt):
        drafters.save(whole, tmp_path)
    assert drafters.shape_of(open_drafter(tmp_path).config) == SHAPE  # the same shape: still whole
    with pytest.raises(KeyboardInterrupt):
        drafters.save(small, tmp_path)
    with pytest.raises(DFlashError, match="safetensors"):
        open_drafter(tmp_path)
