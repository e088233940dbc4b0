"""The target in PyTorch, and its chat format as token ids around a user's text."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from dflash_trt.build.recipe import find_recipe
from dflash_trt.checkpoint import locate, open_target
from dflash_trt.checkpoint.tied import check_tied_head
from dflash_trt.config import RopeConfig, TargetConfig
from dflash_trt.errors import ConfigError, UnsupportedArchitecture
from dflash_trt.text import Tokenizer

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def best_dtype() -> torch.dtype:
    """BF16, but FP32 on a CPU without instructions for BF16: with AVX2 alone it is eight times
    slower (seen)."""
    able = torch.cpu.get_capabilities()
    has_bf16 = DEVICE == "cuda" or any(map(able.get, ("avx512_bf16", "amx_bf16", "bf16")))
    return torch.bfloat16 if has_bf16 else torch.float32


DTYPE = best_dtype()
"""What target and drafter compute in here; the drafter's own weights are always FP32."""
FAMILIES: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}


@dataclass(frozen=True)
class ChatFormat:
    """Token ids around one user message: `before` it, `after` it up to where the answer starts."""

    before: tuple[int, ...]
    after: tuple[int, ...]
    ends: frozenset[int]
    """Tokens that end a message, the user's and the answer's alike."""

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> ChatFormat:
        """What the chat template puts around any text, found from two that share no token.

        Raises `ConfigError` where that is too little to tell a message by.
        """
        one, two = (
            tokenizer.encode_chat([{"role": "user", "content": text}]) for text in ("one", "two")
        )
        before = _common(one, two)
        after = _common(one[::-1], two[::-1])[::-1]
        if len(before) < 2 or not after:
            raise ConfigError(
                f"the chat template puts {len(before)} tokens before a message and {len(after)} "
                "behind it",
                "the recipe needs a target whose template puts at least 2 and 1",
            )
        # A frame of ordinary tokens, such as a newline, does not tell where an answer ends.
        own = tokenizer.special_ids.intersection(after[:1])
        return cls(tuple(before), tuple(after), own.union(tokenizer.stop_ids))


def _common(one: list[int], two: list[int]) -> list[int]:
    pairs = zip(one, two, strict=False)
    return [a for a, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)]


def find_target(name: str) -> Path:
    """The folder or GGUF file of what `dflash-trt build --target` takes. Raises as `locate`."""
    recipe = find_recipe(name)
    return locate(name) if recipe is None else locate(recipe.target, recipe.base)


def read_facts(path: Path) -> TargetConfig:
    """A target's facts. Raises `CheckpointError`, also for what only this recipe cannot do."""
    target = open_target(path)
    config = target.config
    if any(mask.window for mask in config.masks):
        raise UnsupportedArchitecture(f"{path}: has sliding windows, which the recipe has not")
    if config.attention.qkv_bias != config.attention.o_bias:
        raise UnsupportedArchitecture(f"{path}: some projections of its attention have a bias")
    check_tied_head(config, target.source)
    return config


def find_mask_token(
    asked: str | None, tokenizer: Tokenizer, chat: ChatFormat, vocab_size: int
) -> int:
    """The id of the token asked for, or else of the last special one that chats do not have.

    Raises `ConfigError` where there is none.
    """
    if asked is not None:
        token_id = int(asked) if asked.isdecimal() else tokenizer.token_to_id(asked)
        if token_id is None or token_id >= vocab_size:
            raise ConfigError(f"--mask-token {asked} is none of the target's {vocab_size} tokens")
        return token_id
    used = {*chat.before, *chat.after, *chat.ends, tokenizer.bos_token_id}
    free = [token_id for token_id in tokenizer.special_ids - used if token_id < vocab_size]
    if not free:
        raise ConfigError(
            "the target has no special token that its chat format leaves free for the mask",
            "name one that its texts never have, or its id: --mask-token TOKEN",
        )
    return max(free)


def load_target(path: Path) -> Any:
    """The target as transformers' model with the weights that an engine gets, frozen."""
    facts, source = read_facts(path), open_target(path).source
    config_class, model_class = FAMILIES[facts.family]
    with torch.device("meta"):
        model = model_class(config_class(**_settings(facts)))
    weights = {name: torch.tensor(source.read(name)).to(DEVICE, DTYPE) for name in source.names()}
    if facts.tie_word_embeddings:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict(weights, assign=True)
    model.tie_weights()
    _make_rotary(model, facts.attention.rope)
    return model.to(DEVICE).eval().requires_grad_(False)


def _settings(facts: TargetConfig) -> dict[str, Any]:
    attention, rope = facts.attention, facts.attention.rope
    kind = {"rope_type": rope.kind, **rope.params} if rope.kind != "table" else {}
    return {
        "attention_bias": attention.qkv_bias,
        "bos_token_id": facts.bos_token_id,
        "dtype": DTYPE,
        "eos_token_id": facts.eos_token_ids[0] if facts.eos_token_ids else None,
        "head_dim": attention.head_dim,
        "hidden_size": facts.hidden_size,
        "intermediate_size": facts.intermediate_size,
        "max_position_embeddings": facts.max_position_embeddings,
        "num_attention_heads": attention.num_heads,
        "num_hidden_layers": facts.num_layers,
        "num_key_value_heads": attention.num_kv_heads,
        "pad_token_id": None,
        "rms_norm_eps": facts.rms_norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": rope.theta, **kind},
        "tie_word_embeddings": facts.tie_word_embeddings,
        "vocab_size": facts.vocab_size,
        **({"mlp_bias": facts.mlp_bias} if facts.family == "llama" else {}),
    }


def _make_rotary(model: Any, rope: RopeConfig) -> None:
    """The rotary table is a buffer that no checkpoint need have; a GGUF has its divisors."""
    rotary = model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    if rope.kind == "table":
        rotary.inv_freq /= torch.tensor(rope.params["divisors"])
