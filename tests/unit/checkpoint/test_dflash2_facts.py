"""DFlash 2 drafters in both formats: facts, tensors, and every refusal that is theirs alone."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_files import (
    DFLASH2_CONFIG,
    dflash2_tensors,
    drafter_tensors,
    edit_json,
    save_dflash2,
    save_drafter,
    save_hf,
)

from dflash_trt.checkpoint import open_drafter, read_pair
from dflash_trt.checkpoint.drafter import folder_config
from dflash_trt.checkpoint.pair import check_pair, read_facts
from dflash_trt.config import DFlash2Config, LayerMask, PairConfig
from dflash_trt.errors import (
    BadTensor,
    CheckpointError,
    ConfigError,
    MissingTensor,
    PairMismatch,
    UnsupportedArchitecture,
)

SELECTOR = "candidate_selector."
SLIDING = {
    "layer_types": ["sliding_attention", "full_attention"], "use_sliding_window": True,
    "sliding_window": 16,
}  # fmt: skip


def speculators(folder: Path, tensors: Any = None, **changes: Any) -> Path:
    """The drafter of `save_dflash2` as `speculators` 0.9 writes it; `...` removes a key."""
    save_dflash2(folder, tensors)
    stored = json.loads((folder / "config.json").read_text())
    decoder = {
        key: value
        for key, value in stored.items()
        if key not in ("architectures", "block_size", "dflash_config", "is_causal",
                       "num_target_layers")
    }  # fmt: skip
    decoder.update(changes.pop("decoder", {}))
    config = {
        "architectures": ["DFlash2DraftModel"],
        "aux_hidden_state_layer_ids": [1, 3],
        "block_size": 8,
        "draft_vocab_size": 96,
        "mask_token_id": 90,
        "sample_from_anchor": False,
        "sliding_window_non_causal": True,
        "speculators_config": {"algorithm": "dflash2"},
        "speculators_model_type": "dflash2",
        "speculators_version": "0.9.0",
        "target_hidden_size": None,
        "transformer_layer_config": decoder,
        **DFLASH2_CONFIG,
    }
    (folder / "config.json").write_text(json.dumps(config))
    edit_json(folder / "config.json", **changes)
    return folder


def test_facts_and_tensors(tmp_path: Path) -> None:
    drafter = open_drafter(save_dflash2(tmp_path))
    assert drafter.config.dflash2 == DFlash2Config(
        taps=2, group_size=16, selector_rank=12, selector_top_k=8
    )
    assert drafter.config.masks == (LayerMask(causal=False),) * 2
    assert drafter.notes == ()
    assert set(drafter.source.names()) == set(dflash2_tensors())
    plain = open_drafter(save_drafter(tmp_path / "v1")).config
    assert plain.dflash2 is None
    assert plain == dataclasses.replace(drafter.config, dflash2=None)


def test_numbers_at_top_level(tmp_path: Path) -> None:
    nested = dict.fromkeys(DFLASH2_CONFIG, ...)
    folder = save_dflash2(tmp_path, dflash_config=nested, **DFLASH2_CONFIG)
    assert open_drafter(folder).config == open_drafter(save_dflash2(tmp_path / "b")).config


def test_names_of_the_codebooks(tmp_path: Path) -> None:
    """`.weight` behind them, and `model.` before all names, change nothing."""
    tensors = dflash2_tensors()
    renamed = {
        f"model.{name}.weight" if name.endswith("_codebook") else f"model.{name}": tensor
        for name, tensor in tensors.items()
    }
    source = open_drafter(save_dflash2(tmp_path / "a", renamed)).source
    assert set(source.names()) == set(tensors)
    name = SELECTOR + "predecessor_codebook"
    np.testing.assert_array_equal(source.read(name), tensors[name].float().numpy())
    both = tensors | {f"{name}.weight": torch.ones(96, 12)}
    with pytest.raises(BadTensor, match=rf"has both {name} and {name}\.weight"):
        open_drafter(save_dflash2(tmp_path / "b", both))


def test_sliding_layers(tmp_path: Path) -> None:
    wanted = (LayerMask(causal=False, window=16), LayerMask(causal=False))
    assert open_drafter(save_dflash2(tmp_path / "a", **SLIDING)).config.masks == wanted
    folder = speculators(tmp_path / "b", decoder=SLIDING, sliding_window_non_causal=...)
    assert open_drafter(folder).config.masks == wanted  # the default of that kind's class


def test_the_same_drafter_in_both_formats_is_the_same(tmp_path: Path) -> None:
    drafter = open_drafter(speculators(tmp_path / "s"))
    plain = open_drafter(save_dflash2(tmp_path / "z"))
    assert drafter.config == dataclasses.replace(plain.config, num_target_layers=None)
    assert drafter.source.names() == plain.source.names()
    assert drafter.notes == ()


def test_a_draft_vocabulary(tmp_path: Path) -> None:
    ids = torch.arange(1, 96, 5)
    own = {"d2t": ids - torch.arange(len(ids)), "lm_head.weight": torch.ones(len(ids), 64)}
    folder = speculators(tmp_path / "a", dflash2_tensors() | own, draft_vocab_size=len(ids))
    drafter = open_drafter(folder)
    assert drafter.draft_ids is not None
    assert drafter.draft_ids.tolist() == ids.tolist()
    few = {"d2t": ids[:7] - torch.arange(7), "lm_head.weight": torch.ones(7, 64)}
    folder = speculators(tmp_path / "b", dflash2_tensors() | few, draft_vocab_size=7)
    with pytest.raises(CheckpointError, match=r"selector_top_k is 8, expected .* 1\.\.7"):
        open_drafter(folder)


U, C = UnsupportedArchitecture, CheckpointError
REFUSED: list[tuple[dict[str, Any], dict[str, Any], type[Exception], str]] = [
    *(
        ({}, {key: value}, C, f"dflash_config.{key} is {value}, expected a whole number")
        for key in DFLASH2_CONFIG
        for value in (0, -1, True, 2.5)
    ),
    *(({}, {key: ...}, C, f"{key} is missing") for key in DFLASH2_CONFIG),
    ({}, {"conv_kernel_size": 9}, C, r"conv_kernel_size is 9, expected .* 1\.\.8"),
    ({}, {"conv_group_size": 128}, C, r"conv_group_size is 128, expected .* 1\.\.64"),
    ({}, {"conv_group_size": 24}, C, "conv_group_size is 24, which does not divide hidden_size 64"),
    ({}, {"selector_top_k": 65}, C, r"selector_top_k is 65, expected .* 1\.\.64"),
    ({}, {"selector_rank": 1025}, C, r"selector_rank is 1025, expected .* 1\.\.1024"),
    ({}, {"conv_kernel_size": 3}, BadTensor,
     r"base_kernel has shape \[2, 2, 64\], but the config makes it \[2, 3, 64\]"),
    ({}, {"conv_group_size": 8}, BadTensor,
     r"kernel_projection.weight has shape \[16, 64\], but the config makes it \[32, 64\]"),
    ({}, {"selector_rank": 13}, BadTensor, r"predecessor_codebook has shape \[96, 12\]"),
    ({"is_causal": True}, {}, U, "has causal layers, which no DFlash 2 drafter has"),
    ({}, {"causal": True, "is_causal": True}, C, "contradict each other"),
    (SLIDING | {"is_causal": None}, {}, U, "has causal layers"),
    ({"markov_rank": 4}, {}, U, "markov_rank is there: this is DSpark"),
    ({}, {"projector_type": "domino"}, U, "projector_type is 'domino'"),
    ({}, {"sample_from_anchor": True}, U, "sample_from_anchor is true"),
    ({}, {"conv_width": 4}, U, "conv_width is 4"),
    ({"architectures": ["DFlashDraftModel"]}, {}, U,
     "architectures is 'DFlashDraftModel' with DFlash 2's conv_kernel_size"),
    ({"architectures": ["DFlash2DraftModel", "DFlashDraftModel"]}, {}, U, "architectures is"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "nested", "error", "message"), REFUSED)
def test_refusals_name_the_culprit(
    tmp_path: Path, changes: Any, nested: Any, error: type[CheckpointError], message: str
) -> None:
    with pytest.raises(error, match=message) as caught:
        open_drafter(save_dflash2(tmp_path, dflash_config=nested, **changes))
    assert str(tmp_path) in caught.value.message
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("key", DFLASH2_CONFIG)
def test_a_config_of_version_1_with_a_key_of_version_2(tmp_path: Path, key: str) -> None:
    for place in ({"dflash_config": {key: 2}}, {key: 2}):
        with pytest.raises(U, match=f"'DFlashDraftModel' with DFlash 2's {key}"):
            open_drafter(save_drafter(tmp_path, **place))


def test_config_and_tensors_must_be_of_one_version(tmp_path: Path) -> None:
    with pytest.raises(U, match=r"config.json says DFlash2DraftModel, but there is no tensor"):
        open_drafter(save_dflash2(tmp_path / "a", drafter_tensors()))
    for name in sorted(set(dflash2_tensors()) - set(drafter_tensors())):
        tensors = dflash2_tensors()
        extra = drafter_tensors() | {name: tensors.pop(name)}
        with pytest.raises(U, match=f"tensor {name} is there: this is DFlash 2, but config.json"):
            open_drafter(save_drafter(tmp_path / "b", extra))
        with pytest.raises(MissingTensor, match=f"tensor {name} is missing"):
            open_drafter(save_dflash2(tmp_path / "c", tensors))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        *(({key: ...}, C, f"{key} is missing") for key in DFLASH2_CONFIG),
        ({"architectures": ["DFlashDraftModel"]}, U, r"kind \['DFlashDraftModel'\]"),
        ({"speculators_model_type": "dflash"}, U, r"kind \['DFlash2DraftModel'\]"),
        ({"sample_from_anchor": True}, U, "sample_from_anchor is true"),
        ({"decoder": SLIDING, "sliding_window_non_causal": False}, U, "has causal layers"),
    ],
)
def test_refusals_in_speculators_format(
    tmp_path: Path, changes: dict[str, Any], error: type[CheckpointError], message: str
) -> None:
    with pytest.raises(error, match=message):
        open_drafter(speculators(tmp_path, **changes))


def test_a_pair(tmp_path: Path) -> None:
    save_hf(tmp_path / "t", "qwen3")
    drafter = save_dflash2(tmp_path / "d")
    pair = read_pair(tmp_path / "t", drafter)
    weights = pair.weights()
    assert weights.info(f"drafter.{SELECTOR}successor_codebook").shape == (96, 12)
    assert folder_config(drafter).dflash2 == pair.config.drafter.dflash2
    # A row of a codebook for every token: no padding can make up for another vocabulary.
    target = dataclasses.replace(pair.config.target, vocab_size=128)
    for tensors in (True, False):
        with pytest.raises(PairMismatch, match="vocab_size 96 differs from target vocab_size 128"):
            check_pair(target, pair.config.drafter, tensors=tensors)
    assert read_facts(tmp_path / "t", drafter).drafter.dflash2 is not None
    few, enough = tmp_path / "few.json", tmp_path / "enough.json"
    few.write_text("[1, 2, 3]")
    with pytest.raises(ConfigError, match=r"few.json: has 3 tokens, .* chooses among 8"):
        read_pair(tmp_path / "t", drafter, few)
    enough.write_text("[1, 2, 3, 9, 10, 11, 12, 40]")
    assert read_pair(tmp_path / "t", drafter, enough).config.drafter.head_rows == 8


def test_facts_as_json(tmp_path: Path) -> None:
    save_hf(tmp_path / "t", "qwen3")
    config = read_pair(tmp_path / "t", save_dflash2(tmp_path / "d")).config
    stored = json.dumps(config.to_json())
    assert PairConfig.from_json(json.loads(stored)) == config
    older = json.loads(stored)
    del older["drafter"]["dflash2"]
    plain = PairConfig.from_json(older)
    assert plain.drafter == dataclasses.replace(config.drafter, dflash2=None)
    assert PairConfig.from_json(json.loads(json.dumps(plain.to_json()))) == plain


@pytest.mark.parametrize(
    "changes",
    [
        {"taps": "2"}, {"taps": 0}, {"taps": None}, {"more": 1}, {"group_size": 24},
        {"selector_top_k": 97}, {"selector_rank": True},
    ],
)  # fmt: skip
def test_facts_that_are_none(tmp_path: Path, changes: dict[str, Any]) -> None:
    save_hf(tmp_path / "t", "qwen3")
    data = read_pair(tmp_path / "t", save_dflash2(tmp_path / "d")).config.to_json()
    data["drafter"]["dflash2"].update(changes)
    with pytest.raises(ConfigError):
        PairConfig.from_json(data)
    data["drafter"]["dflash2"] = 3
    with pytest.raises(ConfigError):
        PairConfig.from_json(data)
