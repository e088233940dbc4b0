"""The drafter that is trained: the `dflash` package's own model, so that is what will run."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from dflash.model import DFlashDraftModel
from shards import WEIGHTS, write_file
from transformers import Qwen3Config

from dflash_trt import swap
from dflash_trt.checkpoint import open_drafter
from dflash_trt.config import DrafterConfig

FACTS = (
    "architectures", "attention_bias", "block_size", "bos_token_id", "dflash_config", "dtype",
    "eos_token_id", "head_dim", "hidden_act", "hidden_size", "intermediate_size", "layer_types",
    "max_position_embeddings", "model_type", "num_attention_heads", "num_hidden_layers",
    "num_key_value_heads", "num_target_layers", "rms_norm_eps", "sliding_window",
    "tie_word_embeddings", "vocab_size",
)  # fmt: skip
"""What config.json says, besides the rotary rule."""


Weights = dict[str, torch.Tensor]
"""By name, as in a checkpoint."""


@dataclass(frozen=True)
class Shape:
    """What of a drafter does not follow from its target."""

    layer_ids: tuple[int, ...]
    """The target's layers whose outputs are its context features."""
    layers: int
    block: int
    intermediate: int


def shape_of(config: DrafterConfig) -> Shape:
    """That of a drafter."""
    return Shape(
        config.target_layer_ids, config.num_layers, config.block_size, config.intermediate_size
    )


def make_config(target: Any, shape: Shape, mask_token_id: int) -> Qwen3Config:
    """A drafter's config for a target's, in z-lab's format."""
    return Qwen3Config(
        architectures=["DFlashDraftModel"],
        attention_bias=False,
        block_size=shape.block,
        bos_token_id=target.bos_token_id,
        dflash_config=_own(mask_token_id, shape),
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


def load(
    folder: Path, shape: Shape | None = None, num_target_layers: int | None = None
) -> DFlashDraftModel:
    """A drafter of z-lab's format, in FP32; cut where `shape` has less of something.

    `num_target_layers` is needed only for a config that does not say it.
    The layers that stay are spread over all, from the first to the last; of an MLP the strongest
    channels stay. What a training does not honour is refused: see `task.py`.
    """
    start = open_drafter(folder)
    shape = shape or shape_of(start.config)
    read, depth = start.config.target_layer_ids, start.config.num_layers
    weights = {name: torch.tensor(start.source.read(name)).float() for name in start.source.names()}
    parts = weights["fc.weight"].chunk(len(read), 1)
    kept = {name: weights[name] for name in ("norm.weight", "hidden_norm.weight")}
    kept["fc.weight"] = torch.cat([parts[read.index(layer)] for layer in shape.layer_ids], 1)
    stay = torch.linspace(0, depth - 1, shape.layers).round().int().tolist()
    for index, old in enumerate(stay):
        for name, tensor in _layer(weights, old, shape.intermediate).items():
            kept[f"layers.{index}.{name}"] = tensor
    facts = json.loads((folder / "config.json").read_text()) | {
        "num_target_layers": start.config.num_target_layers or num_target_layers,
        "block_size": shape.block,
        "dflash_config": _own(start.config.mask_token_id, shape),
        "intermediate_size": shape.intermediate,
        "layer_types": ["full_attention"] * shape.layers,
        "num_hidden_layers": shape.layers,
    }
    drafter = DFlashDraftModel(Qwen3Config(**facts))
    drafter.load_state_dict(kept)
    return drafter


def _own(mask_token_id: int, shape: Shape) -> dict[str, Any]:
    return {"mask_token_id": mask_token_id, "target_layer_ids": list(shape.layer_ids)}


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
    """Write config.json, then BF16 weights; each file appears whole, and fits the other."""
    folder.mkdir(parents=True, exist_ok=True)
    config = drafter.config.to_dict()
    facts = {name: config[name] for name in FACTS if name in config}
    rope = dict(config["rope_parameters"])
    facts["rope_theta"] = rope.pop("rope_theta")
    if rope["rope_type"] != "default":
        facts["rope_scaling"] = rope
    text = (json.dumps(facts, indent=2, sort_keys=True) + "\n").encode()
    file = folder / "config.json"
    if file.exists() and file.read_bytes() != text:  # the weights beside it are another shape's
        (folder / WEIGHTS).unlink(missing_ok=True)
    swap.write_file(file, text)
    weights = {name: tensor.bfloat16() for name, tensor in drafter.state_dict().items()}
    write_file(folder / WEIGHTS, weights)
