"""The DFlash drafter network: KV injection of the context, then one pass over the block.

Source: arXiv 2602.06036 section 3. The context's keys and values come from the fused context
feature through each layer's own k_proj and v_proj; the context never passes through the layers.
What DFlash 2 adds is in `dflash2.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dflash_trt.config import DrafterConfig
from dflash_trt.graph import (
    DType,
    LinearWeight,
    Tensor,
    attention,
    cast,
    concat,
    div,
    embedding,
    linear,
    mul,
    param,
    scope,
    unary,
)
from dflash_trt.graph.compounds import Compaction, inject_kv
from dflash_trt.nets.dflash2 import convolution
from dflash_trt.nets.layers import (
    Span,
    merge_heads,
    mlp,
    norm,
    project,
    projection,
    residual,
    split_heads,
)


@dataclass(frozen=True)
class Injection:
    """Where a step's rows go in a drafter cache: committed context rows, the block right behind."""

    rows: Compaction  # of the S + K rows
    block: Span  # of the K block rows
    offsets: Tensor  # int32 [K]: 0, 1, .. of the block rows


def fuse_context(config: DrafterConfig, features: Sequence[Tensor]) -> Tensor:
    """Context feature (captured target layers) [B, S, F] -> fc, hidden_norm -> [B, S, H].

    In FP32: Qwen3-8B's features pass 2e4, which an FP16 sum cannot hold.
    """
    with scope("drafter.fuse"):
        width = len(features) * config.target_hidden_size
        feature = concat(features, 2, width)
        fused = linear(feature, [LinearWeight("drafter.fc.weight", config.hidden_size)], DType.F32)
        return norm(fused[0], "drafter.hidden_norm.weight", config.rms_norm_eps)


def draft_hidden(
    config: DrafterConfig,
    context: Tensor,
    block_ids: Tensor,
    place: Injection,
    caches: Sequence[tuple[Tensor, Tensor]],
) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """Inject context [B, S, H] and run the block int32 [B, K]: hidden rows [B, K, H], caches."""
    rows = embedding(
        block_ids, "drafter.embed_tokens.weight", config.vocab_size, config.hidden_size
    )
    hidden = cast(rows, DType.F32)
    if config.input_embedding_scale != 1.0:
        hidden = mul(hidden, config.input_embedding_scale)
    injected = _context_kv(config, context)
    updated = []
    for layer, cache in enumerate(caches):
        with scope(f"drafter.layers.{layer}"):
            hidden, kv = _layer(config, layer, hidden, injected[layer], place, cache)
        updated.append(kv)
    return hidden, updated


def draft_rows(config: DrafterConfig, hidden: Tensor) -> Tensor:
    """Final norm over block rows [B, R, H]."""
    with scope("drafter.norm"):
        return norm(hidden, "drafter.norm.weight", config.rms_norm_eps)


def draft_logits(config: DrafterConfig, rows: Tensor) -> Tensor:
    """Head over `draft_rows` [B, R, H] -> F32 [B, R, V], V of the draft vocabulary."""
    with scope("drafter.lm_head"):
        head = LinearWeight("drafter.lm_head.weight", config.head_rows)
        logits = linear(rows, [head], DType.F32)[0]
        if config.output_multiplier != 1.0:
            logits = mul(logits, config.output_multiplier)
        if config.final_logit_softcapping:
            cap = config.final_logit_softcapping
            logits = mul(unary("tanh", div(logits, cap)), cap)
        return logits


def _context_kv(config: DrafterConfig, context: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Keys and values of the context for all layers, [B, S, Nkv * D] each, as one product."""
    weights = [
        projection(f"drafter.layers.{layer}.self_attn", kind, config.attention)
        for layer in range(config.num_layers)
        for kind in "kv"
    ]
    with scope("drafter.inject"):
        flat = linear(context, weights)
    return list(zip(flat[::2], flat[1::2], strict=True))


def _layer(
    config: DrafterConfig,
    layer: int,
    hidden: Tensor,
    injected: tuple[Tensor, Tensor],
    place: Injection,
    cache: tuple[Tensor, Tensor],
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    prefix = f"drafter.layers.{layer}"
    attn, eps = config.attention, config.rms_norm_eps

    with scope("self_attn"):
        # input_layernorm is the block's alone: the context enters through k_proj and v_proj raw.
        x = norm(hidden, f"{prefix}.input_layernorm.weight", eps)
        conv = convolution(config, f"{prefix}.attention_conv", x, place.offsets)
        x = conv.prepare(x)
        q, k, v = project(x, f"{prefix}.self_attn", "qkv", attn)
        q = split_heads(q, attn, f"{prefix}.self_attn.q_norm.weight", eps)
        weight = f"{prefix}.self_attn.k_norm.weight"
        k_norm = (param(weight, (attn.head_dim,)), eps) if attn.qk_norm else None
        tables = (place.block.cos, place.block.sin)
        key, value = inject_kv(cache, injected, (k, v), place.rows, tables, k_norm)
        mask = config.masks[layer]
        mixed = attention(place.block.rotate(q), key, value, place.block.kv_length, mask)
        branch = merge_heads(mixed, f"{prefix}.self_attn", attn, config.hidden_size)
        hidden = residual(hidden, conv.finish(branch))
    with scope("mlp"):
        x = norm(hidden, f"{prefix}.post_attention_layernorm.weight", eps)
        conv = convolution(config, f"{prefix}.mlp_conv", x, place.offsets)
        sizes = (config.intermediate_size, config.hidden_size)
        branch = mlp(conv.prepare(x), f"{prefix}.mlp", sizes, bias=False)
        hidden = residual(hidden, conv.finish(branch))
    return hidden, (key, value)
