"""Pieces that target and drafter layers share: projections, heads, MLP."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dflash_trt.config import AttentionConfig
from dflash_trt.graph import (
    DType,
    LinearWeight,
    Tensor,
    add,
    cast,
    linear,
    param,
    reshape,
    transpose,
)
from dflash_trt.graph.compounds import rms_norm, rope, swiglu


@dataclass(frozen=True)
class Span:
    """Where the rows of one pass sit: row s of slot b at position start[b] + s."""

    start: Tensor  # int32 [B]: the first cache row that the pass writes
    positions: Tensor  # int32 [B, S]
    kv_length: Tensor  # int32 [B]: keys that the last row may see
    cos: Tensor
    sin: Tensor

    def rotate(self, x: Tensor) -> Tensor:
        """Rotary embedding of x [B, N, S, D] at these positions."""
        return rope(x, self.positions, self.cos, self.sin)


def norm(x: Tensor, name: str, eps: float) -> Tensor:
    """RMS norm over the last axis with the weight `name`, as an activation."""
    width = x.shape[-1]
    assert isinstance(width, int)
    return cast(rms_norm(x, param(name, (width,)), eps), DType.ACT)


def residual(hidden: Tensor, branch: Tensor) -> Tensor:
    """The residual stream [B, S, H] with a branch's output added.

    The stream is FP32 on every backend: Qwen3-8B's passes 2e4, where BF16 steps by 128, and the
    branches of a layer are small beside it.
    """
    return add(hidden, cast(branch, DType.F32))


def projection(prefix: str, kind: str, attention: AttentionConfig) -> LinearWeight:
    """The weight of `q_proj`, `k_proj` or `v_proj` under `prefix` (`..self_attn`)."""
    heads = attention.num_heads if kind == "q" else attention.num_kv_heads
    name = f"{prefix}.{kind}_proj"
    bias = f"{name}.bias" if attention.qkv_bias else None
    return LinearWeight(f"{name}.weight", heads * attention.head_dim, bias)


def project(x: Tensor, prefix: str, kinds: str, attention: AttentionConfig) -> list[Tensor]:
    """Projections `kinds` of x [B, S, H], e.g. "qkv", each [B, S, heads * D]."""
    return linear(x, [projection(prefix, kind, attention) for kind in kinds])


def split_heads(x: Tensor, attention: AttentionConfig, norm_name: str | None, eps: float) -> Tensor:
    """[B, S, N * D] -> [B, N, S, D], with a per-head RMS norm where the model has one."""
    width = x.shape[-1]
    assert isinstance(width, int)
    heads = reshape(x, (*x.shape[:2], width // attention.head_dim, attention.head_dim))
    if attention.qk_norm and norm_name:
        heads = norm(heads, norm_name, eps)
    return transpose(heads, (0, 2, 1, 3))


def merge_heads(x: Tensor, prefix: str, attention: AttentionConfig, hidden_size: int) -> Tensor:
    """[B, N, S, D] -> o_proj -> [B, S, H]."""
    width = attention.num_heads * attention.head_dim
    rows = transpose(x, (0, 2, 1, 3))
    flat = reshape(rows, (*rows.shape[:2], width))
    bias = f"{prefix}.o_proj.bias" if attention.o_bias else None
    return linear(flat, [LinearWeight(f"{prefix}.o_proj.weight", hidden_size, bias)])[0]


def mlp(x: Tensor, prefix: str, sizes: Sequence[int], bias: bool) -> Tensor:
    """down(silu(gate(x)) * up(x)); `sizes` = (intermediate, hidden)."""

    def weight(kind: str, width: int) -> LinearWeight:
        name = f"{prefix}.{kind}_proj"
        return LinearWeight(f"{name}.weight", width, f"{name}.bias" if bias else None)

    intermediate, hidden = sizes
    gate, up = linear(x, [weight("gate", intermediate), weight("up", intermediate)])
    return linear(swiglu(gate, up), [weight("down", hidden)], DType.ACT)[0]
