"""The target inside the step graph against transformers in float32, over many model shapes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tiny import PairMaker, ProbeMaker, close, target_states

TEXT = torch.randint(0, 150, (14,), generator=torch.Generator().manual_seed(9)).tolist()
THETA = {"rope_theta": 10000.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, **THETA}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16, **THETA,
}  # fmt: skip
SLIDING = {
    "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 4,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
}  # fmt: skip

SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", {}),
    "qwen3-one-head-per-kv-head": ("qwen3", {"num_key_value_heads": 4}),
    "qwen3-six-heads-on-one": ("qwen3", {"num_attention_heads": 6, "num_key_value_heads": 1}),
    "qwen3-nine-heads-on-three": ("qwen3", {"num_attention_heads": 9, "num_key_value_heads": 3}),
    "qwen3-head-dim-24": ("qwen3", {"head_dim": 24}),
    "qwen3-head-dim-80": ("qwen3", {"head_dim": 80, "num_attention_heads": 2}),
    "qwen3-tied": ("qwen3", {"tie_word_embeddings": True}),
    "qwen3-attention-bias": ("qwen3", {"attention_bias": True}),
    "qwen3-sliding": ("qwen3", SLIDING),
    "qwen3-every-layer-sliding": (
        "qwen3", SLIDING | {"layer_types": ["sliding_attention"] * 4, "sliding_window": 3},
    ),
    "qwen3-windows-from-layer-2": (
        "qwen3", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2},
    ),
    "qwen3-yarn": ("qwen3", {"rope_parameters": YARN}),
    "qwen3-yarn-own-factor": (
        "qwen3", {"rope_parameters": YARN | {"attention_factor": 1.5, "beta_fast": 16.0}},
    ),
    "llama": ("llama", {}),
    "llama-head-dim-of-its-own": ("llama", {"head_dim": 10}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-linear-rope": (
        "llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, **THETA}},
    ),
    "llama-llama3-rope": ("llama", {"rope_parameters": LLAMA3}),
    "llama-large-epsilon": ("llama", {"rms_norm_eps": 0.1}),
    "llama-other-theta": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 7.}}),
}  # fmt: skip
BLOCK = 16  # not below the text's length, so a step reads the logits of every token


def make(make_pair: PairMaker, shape: str, **drafter: Any) -> Any:
    family, options = SHAPES[shape]
    return make_pair(family, target=options, block=BLOCK, **drafter)


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_and_every_layer_equal_transformers_in_chunks_of_any_size(
    shape: str, make_pair: PairMaker, make_probe: ProbeMaker
) -> None:
    pair = make(make_pair, shape, layer_ids=range(4))
    logits, states = target_states(pair.target, TEXT)
    probe = make_probe(pair, capacity=64)
    for chunks in ([14], [3, 3, 3, 3, 2], [1] * 14):
        steps = probe.read_text(TEXT, chunks)
        close(np.concatenate([s["target_logits"][0] for s in steps]), logits)
        features = np.concatenate([s["features"][0] for s in steps])
        for layer, wanted in enumerate(states[1:]):
            close(features[:, layer * 48 : (layer + 1) * 48], wanted)


@pytest.mark.parametrize("shape", ["qwen3", "qwen3-sliding", "llama-biases"])
def test_rows_of_a_batch_at_different_lengths_equal_their_own_text(
    shape: str, make_pair: PairMaker, make_probe: ProbeMaker
) -> None:
    pair = make(make_pair, shape, layer_ids=range(4))
    texts = [TEXT[:11], TEXT[3:7], [*TEXT[::-1], *TEXT[:3]]]
    probe = make_probe(pair, slots=3, capacity=64)
    read = [0, 0, 0]
    for sizes in ([4, 1, 7], [1, 3, 0], [0, 0, 6], [6, 0, 4]):
        rows = [t[at : at + n] for t, at, n in zip(texts, read, sizes, strict=True)]
        made = probe.step(rows, read, known=[min(n, 1) for n in sizes])
        for row, (text, at, n) in enumerate(zip(texts, read, sizes, strict=True)):
            if n:
                logits, _ = target_states(pair.target, text[: at + n])
                close(made["target_logits"][row, :n], logits[at:])
        read = [at + n for at, n in zip(read, sizes, strict=True)]
    assert read == [11, 4, 17]


def test_the_bonus_of_a_prompt_chunk_comes_from_its_last_token(
    make_pair: PairMaker, make_probe: ProbeMaker
) -> None:
    pair = make_pair(block=4)
    logits, _ = target_states(pair.target, TEXT)
    probe = make_probe(pair)
    made = probe.step([TEXT], [0], known=[len(TEXT)])
    assert made["committed"].tolist() == [len(TEXT)]
    assert made["next_tokens"][0, 0] == logits[-1].argmax()


@pytest.mark.parametrize("shape", ["qwen3-sliding", "qwen3-yarn", "llama-llama3-rope"])
def test_long_texts_still_agree_far_behind_the_window_and_the_trained_length(
    shape: str, make_pair: PairMaker, make_probe: ProbeMaker
) -> None:
    pair = make(make_pair, shape, layer_ids=range(4))
    text = (TEXT * 14)[:190]
    logits, _ = target_states(pair.target, text)
    probe = make_probe(pair, capacity=240)
    steps = probe.read_text(text, [100, 75, 15])
    close(steps[-1]["target_logits"][0], logits[-15:])
