"""Tiny checkpoints for the tests of this folder, written with the reference libraries."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import torch
import transformers
from gguf.quants import quantize
from safetensors.numpy import save_file as save_arrays
from safetensors.torch import save_file

from dflash_trt.checkpoint import TensorSource
from dflash_trt.checkpoint.quantized import read_quantized
from dflash_trt.checkpoint.quantized_config import Quantization
from dflash_trt.checkpoint.safetensors import SafetensorsSource
from dflash_trt.errors import CheckpointError

SMALL = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "head_dim": 16,
    "eos_token_id": 2,
}


def problem_of(call: Callable[[], object]) -> str:
    """The message of the `CheckpointError` that `call` raises, or nothing; others pass through."""
    try:
        call()
    except CheckpointError as error:
        return error.message
    return ""


def save_hf(folder: Path, family: str, shard: str | None = None, **options: Any) -> Any:
    """A random transformers model of `family`, saved; returns it."""
    torch.manual_seed(len(folder.name) + 7)
    values = SMALL | options
    if family == "llama":
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**values))
    else:
        model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**values))
    with torch.no_grad():  # norms and biases start as constants, which would hide a mix-up
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter))
    model.save_pretrained(folder, max_shard_size=shard or "5GB")
    return model


def edit_json(path: Path, **changes: Any) -> dict[str, Any]:
    """Change keys of a JSON file; `...` removes one."""
    data = json.loads(path.read_text())
    for key, value in changes.items():
        if value is ...:
            data.pop(key, None)
        else:
            data[key] = value
    path.write_text(json.dumps(data))
    return data


DRAFTER_CONFIG: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "attention_bias": False,
    "block_size": 8,
    "dflash_config": {"mask_token_id": 90, "target_layer_ids": [0, 2]},
    "head_dim": 16,
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 128,
    "max_position_embeddings": 512,
    "max_window_layers": 2,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "num_target_layers": 3,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 96,
}


def drafter_tensors(bias: bool = False, layers: int = 2) -> dict[str, torch.Tensor]:
    """Random bf16 weights that fit `DRAFTER_CONFIG`."""
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(torch.bfloat16)

    tensors = {"fc.weight": random(64, 128), "hidden_norm.weight": random(64)}
    for layer in range(layers):
        at = f"layers.{layer}."
        tensors |= {
            at + "input_layernorm.weight": random(64),
            at + "post_attention_layernorm.weight": random(64),
            at + "self_attn.q_proj.weight": random(64, 64),
            at + "self_attn.k_proj.weight": random(32, 64),
            at + "self_attn.v_proj.weight": random(32, 64),
            at + "self_attn.o_proj.weight": random(64, 64),
            at + "self_attn.q_norm.weight": random(16),
            at + "self_attn.k_norm.weight": random(16),
            at + "mlp.gate_proj.weight": random(128, 64),
            at + "mlp.up_proj.weight": random(128, 64),
            at + "mlp.down_proj.weight": random(64, 128),
        }
        if bias:
            for name, size in (("q", 64), ("k", 32), ("v", 32), ("o", 64)):
                tensors[f"{at}self_attn.{name}_proj.bias"] = random(size)
    return tensors | {"norm.weight": random(64)}


# What makes a DFlash 2 drafter of the above: keys of dflash_config, and tensors.
DFLASH2_CONFIG: dict[str, Any] = {
    "conv_kernel_size": 2,
    "conv_group_size": 16,
    "selector_rank": 12,
    "selector_top_k": 8,
}


def dflash2_tensors() -> dict[str, torch.Tensor]:
    """Random bf16 weights of a DFlash 2 drafter that fit both configs."""
    generator = torch.Generator().manual_seed(4)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(torch.bfloat16)

    selector = "candidate_selector."
    tensors = drafter_tensors() | {
        selector + "predecessor_codebook": random(96, 12),
        selector + "successor_codebook": random(96, 12),
        selector + "hidden_projection.weight": random(12, 64),
    }
    for layer in range(2):
        for part in ("attention_conv", "mlp_conv"):
            tensors[f"layers.{layer}.{part}.base_kernel"] = random(2, 2, 64)
            tensors[f"layers.{layer}.{part}.kernel_projection.weight"] = random(16, 64)
    return tensors


def save_dflash2(
    folder: Path, tensors: dict[str, torch.Tensor] | None = None, **changes: Any
) -> Path:
    """`save_drafter` of a DFlash 2 drafter."""
    nested = DFLASH2_CONFIG | changes.pop("dflash_config", {})
    own = {"architectures": ["DFlash2DraftModel"], "is_causal": False}
    return save_drafter(
        folder, tensors or dflash2_tensors(), dflash_config=nested, **(own | changes)
    )


def save_drafter(
    folder: Path, tensors: dict[str, torch.Tensor] | None = None, **changes: Any
) -> Path:
    """A drafter folder; `dflash_config=` merges into the nested object, `...` removes a key."""
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads(json.dumps(DRAFTER_CONFIG))
    nested = changes.pop("dflash_config", {})
    for place, edits in ((config, changes), (config["dflash_config"], nested)):
        for key, value in edits.items():
            if value is ...:
                place.pop(key, None)
            else:
                place[key] = value
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors or drafter_tensors(), folder / "model.safetensors", {"format": "pt"})
    return folder


LLAMA_KEYS: dict[str, Any] = {
    "context_length": 512,
    "embedding_length": 256,
    "feed_forward_length": 512,
    "block_count": 2,
    "attention.head_count": 8,
    "attention.head_count_kv": 4,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 500000.0,
    "rope.dimension_count": 32,
    "vocab_size": 96,
}


# 96 tokens, of which the third is the first two merged.
GGUF_TOKENIZER: dict[str, Any] = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": ["t", "u", "tu", *(f"x{i}" for i in range(93))],
    "tokenizer.ggml.token_type": [1] * 96,
    "tokenizer.ggml.merges": ["t u"],
}


def permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's converter, written out: half-split rows to interleaved ones."""
    return (
        weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
        .swapaxes(1, 2)
        .reshape(weight.shape)
    )


def llama_weights(hidden: int = 256, inner: int = 512, vocab: int = 96) -> dict[str, np.ndarray]:
    """Random float32 weights of a 2-layer Llama under Hugging Face names."""
    rng = np.random.default_rng(5)

    def random(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, dtype=np.float32)

    weights = {"model.embed_tokens.weight": random(vocab, hidden)}
    for layer in range(2):
        at = f"model.layers.{layer}."
        weights |= {
            at + "input_layernorm.weight": random(hidden),
            at + "self_attn.q_proj.weight": random(hidden, hidden),
            at + "self_attn.k_proj.weight": random(hidden // 2, hidden),
            at + "self_attn.v_proj.weight": random(hidden // 2, hidden),
            at + "self_attn.o_proj.weight": random(hidden, hidden),
            at + "post_attention_layernorm.weight": random(hidden),
            at + "mlp.gate_proj.weight": random(inner, hidden),
            at + "mlp.up_proj.weight": random(inner, hidden),
            at + "mlp.down_proj.weight": random(hidden, inner),
        }
    return weights | {"model.norm.weight": random(hidden)}


GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def to_gguf_name(name: str) -> str:
    stem, _, suffix = name.rpartition(".")
    if stem.startswith("model.layers."):
        _, _, layer, rest = stem.split(".", 3)
        return f"blk.{layer}.{GGUF_NAMES[rest]}.{suffix}"
    return f"{GGUF_NAMES[stem]}.{suffix}"


def save_gguf(
    path: Path,
    weights: dict[str, np.ndarray] | None = None,
    kind: str = "F32",
    arch: str = "llama",
    keys: dict[str, Any] | None = None,
    extra: dict[str, np.ndarray] | None = None,
) -> Path:
    """A GGUF file; matrices quantized to `kind`. In `keys`, `...` removes one of LLAMA_KEYS."""
    weights = llama_weights() if weights is None else weights
    writer = gguf.GGUFWriter(path, arch)
    for key, value in (LLAMA_KEYS | (keys or {})).items():
        if value is ...:
            continue
        name = key if key.startswith(("tokenizer.", "split.")) else f"{arch}.{key}"
        if isinstance(value, str):
            writer.add_string(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        elif isinstance(value, list):
            writer.add_array(name, value)
        else:
            writer.add_uint32(name, value)
    if "tokenizer.ggml.tokens" not in (keys or {}):
        writer.add_array("tokenizer.ggml.tokens", [f"t{i}" for i in range(96)])
    for name, weight in weights.items():
        stored = weight
        if arch == "llama" and ".q_proj." in name:
            stored = permute(weight, 8)
        elif arch == "llama" and ".k_proj." in name:
            stored = permute(weight, 4)
        quant = gguf.GGMLQuantizationType[kind if weight.ndim == 2 else "F32"]
        writer.add_tensor(to_gguf_name(name), quantize(stored, quant), raw_dtype=quant)
    for name, array in (extra or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def read_stated(
    folder: Path, tensors: dict[str, np.ndarray], *schemes: str, block: Any = None
) -> TensorSource:
    """A source over tensors, whose config names `schemes`."""
    save_arrays(tensors, folder / "model.safetensors")
    stated = Quantization("config.json: stated", frozenset(schemes), block) if schemes else None
    return read_quantized(SafetensorsSource(folder), stated, [])


def fp8_x(rows: int = 4, width: int = 6, scale: Any = 0.5) -> dict[str, np.ndarray]:
    codes = np.arange(rows * width).reshape(rows, width).astype(ml_dtypes.float8_e4m3fn)
    return {"x.weight": codes, "x.weight_scale": np.asarray(scale, np.float32)}


def nvfp4_x(rows: int = 3, width: int = 32, scale: Any = 0.5) -> dict[str, np.ndarray]:
    return {
        "x.weight": np.arange(rows * width // 2, dtype=np.uint8).reshape(rows, width // 2),
        "x.weight_scale": np.full((rows, width // 16), 2, ml_dtypes.float8_e4m3fn),
        "x.weight_scale_2": np.asarray(scale, np.float32),
    }
