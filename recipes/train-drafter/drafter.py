"""The drafter that is trained: the `dflash` package's own model, so that is what will run."""

from __future__ import annotations

import json
from dataclasses import dataclass
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


Weights = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Shape:
    """What of a drafter does not follow from its target."""

    layer_ids: tuple[int, ...]
    """The target's layers whose outputs are its context features."""
    layers: int
    block: int
    intermediate: int


def make_config(target: Any, shape: Shape, mask_token_id: int) -> Qwen3Config:
    """A drafter's config for a target's, in z-lab's format."""
    return Qwen3Config(
        architectures=["DFlashDraftModel"],
        attention_bias=False,
        block_size=shape.block,
        bos_token_id=target.bos_token_id,
        dflash_config={"mask_token_id": mask_token_id, "target_layer_ids": list(shape.layer_ids)},
        dtype="bfloat16",
        eos_token_id=target.eos_token_id,
        head_dim=target.head_dim,
        hidden_size=target.hidden_size,
        intermediate_size=shape.intermediate,
        layer_types=["full_attention"] * shape.layers,
        max_position_embeddings=target.max_position_embeddings,
        num_attention_heads=target.num_attention_heads,
        num_hidden_layers=shape.layers,
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

    Of an MLP it takes the strongest channels, as many as `config` has.
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
        theirs = _layer(weights, first + index, config.intermediate_size)
        names = {name: f"layers.{index}.{name}" for name in theirs}
        own |= {own_name: theirs[name] for name, own_name in names.items() if own_name in own}
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


def load(folder: Path, shape: Shape | None = None) -> DFlashDraftModel:
    """A drafter of z-lab's format, in FP32; cut to a shape that has no more of anything.

    The layers that stay are spread over all, the first and the last among them; of an MLP the
    strongest channels stay.
    """
    facts = json.loads((folder / "config.json").read_text())
    weights = {
        name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()
    }
    if shape:
        facts, weights = _cut(facts, weights, shape)
    drafter = DFlashDraftModel(Qwen3Config(**facts))
    drafter.load_state_dict(weights)
    return drafter


def _cut(facts: dict[str, Any], weights: Weights, shape: Shape) -> tuple[dict[str, Any], Weights]:
    read = facts["dflash_config"]["target_layer_ids"]
    stay = torch.linspace(0, facts["num_hidden_layers"] - 1, shape.layers).round().int().tolist()
    kept = {name: weights[name] for name in ("norm.weight", "hidden_norm.weight")}
    parts = weights["fc.weight"].chunk(len(read), 1)
    kept["fc.weight"] = torch.cat([parts[read.index(layer)] for layer in shape.layer_ids], 1)
    for index, old in enumerate(stay):
        for name, tensor in _layer(weights, old, shape.intermediate).items():
            kept[f"layers.{index}.{name}"] = tensor
    changed = {
        "block_size": shape.block,
        "dflash_config": {**facts["dflash_config"], "target_layer_ids": list(shape.layer_ids)},
        "intermediate_size": shape.intermediate,
        "layer_types": [facts["layer_types"][old] for old in stay],
        "num_hidden_layers": shape.layers,
    }
    return facts | changed, kept


def _layer(weights: Weights, index: int, intermediate: int) -> Weights:
    """Weights of a layer by their names in it, with the MLP's strongest channels alone."""
    start = f"layers.{index}."
    own = {name[len(start) :]: w for name, w in weights.items() if name.startswith(start)}
    gate, up, down = (f"mlp.{name}_proj.weight" for name in ("gate", "up", "down"))
    if len(own[up]) > intermediate:
        strength = own[up].float().norm(dim=1) * own[down].float().norm(dim=0)
        stay = strength.topk(intermediate).indices.sort().values
        own |= {gate: own[gate][stay], up: own[up][stay], down: own[down][:, stay]}
    return own


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
