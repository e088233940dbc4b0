"""The published SmolLM2 GGUF and this repository's own drafter, where they are installed."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize

from demo_pair import find_demo_target
from dflash_trt.checkpoint import open_drafter, open_target, read_pair

DRAFTER = Path(__file__).parents[3] / "demo-drafter"


@pytest.fixture(scope="module")
def smollm2() -> Path:
    return find_demo_target()


@pytest.fixture(scope="module")
def drafter() -> Path:
    return DRAFTER


def test_smollm2(smollm2: Path) -> None:
    target = open_target(smollm2)
    config = target.config
    assert (config.num_layers, config.hidden_size, config.vocab_size) == (30, 576, 49152)
    assert (config.attention.num_heads, config.attention.num_kv_heads) == (9, 3)
    assert (config.attention.head_dim, config.attention.rope.theta) == (64, 100000.0)
    assert config.tie_word_embeddings
    assert config.eos_token_ids == (2,)
    theirs = {tensor.name: tensor for tensor in gguf.GGUFReader(smollm2).tensors}
    for ours, name in (
        ("model.embed_tokens.weight", "token_embd.weight"),
        ("model.layers.7.mlp.down_proj.weight", "blk.7.ffn_down.weight"),
        ("model.layers.29.self_attn.v_proj.weight", "blk.29.attn_v.weight"),
        ("model.norm.weight", "output_norm.weight"),
    ):
        tensor = theirs[name]
        expected = dequantize(tensor.data, tensor.tensor_type)
        np.testing.assert_array_equal(target.source.read(ours), expected)


def test_demo_pair(smollm2: Path, drafter: Path) -> None:
    pair = read_pair(smollm2, drafter)
    assert pair.warnings == ()
    weights = pair.weights()
    blocks = weights.q4_blocks("target.layers.0.self_attn.q_proj.weight")
    assert blocks is not None
    assert blocks.codes.shape == (576, 18, 16)
    assert weights.q4_blocks("target.embed_tokens.weight") is None
    assert weights.canonical("drafter.lm_head.weight") == "target.embed_tokens.weight"


def test_demo_drafter(drafter: Path) -> None:
    read = open_drafter(drafter)
    assert read.config.block_size == 8
    assert read.config.num_target_layers == 30
    features = len(read.config.target_layer_ids) * read.config.target_hidden_size
    assert read.source.read("fc.weight").shape == (read.config.hidden_size, features)
