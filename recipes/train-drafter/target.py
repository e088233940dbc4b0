"""The target in PyTorch, and its chat format as token ids around a user's text."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from dflash_trt.build.recipe import find_recipe
from dflash_trt.checkpoint.gguf_target import open_gguf
from dflash_trt.checkpoint.gguf_tokenizer import load_gguf_tokenizer
from dflash_trt.checkpoint.locate import locate
from dflash_trt.errors import ConfigError
from dflash_trt.text import Tokenizer

DTYPE = torch.bfloat16
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True)
class ChatFormat:
    """Token ids around one user message: `before` it, `after` it up to where the answer starts."""

    before: tuple[int, ...]
    after: tuple[int, ...]
    end: int
    """The token that ends a message, the user's and the answer's alike."""

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> ChatFormat:
        """What the chat template puts around any text, found from two that share no token."""
        one, two = (
            tokenizer.encode_chat([{"role": "user", "content": text}]) for text in ("one", "two")
        )
        before = _common(one, two)
        after = _common(one[::-1], two[::-1])[::-1]
        return cls(tuple(before), tuple(after), after[0])


def _common(one: list[int], two: list[int]) -> list[int]:
    pairs = zip(one, two, strict=False)
    return [a for a, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)]


def target_file(recipe_name: str) -> Path:
    """The GGUF file of a recipe's target. Raises what `locate` does."""
    recipe = find_recipe(recipe_name)
    if recipe is None:
        raise ConfigError(f"there is no recipe {recipe_name}", hint="engines/ has them")
    return locate(recipe.target, recipe.base)


def load_tokenizer(file: Path) -> Tokenizer:
    """The tokenizer that an engine of this target has."""
    return load_gguf_tokenizer(file)


def load_target(file: Path) -> Any:
    """The target as transformers' model with the weights that an engine gets, frozen."""
    facts = AutoConfig.from_pretrained(str(file.parent), gguf_file=file.name)
    if hasattr(facts, "quantization_config"):
        del facts.quantization_config  # else the weights would stay packed: slow in batches
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(facts, dtype=DTYPE)
    _, source = open_gguf(file, [])
    weights = {name: torch.from_numpy(source.read(name)).to(DTYPE) for name in source.names()}
    model.to_empty(device="cpu")
    missing, unexpected = model.load_state_dict(weights, strict=False)
    if unexpected or set(missing) - {"lm_head.weight"}:
        raise SystemExit(f"error: {file}: tensors {missing + unexpected} do not fit the model")
    model.tie_weights()
    _reset_rotary(model)
    return model.to(DEVICE).eval().requires_grad_(False)


def _reset_rotary(model: Any) -> None:
    """The rotary table is a buffer of no file, which `to_empty` left unset."""
    rotary = model.model.rotary_emb
    model.model.rotary_emb = type(rotary)(model.config)
