"""The drafter that is trained: the `dflash` package's own model, so that is what will run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from dflash.model import DFlashDraftModel
from safetensors.torch import load_file
from shards import write_file
from transformers import Qwen3Config

from dflash_trt import swap

FACTS = (
    "architectures", "attention_bias", "block_size", "bos_token_id", "dflash_config", "dtype",
    "eos_token_id", "head_dim", "hidden_act", "hidden_size", "intermediate_size", "layer_types",
    "max_position_embeddings", "model_type", "num_attention_heads", "num_hidden_layers",
    "num_key_value_heads", "num_target_layers", "rms_norm_eps", "sliding_window",
    "tie_word_embeddings", "vocab_size",
)  # fmt: skip
"""What config.json says, besides the rotary rule."""


def make_config(
    target: Any, layer_ids: tuple[int, ...], mask_token_id: int, *, layers: int, block: int,
    intermediate: int | None,
) -> Qwen3Config:  # fmt: skip
    """A drafter's config for a target's, in z-lab's format."""
    return Qwen3Config(
        architectures=["DFlashDraftModel"],
        attention_bias=False,
        block_size=block,
        bos_token_id=target.bos_token_id,
        dflash_config={"mask_token_id": mask_token_id, "target_layer_ids": list(layer_ids)},
        dtype="bfloat16",
        eos_token_id=target.eos_token_id,
        head_dim=target.head_dim,
        hidden_size=target.hidden_size,
        intermediate_size=intermediate or target.intermediate_size,
        layer_types=["full_attention"] * layers,
        max_position_embeddings=target.max_position_embeddings,
        num_attention_heads=target.num_attention_heads,
        num_hidden_layers=layers,
        num_key_value_heads=target.num_key_value_heads,
        num_target_layers=target.num_hidden_layers,
        rms_norm_eps=target.rms_norm_eps,
        rope_parameters=dict(target.rope_parameters),
        sliding_window=None,
        tie_word_embeddings=False,
        vocab_size=target.vocab_size,
    )


def from_target(config: Qwen3Config, target: Any, features: torch.Tensor) -> DFlashDraftModel:
    """A drafter that starts as the target's last layers, reading its last context feature.

    `features` [T, F] are some context features. Their layers differ in scale a hundredfold, so fc
    gets them at one scale: identity on the last layer's, a tenth of a random start on the others.
    Query and key norms, where the target has none, start at the heads' own root mean squares.
    """
    drafter = DFlashDraftModel(config)
    layers, hidden = config.num_hidden_layers, config.hidden_size
    first = config.num_target_layers - layers
    weights = target.model.state_dict()
    own = drafter.state_dict()
    for index in range(layers):
        for name in own:
            if name.startswith(f"layers.{index}."):
                theirs = name.replace(f"layers.{index}.", f"layers.{first + index}.")
                if theirs in weights and weights[theirs].shape == own[name].shape:
                    own[name] = weights[theirs]
    own["norm.weight"] = weights["norm.weight"]
    own["hidden_norm.weight"] = weights[f"layers.{first}.input_layernorm.weight"]
    scales = features.float().view(len(features), -1, hidden).pow(2).mean((0, 2)).rsqrt()
    fc = torch.randn(hidden, len(scales), hidden) * (0.1 / (len(scales) * hidden) ** 0.5)
    fc[:, -1] += torch.eye(hidden)
    own["fc.weight"] = (fc * scales[:, None]).flatten(1)
    drafter.load_state_dict(own)
    if f"layers.{first}.self_attn.q_norm.weight" not in weights:
        _set_head_norms(drafter, features)
    return drafter


@torch.no_grad()
def _set_head_norms(drafter: DFlashDraftModel, features: torch.Tensor) -> None:
    context = drafter.hidden_norm(drafter.fc(features.float()))
    for layer in drafter.layers:
        attention = layer.self_attn
        for projection, norm in (
            (attention.q_proj, attention.q_norm),
            (attention.k_proj, attention.k_norm),
        ):
            norm.weight.fill_(projection(context).pow(2).mean().sqrt())


def load(folder: Path, block: int | None = None) -> DFlashDraftModel:
    """A drafter of z-lab's format, in FP32. `block` replaces its block size."""
    facts = json.loads((folder / "config.json").read_text())
    config = Qwen3Config(**facts | ({"block_size": block} if block else {}))
    drafter = DFlashDraftModel(config)
    weights = load_file(folder / "model.safetensors")
    drafter.load_state_dict({name: tensor.float() for name, tensor in weights.items()})
    return drafter


def save(drafter: DFlashDraftModel, folder: Path) -> None:
    """Write config.json, then BF16 weights; each file appears whole."""
    folder.mkdir(parents=True, exist_ok=True)
    config = drafter.config.to_dict()
    facts = {name: config[name] for name in FACTS}
    rope = dict(config["rope_parameters"])
    facts["rope_theta"] = rope.pop("rope_theta")
    if rope["rope_type"] != "default":
        facts["rope_scaling"] = rope
    text = json.dumps(facts, indent=2, sort_keys=True) + "\n"
    swap.write_file(folder / "config.json", text.encode())
    weights = {name: tensor.bfloat16() for name, tensor in drafter.state_dict().items()}
    write_file(folder / "model.safetensors", weights)
