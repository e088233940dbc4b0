"""Hugging Face targets: facts and tensors of models that transformers saved, and the refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_files import edit_json, save_hf
from safetensors.torch import load_file, save_file

from dflash_trt.checkpoint import check_tensors, open_target
from dflash_trt.config import LayerMask
from dflash_trt.errors import (
    BadTensor,
    CheckpointError,
    MissingTensor,
    UnsupportedArchitecture,
)

YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "beta_fast": 16.0,
        "original_max_position_embeddings": 128}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0, "original_max_position_embeddings": 64}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("qwen3", {}),
        ("qwen3", {"tie_word_embeddings": True}),
        ("qwen3", {"attention_bias": True}),
        ("qwen3", {"head_dim": 32, "num_key_value_heads": 1, "num_hidden_layers": 1}),
        ("qwen3", {"rope_parameters": YARN}),
        ("qwen3", {"shard": "60KB"}),
        ("llama", {}),
        ("llama", {"head_dim": None}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama", {"tie_word_embeddings": True, "shard": "60KB"}),
        ("llama", {"rope_parameters": LLAMA3, "num_key_value_heads": 4}),
        ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
    ],
)
def test_saved_model_is_read_back(tmp_path: Path, family: str, options: dict[str, Any]) -> None:
    model = save_hf(tmp_path / "m", family, **options)
    target = open_target(tmp_path / "m")
    config, theirs = target.config, model.config
    assert config.family == family
    assert config.vocab_size == theirs.vocab_size
    assert config.hidden_size == theirs.hidden_size
    assert config.intermediate_size == theirs.intermediate_size
    assert config.num_layers == theirs.num_hidden_layers
    assert config.rms_norm_eps == theirs.rms_norm_eps
    assert config.max_position_embeddings == theirs.max_position_embeddings
    assert config.tie_word_embeddings == theirs.tie_word_embeddings
    assert config.mlp_bias == getattr(theirs, "mlp_bias", False)
    attention = config.attention
    assert attention.num_heads == theirs.num_attention_heads
    assert attention.num_kv_heads == theirs.num_key_value_heads
    assert attention.head_dim == theirs.head_dim
    assert attention.qk_norm == (family == "qwen3")
    assert attention.qkv_bias == attention.o_bias == theirs.attention_bias
    assert attention.rope.theta == theirs.rope_parameters["rope_theta"]
    assert attention.rope.kind == theirs.rope_parameters["rope_type"]
    for key, value in attention.rope.params.items():
        assert value == theirs.rope_parameters[key]
    assert config.masks == (LayerMask(causal=True),) * config.num_layers
    state = model.state_dict()
    if config.tie_word_embeddings:
        state.pop("lm_head.weight")
    assert set(target.source.names()) == set(state)
    for name, tensor in state.items():
        np.testing.assert_array_equal(target.source.read(name), tensor.numpy(), err_msg=name)


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1,
          "layer_types": ...}, [None, 8, 8]),
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 9,
          "layer_types": ...}, [None, None, None]),
        ({"use_sliding_window": False, "sliding_window": 8, "max_window_layers": 0,
          "layer_types": ...}, [None, None, None]),
        ({"use_sliding_window": True, "sliding_window": 8,
          "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
         [8, None, 8]),
        ({"use_sliding_window": True, "sliding_window": None, "layer_types": ...},
         [None, None, None]),
    ],
)  # fmt: skip
def test_qwen3_windows_as_transformers_reads_them(
    tmp_path: Path, changes: dict[str, Any], windows: list[int | None]
) -> None:
    import transformers

    save_hf(tmp_path, "qwen3")
    edit_json(tmp_path / "config.json", **changes)
    masks = open_target(tmp_path).config.masks
    assert [mask.window for mask in masks] == windows
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    assert [kind == "sliding_attention" for kind in theirs.layer_types] == [
        window is not None for window in windows
    ]


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        (7, None, (7,)),
        ([7, 8], None, (7, 8)),
        (7, 9, (9, 7)),
        (7, [9, 7, 3], (9, 7, 3)),
        (None, [9], (9,)),
        (0, ..., (0,)),
    ],
)
def test_stop_ids_are_the_union(
    tmp_path: Path, config: Any, generation: Any, expected: tuple[int, ...]
) -> None:
    save_hf(tmp_path, "llama")
    edit_json(tmp_path / "config.json", eos_token_id=config)
    path = tmp_path / "generation_config.json"
    path.unlink(missing_ok=True)
    if generation is not ...:
        path.write_text(json.dumps({"eos_token_id": generation}))
    assert open_target(tmp_path).config.eos_token_ids == expected


def test_no_stop_id_is_noted(tmp_path: Path) -> None:
    save_hf(tmp_path, "qwen3")
    edit_json(tmp_path / "config.json", eos_token_id=...)
    (tmp_path / "generation_config.json").unlink()
    target = open_target(tmp_path)
    assert target.config.eos_token_ids == ()
    assert "eos_token_id" in target.notes[0]


@pytest.mark.parametrize("value", [-1, 2**32 - 1])
def test_a_number_that_stands_for_no_token_is_noted(tmp_path: Path, value: int) -> None:
    save_hf(tmp_path, "qwen3")
    (tmp_path / "generation_config.json").unlink()
    edit_json(tmp_path / "config.json", bos_token_id=value, eos_token_id=value)
    target = open_target(tmp_path)
    assert (target.config.bos_token_id, target.config.eos_token_ids) == (None, ())
    assert any(f"bos_token_id is {value}, which is read as none" in note for note in target.notes)


def test_code_of_the_checkpoints_own_is_noted(tmp_path: Path) -> None:
    save_hf(tmp_path, "llama")
    code = {"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    edit_json(tmp_path / "config.json", auto_map=code)
    (note,) = open_target(tmp_path).notes
    assert "modeling_own.OwnForCausalLM" in note
    assert "never run" in note


ROPE = {"rope_type": "default", "rope_theta": 1e6}
MISSING = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim",
           "num_attention_heads", "num_key_value_heads", "rms_norm_eps",
           "max_position_embeddings")  # fmt: skip
REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    *(({key: ...}, CheckpointError, f"config.json: {key} is missing") for key in MISSING),
    ({"rope_parameters": ...}, CheckpointError, "rope_theta is missing"),
    ({"hidden_size": "64"}, CheckpointError, "hidden_size is '64', expected a whole number"),
    ({"hidden_size": True}, CheckpointError, "hidden_size is True"),
    ({"hidden_size": 0}, CheckpointError, "hidden_size is 0"),
    ({"num_hidden_layers": 10**9}, CheckpointError, "num_hidden_layers is 1000000000"),
    ({"rms_norm_eps": -1.0}, CheckpointError, "rms_norm_eps is -1.0"),
    ({"rms_norm_eps": 10**400}, CheckpointError, "rms_norm_eps is 1000"),
    ({"tie_word_embeddings": "no"}, CheckpointError, "tie_word_embeddings is 'no'"),
    ({"hidden_act": "gelu"}, UnsupportedArchitecture, "hidden_act 'gelu'"),
    ({"architectures": ["MistralForCausalLM"]}, UnsupportedArchitecture, "MistralForCausalLM"),
    ({"architectures": ["Qwen3MoeForCausalLM"]}, UnsupportedArchitecture, "Qwen3MoeForCausalLM"),
    ({"architectures": ...}, UnsupportedArchitecture, r"architectures is \[\]"),
    ({"architectures": ["DFlashDraftModel"]}, UnsupportedArchitecture, "DFlashDraftModel"),
    ({"architectures": "Qwen3ForCausalLM"}, CheckpointError, "architectures is 'Qwen3For"),
    ({"quantization_config": {"quant_method": "gptq"}}, UnsupportedArchitecture,
     r"quantization_config \('gptq'\) is not supported"),
    ({"quantization_config": {"quant_method": "fp8"}}, CheckpointError,
     "quantization_config says FP8 .* but no weight is stored so"),
    ({"quantization": {"group_size": 64, "bits": 4}}, UnsupportedArchitecture,
     r"quantization \(\{'group_size': 64, 'bits': 4\}\) is not supported"),
    ({"compression_config": {"quant_method": "sparseml"}}, UnsupportedArchitecture,
     r"compression_config \('sparseml'\)"),
    ({"num_key_value_heads": 3}, CheckpointError, "num_attention_heads 4 is not a multiple"),
    ({"head_dim": 15}, CheckpointError, "head_dim 15 is odd"),
    ({"bos_token_id": 96}, CheckpointError, "bos_token_id is 96"),
    ({"eos_token_id": [3, 96]}, CheckpointError, r"eos_token_id is \[3, 96\]"),
    ({"partial_rotary_factor": 0.25}, UnsupportedArchitecture, "partial_rotary_factor 0.25"),
    ({"rope_parameters": ROPE | {"partial_rotary_factor": 0.5}}, UnsupportedArchitecture,
     "partial_rotary_factor 0.5"),
    ({"rope_parameters": ROPE | {"rope_type": "dynamic"}}, UnsupportedArchitecture, "'dynamic'"),
    ({"rope_parameters": ROPE | {"rope_type": "longrope"}}, UnsupportedArchitecture, "'longrope'"),
    ({"rope_parameters": ROPE | {"mrope_section": [1]}}, UnsupportedArchitecture, "mrope_section"),
    ({"rope_parameters": {"full_attention": ROPE}}, UnsupportedArchitecture, "per layer type"),
    ({"rope_parameters": ROPE | {"type": "yarn"}}, CheckpointError, "default and yarn"),
    ({"rope_parameters": {"rope_theta": 1e6, "factor": 2.0}}, CheckpointError,
     "rope_type is missing"),
    ({"rope_parameters": YARN | {"factor": None}}, CheckpointError, "factor is missing"),
    ({"rope_parameters": {**YARN, "original_max_position_embeddings": None}}, CheckpointError,
     "original_max_position_embeddings is missing"),
    ({"rope_parameters": YARN, "original_max_position_embeddings": 64}, CheckpointError,
     "original_max_position_embeddings is 64 at top level and 128"),
    ({"rope_parameters": LLAMA3 | {"low_freq_factor": 4.0}}, CheckpointError, "high_freq_factor"),
    ({"rope_parameters": YARN, "rope_scaling": {"type": "linear", "factor": 4.0}}, CheckpointError,
     "rope_parameters and rope_scaling disagree on rope_type"),
    ({"rope_parameters": ROPE | {"rope_theta": 0}}, CheckpointError, "rope_theta is 0"),
    ({"rope_parameters": 4}, CheckpointError, "rope_parameters is 4"),
    ({"layer_types": ["full_attention"]}, CheckpointError, "layer_types has 1 entries for 3"),
    ({"layer_types": ["linear_attention"] * 3}, UnsupportedArchitecture, "linear_attention"),
    ({"layer_types": ["sliding_attention"] * 3}, CheckpointError, "use_sliding_window is false"),
    ({"layer_types": ["sliding_attention"] * 3, "use_sliding_window": ...}, CheckpointError,
     "use_sliding_window is missing"),
    ({"layer_types": ..., "use_sliding_window": True, "sliding_window": ...}, CheckpointError,
     "sliding_window is missing"),
    ({"vocab_size": 97}, BadTensor,
     r"embed_tokens.weight has shape \[96, 64\], but the config makes it \[97, 64\]"),
    ({"intermediate_size": 64}, BadTensor, "gate_proj.weight has shape"),
    ({"num_hidden_layers": 4, "layer_types": ...}, MissingTensor,
     "model.layers.3.input_layernorm.weight is missing"),
    ({"num_hidden_layers": 2, "layer_types": ...}, BadTensor, "model.layers.2.* is not part of"),
    ({"num_hidden_layers": 4000, "layer_types": ...}, MissingTensor,
     "4000 layers, but there are only"),
    ({"attention_bias": True}, MissingTensor, "q_proj.bias is missing"),
]  # fmt: skip


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen3")
    save_hf(folder, "qwen3")
    return folder


def linked(folder: Path, into: Path) -> Path:
    """A copy that shares the weights."""
    (into / "config.json").write_text((folder / "config.json").read_text())
    (into / "model.safetensors").symlink_to(folder / "model.safetensors")
    return into


@pytest.mark.parametrize(("changes", "error", "message"), REFUSED)
def test_refusals_name_the_culprit(
    tmp_path: Path, qwen3: Path, changes: Any, error: type[Exception], message: str
) -> None:
    edit_json(linked(qwen3, tmp_path) / "config.json", **changes)
    with pytest.raises(error, match=message) as caught:
        open_target(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("add", "remove", "error", "message"),
    [
        ({"model.layers.0.self_attn.sinks": torch.ones(4)}, None, BadTensor, "sinks is not part"),
        ({"model.layers.0.self_attn.q_proj.bias": torch.ones(64)}, None, BadTensor,
         "q_proj.bias, but the model has attention_bias off"),
        ({"model.layers.0.mlp.up_proj.bias": torch.ones(128)}, None, BadTensor, "mlp_bias off"),
        ({"model.embed_norm.weight": torch.ones(64)}, None, BadTensor, "embed_norm"),
        ({}, "lm_head.weight", MissingTensor, "lm_head.weight is missing"),
        ({}, "model.layers.1.self_attn.k_norm.weight", MissingTensor, "k_norm.weight is missing"),
        ({}, "model.norm.weight", MissingTensor, "model.norm.weight is missing"),
    ],
)  # fmt: skip
def test_tensors_and_config_must_agree(
    tmp_path: Path, qwen3: Path, add: Any, remove: str | None, error: type[Exception], message: str
) -> None:
    tensors = load_file(qwen3 / "model.safetensors") | add
    tensors.pop(remove, None)
    (tmp_path / "config.json").write_text((qwen3 / "config.json").read_text())
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(error, match=message):
        open_target(tmp_path)


def test_stored_rotary_tables_are_ignored(tmp_path: Path, qwen3: Path) -> None:
    tensors = load_file(qwen3 / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    tensors["model.rotary_emb.inv_freq"] = torch.ones(8)
    (tmp_path / "config.json").write_text((qwen3 / "config.json").read_text())
    save_file(tensors, tmp_path / "model.safetensors")
    target = open_target(tmp_path)
    assert not [name for name in target.source.names() if "rotary" in name]
    check_tensors(target.config, target.source)


def test_llama_without_kv_heads_has_one_per_head(tmp_path: Path) -> None:
    save_hf(tmp_path, "llama", num_key_value_heads=4)
    edit_json(tmp_path / "config.json", num_key_value_heads=...)
    assert open_target(tmp_path).config.attention.num_kv_heads == 4
    edit_json(tmp_path / "config.json", head_dim=..., num_attention_heads=3)
    with pytest.raises(CheckpointError, match="head_dim is missing, and hidden_size 64"):
        open_target(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[]", "expected a JSON object, found list"),
        (b"{", "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b'{"a": 1, "a": 2}', "key a occurs twice"),
        (b'{"a": Infinity}', "Infinity is not JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b"version https://git-lfs.github.com/spec/v1\n", "Git-LFS pointer"),
    ],
)
def test_bad_config_file(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as caught:
        open_target(tmp_path)
    assert "config.json" in caught.value.message


def test_places_that_are_no_checkpoint(tmp_path: Path, qwen3: Path) -> None:
    with pytest.raises(CheckpointError, match="no such file or folder"):
        open_target(tmp_path / "gone")
    with pytest.raises(CheckpointError, match=r"config\.json: no such file"):
        open_target(tmp_path)
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    with pytest.raises(CheckpointError) as caught:
        open_target(tmp_path)
    assert "m.gguf" in caught.value.hint
    with pytest.raises(CheckpointError, match="is a single file"):
        open_target(qwen3 / "model.safetensors")
    with pytest.raises(CheckpointError, match="is not a GGUF file"):
        open_target(qwen3 / "config.json")
    (tmp_path / "config.json").write_text((qwen3 / "config.json").read_text())
    with pytest.raises(CheckpointError, match=r"no \.safetensors file") as caught:
        open_target(tmp_path)
    assert "m.gguf" in caught.value.hint
