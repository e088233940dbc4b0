"""A pair: what target and drafter must share, and one set of names for both models' weights."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from checkpoint_files import drafter_tensors, save_drafter, save_gguf, save_hf

from dflash_trt.checkpoint import check_block, check_pair, open_target, read_pair
from dflash_trt.checkpoint.weights import PairWeights
from dflash_trt.config import PairConfig
from dflash_trt.errors import BadTensor, MissingTensor, PairMismatch

THETA = {"rope_type": "default", "rope_theta": 1e6}  # the drafter's
SHARED = "it uses the target's embedding and head"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    base = tmp_path_factory.mktemp("pair")
    save_hf(base / "target", "qwen3", rope_parameters=THETA)
    drafter = save_drafter(base / "drafter", dflash_config={"target_layer_ids": [0, 1]})
    return base / "target", drafter


def test_read_pair(folders: tuple[Path, Path]) -> None:
    pair = read_pair(*folders)
    assert pair.config.drafter.target_layer_ids == (0, 1)
    assert PairConfig.from_json(pair.config.to_json()) == pair.config
    assert pair.warnings == ()


@pytest.mark.parametrize(
    ("target", "drafter", "message"),
    [
        ({"hidden_size": 128}, {}, "target_hidden_size 64 differs from target hidden_size 128"),
        ({}, {"hidden_size": 32}, "hidden_size 32 differs from target hidden_size 64"),
        ({}, {"vocab_size": 100, "own_lm_head": True},
         "vocab_size 100 differs from target vocab_size 96"),
        ({"vocab_size": 128}, {"own_embedding": True},
         "vocab_size 96 differs from target vocab_size 128"),
        ({"vocab_size": 80}, {}, "vocab_size 96 differs from target vocab_size 80, and .* 90 is"),
        ({}, {"num_target_layers": 36}, "num_target_layers 36 differs from .*layers 3"),
        ({}, {"target_layer_ids": (0, 3)}, r"\[0, 3\]: 3 is not a layer of the target, .* 0\.\.2"),
        ({}, {"target_layer_ids": (1, 1)}, "has an id twice"),
        ({}, {"mask_token_id": 96}, "mask_token_id 96 is outside the target's embedding of 96"),
    ],
)  # fmt: skip
def test_mismatch_names_both_numbers(
    folders: tuple[Path, Path], target: Any, drafter: Any, message: str
) -> None:
    config = read_pair(*folders).config
    with pytest.raises(PairMismatch, match=message):
        check_pair(
            dataclasses.replace(config.target, **target),
            dataclasses.replace(config.drafter, **drafter),
        )


def test_what_is_allowed(folders: tuple[Path, Path]) -> None:
    config = read_pair(*folders).config
    other = dataclasses.replace(config.drafter, hidden_size=32, own_embedding=True,
                                own_lm_head=True, num_target_layers=None)  # fmt: skip
    assert check_pair(config.target, other) == ()
    last = dataclasses.replace(config.drafter, target_layer_ids=(0, 2), mask_token_id=95)
    (remark,) = check_pair(config.target, last)
    assert "last target layer (2)" in remark


@pytest.mark.parametrize("vocab_size", [92, 100])
def test_a_drafter_that_shares_embedding_and_head_may_be_padded_otherwise(
    folders: tuple[Path, Path], tmp_path: Path, vocab_size: int
) -> None:
    layers = {"target_layer_ids": [0, 1]}
    drafter = save_drafter(tmp_path / "d", vocab_size=vocab_size, dflash_config=layers)
    pair = read_pair(folders[0], drafter)
    (remark,) = pair.warnings
    assert f"drafter vocab_size {vocab_size} differs from target vocab_size 96" in remark
    assert SHARED in remark
    # What the step graph looks up and multiplies with: all rows of the target's.
    assert pair.config.drafter.vocab_size == 96
    weights = pair.weights()
    for name in ("embed_tokens", "lm_head"):
        assert weights.info(f"drafter.{name}.weight").shape == (96, 64)
    own = drafter_tensors() | {"embed_tokens.weight": torch.ones(vocab_size, 64)}
    save_drafter(drafter, own, vocab_size=vocab_size, dflash_config=layers)
    with pytest.raises(PairMismatch, match=f"vocab_size {vocab_size} differs from .* 96"):
        read_pair(folders[0], drafter)


YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0,
        "original_max_position_embeddings": 128}  # fmt: skip


@pytest.mark.parametrize(
    ("target", "drafter", "words"),
    [
        (THETA, {"rope_theta": 10000.0}, ("default, theta 10000)", "default, theta 1e+06)")),
        (YARN, {}, ("default, theta 1e+06)", "yarn, theta 1e+06, factor 4")),
        (YARN, {"rope_theta": ..., "rope_parameters": YARN | {"factor": 2.0}},
         ("factor 2,", "factor 4,")),
        (YARN, {"rope_theta": ..., "rope_parameters": YARN}, ()),
        (YARN, {"rope_theta": ..., "rope_parameters": YARN | {"beta_fast": 32, "truncate": True}},
         ()),
    ],
)  # fmt: skip
def test_rotary_rules_that_differ_are_named_and_the_drafters_own_is_used(
    tmp_path: Path, target: Any, drafter: Any, words: tuple[str, ...]
) -> None:
    save_hf(tmp_path / "target", "qwen3", rope_parameters=target)
    layers = {"target_layer_ids": [0, 1]}
    folder = save_drafter(tmp_path / "drafter", dflash_config=layers, **drafter)
    pair = read_pair(tmp_path / "target", folder)
    assert len(pair.warnings) == bool(words)
    for word in words:
        assert word in pair.warnings[0]
    own = drafter.get("rope_parameters", {"rope_theta": drafter.get("rope_theta", 1e6)})
    assert pair.config.drafter.attention.rope.theta == own["rope_theta"]
    assert pair.config.target.attention.rope.theta == 1e6


def test_block_is_at_most_the_trained_one(folders: tuple[Path, Path]) -> None:
    config = read_pair(*folders).config
    for block in (2, 7, 8):
        check_block(config, block)
    for block in (9, 16, 1, 0, -3):
        with pytest.raises(PairMismatch, match=f"block {block} was asked .* with block 8"):
            check_block(config, block)


def test_weights_of_an_untied_pair(folders: tuple[Path, Path]) -> None:
    pair = read_pair(*folders)
    weights = pair.weights()
    names = weights.names()
    assert len(names) == len(set(names))
    assert "target.layers.0.self_attn.q_proj.weight" in names
    assert {"target.embed_tokens.weight", "target.norm.weight", "target.lm_head.weight",
            "drafter.fc.weight", "drafter.hidden_norm.weight", "drafter.norm.weight",
            "drafter.layers.1.mlp.up_proj.weight"} <= set(names)  # fmt: skip
    for name in names:
        assert weights.canonical(name) == name
        assert weights.read(name).shape == weights.info(name).shape
    assert weights.canonical("drafter.embed_tokens.weight") == "target.embed_tokens.weight"
    assert weights.canonical("drafter.lm_head.weight") == "target.lm_head.weight"
    np.testing.assert_array_equal(
        weights.read("drafter.lm_head.weight"), pair.target_source.read("lm_head.weight")
    )
    np.testing.assert_array_equal(
        weights.read_rows("drafter.fc.weight", 1, 3), pair.drafter_source.read("fc.weight")[1:3]
    )
    assert weights.raw("drafter.fc.weight").dtype.itemsize == 2
    assert weights.q4_blocks("drafter.fc.weight") is None
    for name in ("target.nope", "drafter.nope", "fc.weight", "target.model.norm.weight"):
        with pytest.raises(MissingTensor, match="is missing"):
            weights.read(name)


def test_weights_of_a_tied_pair_with_own_embedding(tmp_path: Path) -> None:
    save_hf(tmp_path / "target", "llama", tie_word_embeddings=True)
    own = drafter_tensors() | {"embed_tokens.weight": torch.ones(96, 64)}
    save_drafter(tmp_path / "drafter", own)
    weights = read_pair(tmp_path / "target", tmp_path / "drafter").weights()
    assert "target.lm_head.weight" not in weights.names()
    assert weights.canonical("target.lm_head.weight") == "target.embed_tokens.weight"
    assert weights.canonical("drafter.lm_head.weight") == "target.embed_tokens.weight"
    assert weights.canonical("drafter.embed_tokens.weight") == "drafter.embed_tokens.weight"
    assert weights.info("target.lm_head.weight").name == "target.embed_tokens.weight"


def test_gguf_target_of_a_pair(tmp_path: Path) -> None:
    path = save_gguf(tmp_path / "m.gguf", kind="Q4_0")
    drafter = save_drafter(tmp_path / "drafter")
    with pytest.raises(PairMismatch, match=r"target_hidden_size 64 .* hidden_size 256"):
        read_pair(path, drafter)
    assert open_target(path).config.vocab_size == 96


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_values_that_are_no_numbers_are_refused_however_they_are_read(
    dtype: torch.dtype, value: float, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    tensors = {name: tensor.to(dtype) for name, tensor in drafter_tensors().items()}
    tensors["fc.weight"][-1, -1] = value
    largest = torch.finfo(dtype).max
    tensors["layers.0.mlp.up_proj.weight"][0, :2] = torch.tensor([largest, -largest])
    weights = read_pair(folders[0], save_drafter(tmp_path / "drafter", tensors)).weights()
    name, rows = "drafter.fc.weight", len(tensors["fc.weight"])
    for read in (weights.read, weights.raw, lambda name: weights.read_rows(name, 1, rows)):
        with pytest.raises(
            BadTensor, match=r"safetensors: tensor fc\.weight holds NaN or infinite values"
        ):
            read(name)
        read("drafter.layers.0.mlp.down_proj.weight")
    weights.read_rows(name, 0, rows - 1)
    assert weights.read("drafter.layers.0.mlp.up_proj.weight").max() == np.float32(largest)


@pytest.mark.parametrize(("kind", "at"), [("Q4_0", 0), ("Q4_1", 0), ("Q4_1", 2)])
def test_blocks_with_a_scale_or_offset_that_is_no_number_are_refused(
    kind: str, at: int, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    path = save_gguf(tmp_path / "m.gguf", kind=kind)
    stored = next(t for t in gguf.GGUFReader(path, "r+").tensors if t.name == "blk.1.ffn_up.weight")
    stored.data[5, at : at + 2] = np.array([np.inf], np.float16).view(np.uint8)
    stored.data.base.flush()
    config = read_pair(*folders).config
    weights = PairWeights(config, open_target(path).source, read_pair(*folders).drafter_source)
    message = r"layers\.1\.mlp\.up_proj\.weight holds NaN or infinite values"
    for read in (weights.q4_blocks, weights.read):
        with pytest.raises(BadTensor, match=message):
            read("target.layers.1.mlp.up_proj.weight")
    assert weights.q4_blocks("target.layers.0.mlp.up_proj.weight") is not None
