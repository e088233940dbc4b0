"""Drafters in speculators' format against the same drafter in z-lab's."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_files import drafter_tensors, save_drafter
from safetensors.torch import save_file

from dflash_trt.checkpoint import open_drafter
from dflash_trt.config import LayerMask
from dflash_trt.errors import BadTensor, CheckpointError, DFlashError, UnsupportedArchitecture
from tiny.quantized import save_quantized

# What `speculators` 0.9 writes beside the numbers of a drafter; the decoder's part is what
# transformers writes of a Qwen3Config.
CONFIG: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "auto_map": {"": "config.DFlashSpeculatorConfig"},
    "aux_hidden_state_layer_ids": [1, 3],
    "block_size": 8,
    "draft_vocab_size": 96,
    "dtype": "bfloat16",
    "mask_token_id": 90,
    "sample_from_anchor": False,
    "sliding_window_non_causal": False,
    "speculators_config": {
        "algorithm": "dflash",
        "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 7}],
        "verifier": {"architectures": ["Qwen3ForCausalLM"], "name_or_path": "Qwen/Qwen3-8B"},
    },
    "speculators_model_type": "dflash",
    "speculators_version": "0.9.0",
    "target_hidden_size": None,
    "tie_word_embeddings": False,
    "transformer_layer_config": {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "head_dim": 16,
        "hidden_act": "silu",
        "hidden_size": 64,
        "intermediate_size": 128,
        "layer_types": ["full_attention", "full_attention"],
        "max_position_embeddings": 512,
        "max_window_layers": 2,
        "model_type": "qwen3",
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
        "sliding_window": None,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "vocab_size": 96,
    },
    "transformers_version": "5.5.4",
}
SLIDING = {
    "layer_types": ["sliding_attention", "full_attention"], "use_sliding_window": True,
    "sliding_window": 16,
}  # fmt: skip


def save(
    folder: Path, extra: dict[str, torch.Tensor] | None = None, *,
    decoder: dict[str, Any] | None = None, **changes: Any,
) -> Path:  # fmt: skip
    """A drafter folder; `...` removes a key."""
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads(json.dumps(CONFIG))
    for place, edits in ((config, changes), (config["transformer_layer_config"], decoder or {})):
        for key, value in edits.items():
            place[key] = value
            if value is ...:
                del place[key]
    (folder / "config.json").write_text(json.dumps(config))
    save_file(drafter_tensors() | (extra or {}), folder / "model.safetensors")
    return folder


def test_the_same_drafter_in_both_formats_is_the_same(tmp_path: Path) -> None:
    drafter = open_drafter(save(tmp_path / "s"))
    plain = open_drafter(save_drafter(tmp_path / "z"))
    assert drafter.config == dataclasses.replace(plain.config, num_target_layers=None)
    assert drafter.notes == ()
    assert drafter.source.names() == plain.source.names()


def test_what_is_read_of_a_drafter_with_a_draft_vocabulary_and_an_embedding(
    tmp_path: Path,
) -> None:
    ids = torch.arange(1, 96, 3)
    extra = {
        "embed_tokens.weight": torch.randn(96, 64),
        "lm_head.weight": torch.randn(len(ids), 64),
        "d2t": ids - torch.arange(len(ids)),
        "t2d": torch.zeros(96, dtype=torch.bool).index_fill(0, ids, True),
        "verifier_norm.weight": torch.ones(64),
    }
    drafter = open_drafter(save(tmp_path, extra, draft_vocab_size=len(ids)))
    assert drafter.draft_ids is not None
    assert drafter.draft_ids.tolist() == ids.tolist()
    assert drafter.config.own_embedding
    assert drafter.config.own_lm_head
    assert drafter.config.head_rows == len(ids)
    np.testing.assert_array_equal(drafter.source.read("lm_head.weight"), extra["lm_head.weight"])
    (note,) = drafter.notes
    assert "verifier_norm.weight is not used: it is for training" in note


def test_the_name_of_the_class_in_its_configs_of_old(tmp_path: Path) -> None:
    assert open_drafter(save(tmp_path, architectures=["DFlashSpeculator"])).config.block_size == 8


def test_layer_ids_count_what_enters_a_layer(tmp_path: Path) -> None:
    config = open_drafter(save(tmp_path, aux_hidden_state_layer_ids=[9, 2])).config
    assert config.target_layer_ids == (8, 1)


def test_sliding_layers_are_causal_unless_the_config_says_no(tmp_path: Path) -> None:
    config = open_drafter(save(tmp_path / "a", decoder=SLIDING)).config
    assert config.masks == (LayerMask(causal=True, window=16), LayerMask(causal=False))
    folder = save(tmp_path / "b", decoder=SLIDING, sliding_window_non_causal=True)
    masks = open_drafter(folder).config.masks
    assert masks == (LayerMask(causal=False, window=16), LayerMask(causal=False))


def test_a_quantized_drafter_in_this_format(tmp_path: Path) -> None:
    floats = save_quantized(save(tmp_path / "plain"), tmp_path / "q", "compressed-fp8-channel")
    drafter = open_drafter(tmp_path / "q")
    assert len(floats) == 2 * 7
    for name, wanted in floats.items():
        np.testing.assert_array_equal(drafter.source.read(name), wanted)


def test_null_takes_nothing_from_the_decoders_part(tmp_path: Path) -> None:
    nothing = {**dict.fromkeys(SLIDING), "hidden_size": None, "vocab_size": None}
    wanted = open_drafter(save(tmp_path / "a", decoder=SLIDING)).config
    assert open_drafter(save(tmp_path / "b", decoder=SLIDING, **nothing)).config == wanted
    assert wanted.masks[0].window == 16
    # A fork of vLLM's has these at top level.
    assert open_drafter(save(tmp_path / "c", **SLIDING)).config == wanted


def test_options_of_dflash_config_count_here_too(tmp_path: Path) -> None:
    nested = {"output_multiplier": 0.5}
    assert open_drafter(save(tmp_path / "a", dflash_config=nested)).config.output_multiplier == 0.5
    with pytest.raises(UnsupportedArchitecture, match="layer_routing_enabled is True"):
        open_drafter(save(tmp_path / "b", dflash_config={"layer_routing_enabled": True}))


def test_a_wider_target(tmp_path: Path) -> None:
    extra = {"fc.weight": torch.ones(64, 2 * 80)}
    assert open_drafter(save(tmp_path, extra, target_hidden_size=80)).config.hidden_size == 64


REFUSED: list[tuple[dict[str, Any], type[DFlashError], str]] = [
    ({"speculators_model_type": "dspark"}, UnsupportedArchitecture, "speculator of kind 'dspark'"),
    ({"speculators_model_type": "eagle3"}, UnsupportedArchitecture, "kind 'eagle3'"),
    ({"speculators_model_type": ...}, CheckpointError, "speculators_model_type is missing"),
    ({"architectures": ["DFlash2Speculator"]}, UnsupportedArchitecture, "DFlash2Speculator"),
    ({"transformer_layer_config": None}, CheckpointError, "transformer_layer_config is missing"),
    ({"transformer_layer_config": 3}, CheckpointError, "transformer_layer_config is 3"),
    ({"decoder": {"model_type": "gpt_oss"}}, CheckpointError,
     "transformer_layer_config.model_type is 'gpt_oss'"),
    ({"decoder": {"hidden_size": ...}}, CheckpointError, "hidden_size is missing"),
    ({"decoder": {"head_dim": ...}}, CheckpointError, "head_dim is missing"),
    ({"decoder": {"rope_parameters": ...}}, CheckpointError, "rope_theta is missing"),
    ({"decoder": {"hidden_act": "gelu"}}, UnsupportedArchitecture, "hidden_act 'gelu'"),
    ({"mask_token_id": None}, CheckpointError, "mask_token_id is missing"),
    ({"block_size": ...}, CheckpointError, "block_size is missing"),
    ({"aux_hidden_state_layer_ids": None}, CheckpointError,
     "aux_hidden_state_layer_ids is missing"),
    ({"aux_hidden_state_layer_ids": [0, 3]}, CheckpointError,
     r"aux_hidden_state_layer_ids is \[0, 3\]: 0 is the embedding"),
    ({"aux_hidden_state_layer_ids": [1, 2, 3]}, BadTensor, "fc.weight has shape"),
    ({"sample_from_anchor": True}, UnsupportedArchitecture, "sample_from_anchor is true"),
    ({"draft_vocab_size": 32}, CheckpointError, "draft_vocab_size is 32 .* no tensor d2t"),
    ({"quantization_config": {"quant_method": "gptq"}}, UnsupportedArchitecture,
     r"quantization_config \('gptq'\)"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "error", "message"), REFUSED)
def test_refusals_name_the_culprit(
    tmp_path: Path, changes: dict[str, Any], error: type[DFlashError], message: str
) -> None:
    with pytest.raises(error, match=message) as caught:
        open_drafter(save(tmp_path, **changes))
    assert str(tmp_path) in caught.value.message
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    "name",
    ["layers.0.attention_conv.base_kernel", "markov_head.markov_w1.weight", "extra.weight"],
)
def test_tensors_of_relatives_and_strangers_are_refused_here_too(tmp_path: Path, name: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        open_drafter(save(tmp_path, {name: torch.ones(4)}))
    assert name in caught.value.message
