"""A head that is tied to the embedding and stored as well, and one that is stored instead of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from checkpoint_files import save_drafter, save_hf
from safetensors.torch import load_file, save_file

from dflash_trt.build.pipeline import build, plan
from dflash_trt.checkpoint import open_target, read_pair
from dflash_trt.checkpoint.tied import PIECE_ROWS, check_tied_head
from dflash_trt.errors import BadTensor
from tiny import PairMaker

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def save_tied(folder: Path, rows: int = 96, family: str = "qwen3") -> dict[str, torch.Tensor]:
    """A tied target's tensors, as saved: without a head."""
    save_hf(folder, family, tie_word_embeddings=True, vocab_size=rows)
    tensors = load_file(folder / "model.safetensors")
    assert HEAD not in tensors
    return tensors


def store(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def check(folder: Path) -> None:
    target = open_target(folder)
    check_tied_head(target.config, target.source)


@pytest.mark.parametrize("rows", [96, PIECE_ROWS, PIECE_ROWS + 1, 2 * PIECE_ROWS - 1])
def test_a_copy_is_ignored_and_anything_else_refused(tmp_path: Path, rows: int) -> None:
    tensors = save_tied(tmp_path, rows)
    check(tmp_path)
    store(tmp_path, tensors | {HEAD: tensors[EMBEDDING].clone()})
    check(tmp_path)
    for row in (0, rows // 2, rows - 1):
        head = tensors[EMBEDDING].clone()
        head[row, -1] += 1
        store(tmp_path, tensors | {HEAD: head})
        with pytest.raises(BadTensor, match=f"{HEAD} differs from {EMBEDDING}") as caught:
            check(tmp_path)
        assert str(tmp_path) in caught.value.message
        assert "tie_word_embeddings to false" in caught.value.hint
        assert f"remove the tensor {HEAD}" in caught.value.hint


def test_a_copy_in_another_type_is_a_copy_as_long_as_its_values_are_the_same(
    tmp_path: Path,
) -> None:
    tensors = save_tied(tmp_path)
    rounded = tensors[EMBEDDING].to(torch.bfloat16)
    store(tmp_path, tensors | {EMBEDDING: rounded, HEAD: rounded.float()})
    check(tmp_path)
    store(tmp_path, tensors | {HEAD: rounded})
    with pytest.raises(BadTensor, match="differs"):
        check(tmp_path)


@pytest.mark.parametrize("shape", [(95, 64), (96, 32)])
def test_a_head_of_another_shape_is_refused_with_the_facts(
    tmp_path: Path, shape: tuple[int, int]
) -> None:
    tensors = save_tied(tmp_path)
    store(tmp_path, tensors | {HEAD: torch.ones(shape)})
    with pytest.raises(BadTensor, match=r"lm_head\.weight has shape"):
        open_target(tmp_path)


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_a_head_stored_instead_of_the_embedding_is_both_as_in_transformers(
    tmp_path: Path, family: str
) -> None:
    tensors = save_tied(tmp_path / "target", family=family)
    tensors[HEAD] = tensors.pop(EMBEDDING)
    store(tmp_path / "target", tensors)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "target")
    pair = read_pair(tmp_path / "target", save_drafter(tmp_path / "drafter"))
    check_tied_head(pair.config.target, pair.target_source)
    weights = pair.weights()
    for name, reference in (
        ("target.embed_tokens.weight", theirs.get_input_embeddings().weight),
        ("target.lm_head.weight", theirs.get_output_embeddings().weight),
    ):
        np.testing.assert_array_equal(weights.read(name), reference.detach().numpy())


def test_a_contradiction_leaves_no_engine(make_pair: PairMaker, tmp_path: Path) -> None:
    pair = make_pair(target={"tie_word_embeddings": True})
    folder = tmp_path / "target"
    folder.mkdir()
    for file in pair.target_dir.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    tensors = load_file(folder / "model.safetensors")
    head = tensors[EMBEDDING] * 2
    store(folder, tensors | {HEAD: head})
    made = plan(str(folder), str(pair.drafter_dir), {"max_seq_len": 32})  # reads no weights
    (tmp_path / "out").mkdir()

    def build_it(made: Any) -> None:
        build(made, tmp_path / "out" / "engine", force=False, progress=lambda *state: None)

    with pytest.raises(BadTensor, match="differs from"):
        build_it(made)
    assert not list((tmp_path / "out").iterdir())
    # What the hint says first: then the stored head is the head, in transformers as well.
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    ours = read_pair(folder, pair.drafter_dir).weights().read("target.lm_head.weight")
    np.testing.assert_array_equal(ours, head.numpy())
    np.testing.assert_array_equal(ours, theirs.get_output_embeddings().weight.detach().numpy())
