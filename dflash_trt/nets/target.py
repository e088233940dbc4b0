"""The target network: Qwen3 and Llama decoders, one definition for every backend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dflash_trt.config import TargetConfig
from dflash_trt.graph import (
    DType,
    LinearWeight,
    Tensor,
    attention,
    cast,
    embedding,
    kv_update,
    linear,
    scope,
)
from dflash_trt.nets.layers import Span, merge_heads, mlp, norm, project, residual, split_heads


@dataclass(frozen=True)
class TargetPass:
    """What one pass over a row of tokens gives."""

    hidden: Tensor  # [B, S, H], before the final norm
    layer_outputs: list[Tensor]  # of every layer: [B, S, H]
    caches: list[tuple[Tensor, Tensor]]


def target_forward(
    config: TargetConfig,
    tokens: Tensor,
    span: Span,
    caches: Sequence[tuple[Tensor, Tensor]],
) -> TargetPass:
    """Read tokens int32 [B, S], which sit at `span`, and write their keys and values."""
    rows = embedding(tokens, "target.embed_tokens.weight", config.vocab_size, config.hidden_size)
    hidden = cast(rows, DType.F32)
    outputs, updated = [], []
    for layer, (key, value) in enumerate(caches):
        with scope(f"target.layers.{layer}"):
            hidden, kv = _layer(config, layer, hidden, span, (key, value))
        outputs.append(hidden)
        updated.append(kv)
    return TargetPass(hidden, outputs, updated)


def target_logits(config: TargetConfig, hidden: Tensor) -> Tensor:
    """Final norm and head over rows [B, R, H] -> F32 [B, R, V]."""
    with scope("target.lm_head"):
        rows = norm(hidden, "target.norm.weight", config.rms_norm_eps)
        head = LinearWeight("target.lm_head.weight", config.vocab_size)
        return linear(rows, [head], DType.F32)[0]


def _layer(
    config: TargetConfig,
    layer: int,
    hidden: Tensor,
    span: Span,
    cache: tuple[Tensor, Tensor],
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    prefix = f"target.layers.{layer}"
    attn, eps = config.attention, config.rms_norm_eps
    with scope("self_attn"):
        x = norm(hidden, f"{prefix}.input_layernorm.weight", eps)
        q, k, v = project(x, f"{prefix}.self_attn", "qkv", attn)
        q = split_heads(q, attn, f"{prefix}.self_attn.q_norm.weight", eps)
        k = split_heads(k, attn, f"{prefix}.self_attn.k_norm.weight", eps)
        key = kv_update(cache[0], span.rotate(k), span.start)
        value = kv_update(cache[1], split_heads(v, attn, None, eps), span.start)
        mask = config.masks[layer]
        mixed = attention(span.rotate(q), key, value, span.kv_length, mask)
        branch = merge_heads(mixed, f"{prefix}.self_attn", attn, config.hidden_size)
        hidden = residual(hidden, branch)
    with scope("mlp"):
        x = norm(hidden, f"{prefix}.post_attention_layernorm.weight", eps)
        sizes = (config.intermediate_size, config.hidden_size)
        hidden = residual(hidden, mlp(x, f"{prefix}.mlp", sizes, config.mlp_bias))
    return hidden, (key, value)
