"""DFlash v1 drafters: every config key, every relative that must be refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_files import drafter_tensors, save_drafter

from dflash_trt.checkpoint import open_drafter, read_drafter_config, unused_keys
from dflash_trt.config import LayerMask
from dflash_trt.errors import (
    BadTensor,
    CheckpointError,
    MissingTensor,
    UnsupportedArchitecture,
)

FULL, SLIDING = "full_attention", "sliding_attention"


def test_facts(tmp_path: Path) -> None:
    drafter = open_drafter(save_drafter(tmp_path))
    config = drafter.config
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (96, 64, 128)
    assert (config.num_layers, config.rms_norm_eps) == (2, 1e-6)
    assert config.max_position_embeddings == 512
    assert (config.block_size, config.mask_token_id) == (8, 90)
    assert (config.target_layer_ids, config.num_target_layers) == ((0, 2), 3)
    assert config.target_hidden_size == 64
    assert not config.own_embedding
    assert not config.own_lm_head
    assert (config.input_embedding_scale, config.output_multiplier) == (1.0, 1.0)
    assert config.final_logit_softcapping is None
    attention = config.attention
    assert (attention.num_heads, attention.num_kv_heads, attention.head_dim) == (4, 2, 16)
    assert attention.qk_norm
    assert not attention.qkv_bias
    assert not attention.o_bias
    assert attention.rope.theta == 1e6
    assert config.masks == (LayerMask(causal=False),) * 2
    assert drafter.notes == ()
    assert drafter.source.read("fc.weight").shape == (64, 128)


def test_layer_ids_keep_the_order_of_the_columns(tmp_path: Path) -> None:
    folder = save_drafter(tmp_path, dflash_config={"target_layer_ids": [2, 0]})
    assert read_drafter_config(folder).target_layer_ids == (2, 0)


def test_lookup_order_nested_then_top(tmp_path: Path) -> None:
    folder = save_drafter(
        tmp_path / "a", block_size=..., dflash_config={"block_size": 4, "mask_token_id": ...},
        mask_token_id=7, output_multiplier=0.5,
    )  # fmt: skip
    config = open_drafter(folder).config
    assert (config.block_size, config.mask_token_id, config.output_multiplier) == (4, 7, 0.5)
    folder = save_drafter(tmp_path / "b", block_size=8, dflash_config={"block_size": 4})
    with pytest.warns(UserWarning, match="block_size is 8 at top level and 4 in dflash_config"):
        assert read_drafter_config(folder).block_size == 4


def test_logit_and_embedding_options(tmp_path: Path) -> None:
    options = {"input_embedding_scale": 8, "output_multiplier": 0.25, "final_logit_softcapping": 30}
    config = open_drafter(save_drafter(tmp_path / "a", dflash_config=options)).config
    assert config.input_embedding_scale == 8.0
    assert config.output_multiplier == 0.25
    assert config.final_logit_softcapping == 30.0
    for value in (0, -1.0, None):  # the reference caps only above zero
        folder = save_drafter(tmp_path / "b", dflash_config={"final_logit_softcapping": value})
        assert open_drafter(folder).config.final_logit_softcapping is None


def test_biases_include_o_proj(tmp_path: Path) -> None:
    folder = save_drafter(tmp_path, drafter_tensors(bias=True), attention_bias=True)
    attention = open_drafter(folder).config.attention
    assert attention.qkv_bias
    assert attention.o_bias


def test_yarn_and_new_rope_spelling(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "rope_theta": 5e6, "factor": 4.0, "truncate": False,
            "original_max_position_embeddings": 128}  # fmt: skip
    folder = save_drafter(tmp_path, rope_theta=..., rope_scaling=..., rope_parameters=yarn)
    rope = open_drafter(folder).config.attention.rope
    assert (rope.theta, rope.kind) == (5e6, "yarn")
    assert rope.params == {"factor": 4.0, "original_max_position_embeddings": 128,
                           "truncate": False}  # fmt: skip


C, N = True, False
SWA = {"layer_types": [SLIDING, FULL], "sliding_window": 16, "use_sliding_window": True}
MODELOPT = {"layer_types": [FULL, FULL], "sliding_window": 16, "use_sliding_window": ...,
            "max_window_layers": ...}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "nested", "masks"),
    [
        ({}, {}, [(N, None), (N, None)]),
        ({"layer_types": [FULL, FULL]}, {}, [(N, None), (N, None)]),
        (SWA, {}, [(C, 16), (N, None)]),
        (SWA | {"is_causal": False}, {}, [(N, 16), (N, None)]),
        (SWA | {"is_causal": True}, {}, [(C, 16), (C, None)]),
        (SWA | {"is_causal": None}, {}, [(C, 16), (N, None)]),
        (SWA, {"causal": False}, [(N, 16), (N, None)]),
        # The class takes the window away, yet the layer's type still makes it causal.
        (SWA | {"use_sliding_window": False}, {}, [(C, None), (N, None)]),
        # No layer_types: the class derives them from max_window_layers if windows are in use.
        ({"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 1}, {},
         [(N, None), (C, 16)]),
        ({"sliding_window": 16, "use_sliding_window": False, "max_window_layers": 1}, {},
         [(N, None), (N, None)]),
        ({"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0}, {},
         [(N, None), (N, None)]),
        ({}, {"use_swa": True, "swa_window_size": 32}, [(N, 32), (N, 32)]),
        ({}, {"use_swa": True, "swa_window_size": 32, "causal": True}, [(C, 32), (C, 32)]),
        ({}, {"use_swa": False, "swa_window_size": 32}, [(N, None), (N, None)]),
        ({}, {"use_swa": False, "swa_window_size": 0}, [(N, None), (N, None)]),
        # With any sliding layer, vLLM decides layer by layer: use_swa then adds nothing.
        (SWA, {"use_swa": True, "swa_window_size": 16}, [(C, 16), (N, None)]),
        (SWA, {"use_swa": True, "swa_window_size": 16, "causal": False}, [(N, 16), (N, None)]),
        (SWA | {"layer_types": [SLIDING, SLIDING]}, {"use_swa": True, "swa_window_size": 16},
         [(C, 16), (C, 16)]),
        # ModelOpt writes sliding_window and the three nested keys, never use_sliding_window.
        (MODELOPT, {"use_swa": True, "swa_window_size": 16, "causal": False}, [(N, 16), (N, 16)]),
        (MODELOPT | {"layer_types": [SLIDING, FULL]},
         {"use_swa": True, "swa_window_size": 16, "causal": False}, [(N, 16), (N, None)]),
        (MODELOPT | {"layer_types": [FULL, SLIDING], "sliding_window": None},
         {"swa_window_size": 16}, [(N, None), (C, 16)]),
        (SWA | {"use_sliding_window": False, "sliding_window": 24}, {"swa_window_size": 16},
         [(C, 16), (N, None)]),
        (SWA, {"is_causal": False}, [(N, 16), (N, None)]),
    ],
)  # fmt: skip
def test_masks(tmp_path: Path, changes: Any, nested: Any, masks: list[tuple[bool, Any]]) -> None:
    config = open_drafter(save_drafter(tmp_path, dflash_config=nested, **changes)).config
    assert config.masks == tuple(LayerMask(causal, window) for causal, window in masks)


def test_prefix_and_rotary_buffers(tmp_path: Path) -> None:
    tensors = {f"model.{name}": tensor for name, tensor in drafter_tensors().items()}
    tensors["model.rotary_emb.inv_freq"] = torch.ones(8)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    source = open_drafter(save_drafter(tmp_path / "a", tensors)).source
    assert set(source.names()) == set(drafter_tensors())
    assert source.read("norm.weight").shape == (64,)
    assert source.info("norm.weight").name == "norm.weight"
    with pytest.raises(MissingTensor, match=r"model\.norm\.weight is missing"):
        source.read("model.norm.weight")
    both = drafter_tensors() | {"model.norm.weight": torch.ones(64)}
    with pytest.raises(BadTensor, match=r"both norm\.weight and model\.norm\.weight"):
        open_drafter(save_drafter(tmp_path / "b", both))


def test_own_embedding_and_head(tmp_path: Path) -> None:
    own = {"embed_tokens.weight": torch.ones(96, 64), "lm_head.weight": torch.ones(96, 64)}
    config = open_drafter(save_drafter(tmp_path / "a", drafter_tensors() | own)).config
    assert config.own_embedding
    assert config.own_lm_head
    small = drafter_tensors() | {"lm_head.weight": torch.ones(32, 64)}
    with pytest.raises(BadTensor, match=r"lm_head\.weight has shape \[32, 64\]"):
        open_drafter(save_drafter(tmp_path / "b", small))


def test_wider_target_hidden_size(tmp_path: Path) -> None:
    tensors = drafter_tensors() | {"fc.weight": torch.ones(64, 2 * 80)}
    folder = save_drafter(tmp_path, tensors, target_hidden_size=80)
    assert open_drafter(folder).config.target_hidden_size == 80


def test_unused_keys_are_reported(tmp_path: Path) -> None:
    nested = {
        "confidence": 0.5,
        "mask_token": "<|MASK|>",
        "causal": False,
        "loss_type": "ce",
        "layer_routing_enabled": False,
        "concat_mode": None,
        "attention_mode": "gqa",
    }
    folder = save_drafter(tmp_path, dflash_config=nested)
    notes = open_drafter(folder).notes
    unused = ("confidence", "loss_type", "layer_routing_enabled", "concat_mode")
    assert [note.partition("dflash_config.")[2] for note in notes] == [
        f"{key} is not used" for key in unused
    ]
    assert unused_keys({"dflash_config": {"x": 1, "block_size": 2}}) == ("x",)
    assert unused_keys({}) == unused_keys({"dflash_config": 3}) == ()


def test_more_rows_than_the_vocabulary_has_are_no_reduced_vocabulary(tmp_path: Path) -> None:
    (note,) = open_drafter(save_drafter(tmp_path / "a", draft_vocab_size=128)).notes
    assert "draft_vocab_size is 128 and vocab_size 96: the former is not used" in note
    own = drafter_tensors() | {"lm_head.weight": torch.ones(128, 64)}
    with pytest.raises(BadTensor, match=r"lm_head\.weight has shape \[128, 64\]"):
        open_drafter(save_drafter(tmp_path / "b", own, draft_vocab_size=128))


U = UnsupportedArchitecture
ROPE = {"rope_type": "default", "rope_theta": 1e6}
REFUSED: list[tuple[dict[str, Any], dict[str, Any], type[Exception], str]] = [
    ({}, {"target_layer_ids": ...}, CheckpointError, "target_layer_ids is missing"),
    ({}, {"mask_token_id": ...}, CheckpointError, "mask_token_id is missing"),
    ({"block_size": ...}, {}, CheckpointError, "block_size is missing"),
    ({"block_size": 1}, {}, CheckpointError, "block_size is 1"),
    ({}, {"target_layer_ids": []}, CheckpointError, r"dflash_config.target_layer_ids is \[\]"),
    ({}, {"target_layer_ids": [0, 0]}, CheckpointError, "has an id twice"),
    ({}, {"target_layer_ids": [0, -1]}, CheckpointError, r"target_layer_ids is \[0, -1\]"),
    ({}, {"target_layer_ids": [0, 1, 2]}, BadTensor,
     r"fc.weight has shape \[64, 128\], but the config makes it \[64, 192\]"),
    ({"target_hidden_size": 80}, {}, BadTensor, "fc.weight"),
    ({"dflash_config": ...}, {}, CheckpointError, "mask_token_id|target_layer_ids"),
    ({"head_dim": ...}, {}, CheckpointError, "head_dim is missing"),
    ({"head_dim": 32}, {}, BadTensor, "q_proj.weight|q_norm.weight"),
    ({"num_attention_heads": 8}, {}, BadTensor, "q_proj.weight"),
    ({"num_key_value_heads": 4}, {}, BadTensor, "k_proj.weight"),
    ({"intermediate_size": 64}, {}, BadTensor, "gate_proj.weight"),
    ({"num_hidden_layers": 3}, {}, MissingTensor, "layers.2.input_layernorm.weight is missing"),
    ({"num_hidden_layers": 1}, {}, BadTensor, "layers.1.* is not part of"),
    ({"attention_bias": True}, {}, MissingTensor, "q_proj.bias is missing"),
    ({"rms_norm_eps": ...}, {}, CheckpointError, "rms_norm_eps is missing"),
    ({"rope_theta": ...}, {}, CheckpointError, "rope_theta is missing"),
    ({"hidden_act": "relu"}, {}, U, "hidden_act 'relu'"),
    ({"open_spec_config_version": "0.0.0"}, {}, U, "Open Spec Config"),
    ({"jetspec_config": {"a": 1}}, {}, U, "JetSpec"),
    ({"architectures": ["DFlash2DraftModel"]}, {}, U, "no tensor of DFlash 2's"),
    ({"architectures": ["Qwen3DFlash2Model"]}, {}, U, "DFlash 2 under another name"),
    ({"architectures": ["Qwen3DSparkModel"]}, {}, U, "DSpark"),
    ({"architectures": ["DFlashSpeculator"]}, {}, U, "speculators"),
    ({"architectures": ["Qwen3ForCausalLM"]}, {}, U, "Qwen3ForCausalLM"),
    ({"architectures": ...}, {}, U, r"architectures is \[\]"),
    ({}, {"projector_type": "domino"}, U, "projector_type is 'domino'"),
    ({"projector_type": "dspark"}, {}, U, "projector_type is 'dspark'"),
    ({}, {"selector_rank": 256}, U, "selector_rank"),
    ({"markov_rank": 256}, {}, U, "markov_rank"),
    ({}, {"attention_sink_bias": True}, U, "attention_sink_bias is True"),
    ({}, {"attention_value_scale": 0.7}, U, "attention_value_scale is 0.7"),
    ({"logit_scale": 2}, {}, U, "logit_scale is 2"),
    ({"is_neox_style": False}, {}, U, "is_neox_style is false"),
    ({"rope_is_neox_style": False}, {}, U, "rope_is_neox_style is false"),
    ({}, {"use_aux_hidden_state": False}, U, "use_aux_hidden_state is false"),
    ({}, {"sample_from_anchor": True}, U, "sample_from_anchor is true"),
    ({"draft_vocab_size": 32}, {}, CheckpointError, "draft_vocab_size is 32 .* no tensor d2t"),
    ({}, {"attention_logit_softcapping": 50.0}, U,
     "dflash_config.attention_logit_softcapping is 50.0: what it does .* is unknown"),
    ({}, {"layer_routing_enabled": True}, U, "layer_routing_enabled is True"),
    ({}, {"conv_width": 4}, U, "conv_width is 4"),
    ({}, {"attention_mode": "mla"}, U, "dflash_config.attention_mode is 'mla'"),
    ({"quantization": {"bits": 4}}, {}, U, r"quantization \(\{'bits': 4\}\)"),
    (MODELOPT | {"layer_types": [SLIDING, FULL]}, {"use_swa": True}, CheckpointError,
     "use_sliding_window is missing"),
    ({"partial_rotary_factor": 0.25}, {}, U, "partial_rotary_factor 0.25"),
    ({"mrope_section": [1, 2]}, {}, U, "mrope_section"),
    ({"rope_parameters": ROPE | {"mrope_section": [1]}}, {}, U, "mrope_section"),
    ({"rope_scaling": {"type": "dynamic", "factor": 2}}, {}, U, "'dynamic'"),
    ({"quantization_config": {"quant_method": "gptq"}}, {}, U, "gptq"),
    (SWA | {"sliding_window": 7}, {}, CheckpointError, "window 7 is smaller than block_size 8"),
    (SWA | {"sliding_window": None}, {}, CheckpointError, "sliding_window is missing"),
    (SWA | {"use_sliding_window": ...}, {}, CheckpointError, "use_sliding_window is missing"),
    (SWA | {"layer_types": [SLIDING]}, {}, CheckpointError, "layer_types has 1 entries"),
    (SWA | {"layer_types": [SLIDING, "chunked_attention"]}, {}, U, "chunked_attention"),
    ({}, {"use_swa": True}, CheckpointError, "dflash_config.swa_window_size is missing"),
    ({}, {"use_swa": True, "swa_window_size": 4}, CheckpointError, "window 4 is smaller"),
    (SWA, {"use_swa": True, "swa_window_size": 32}, CheckpointError,
     "swa_window_size is 32, but sliding_window is 16"),
    ({"is_causal": True}, {"causal": False}, CheckpointError, "contradict each other"),
    ({}, {"causal": True, "is_causal": False}, CheckpointError, "contradict each other"),
    ({"is_causal": "yes"}, {}, CheckpointError, "is_causal is 'yes'"),
    ({}, {"output_multiplier": 0}, CheckpointError, "dflash_config.output_multiplier is 0"),
    ({}, {"input_embedding_scale": "8"}, CheckpointError, "input_embedding_scale is '8'"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "nested", "error", "message"), REFUSED)
def test_refusals_name_the_culprit(
    tmp_path: Path, changes: Any, nested: Any, error: type[Exception], message: str
) -> None:
    if changes.get("dflash_config") is ...:
        empty = {"mask_token_id": ..., "target_layer_ids": ...}
        folder = save_drafter(tmp_path, dflash_config=empty)
    else:
        folder = save_drafter(tmp_path, dflash_config=nested, **changes)
    with pytest.raises(error, match=message) as caught:
        open_drafter(folder)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("candidate_selector.predecessor_codebook", "DFlash 2"),
        ("layers.0.mlp_conv.base_kernel", "DFlash 2"),
        ("markov_head.markov_w1.weight", "DSpark"),
        ("confidence_head.proj.weight", "DSpark"),
        ("prefix_gru.weight_ih_l0", "Domino"),
        ("causal_head.weight", "JetSpec"),
        ("layers.0.self_attn.attention_sink_bias", "attention sinks"),
    ],
)
def test_tensors_of_relatives(tmp_path: Path, name: str, what: str) -> None:
    folder = save_drafter(tmp_path, drafter_tensors() | {name: torch.ones(4)})
    with pytest.raises(UnsupportedArchitecture, match=what) as caught:
        open_drafter(folder)
    assert name.removeprefix("model.") in caught.value.message


@pytest.mark.parametrize("name", ["layers.0.self_attn.gate.weight", "extra.weight", "fc.bias"])
def test_unknown_tensor_is_refused(tmp_path: Path, name: str) -> None:
    folder = save_drafter(tmp_path, drafter_tensors() | {name: torch.ones(4)})
    with pytest.raises(BadTensor, match="is not part of this architecture") as caught:
        open_drafter(folder)
    assert name in caught.value.message


def test_bias_that_the_config_denies(tmp_path: Path) -> None:
    folder = save_drafter(tmp_path, drafter_tensors(bias=True))
    with pytest.raises(BadTensor, match=r"q_proj\.bias.*attention_bias off|_proj\.bias"):
        open_drafter(folder)


def test_folder_contents(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json: no such file"):
        open_drafter(tmp_path)
    (tmp_path / "d.gguf").write_bytes(b"GGUF")
    with pytest.raises(UnsupportedArchitecture, match="GGUF drafters are not supported"):
        open_drafter(tmp_path / "d.gguf")
    folder = save_drafter(tmp_path / "side")
    (folder / "mask_embedding.pt").write_bytes(b"pickle")
    with pytest.raises(UnsupportedArchitecture, match=r"mask_embedding\.pt"):
        open_drafter(folder)
    folder = save_drafter(tmp_path / "bare")
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"no \.safetensors file"):
        open_drafter(folder)
