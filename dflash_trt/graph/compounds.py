"""Compound ops: one node each, which a backend claims whole or which is decomposed here.

Each decomposition is plain primitives, so it is the fallback and the oracle of every native
layer, ONNX operator and plugin that claims the op.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from dflash_trt.contract import KV_ROWS
from dflash_trt.graph import primitives as p
from dflash_trt.graph.graph import DType, Tensor, current_graph


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last axis, FP32 inside (plain weight, not 1 + weight)."""
    return _compound("rms_norm", [x, weight], x, eps=eps)


def rope(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [B, N, S, D], half-split layout, at positions [B, S]; cos, sin [P, D/2]."""
    return _compound("rope", [x, positions, cos, sin], x)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up."""
    return _compound("swiglu", [gate, up], gate)


def prefix_count(matches: Tensor) -> Tensor:
    """How many leading elements of the last axis are true: bool [B, R] -> int32 [B]."""
    node = current_graph().add_node("prefix_count", [matches], [(matches.shape[:-1], DType.I32)])
    return node[0]


# A threshold is found digit by digit, from the least one up; the last digit is finer than what
# float32 logits differ by.
LEAST_THRESHOLD = -32.0
THRESHOLD_DIGITS = [2.0**power for power in range(4, -25, -1)]


def threshold(x: Tensor, need: Tensor, weight: Tensor | None = None) -> Tensor:
    """The highest t [.., 1] with a sum of `weight` where x >= t of at least `need` [.., 1].

    x F32 [.., V] is at most 0, and t at least -32. Without a weight each element counts 1.
    """
    inputs = [x, need, *([] if weight is None else [weight])]
    return _compound("threshold", inputs, need)


KeyValue = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Compaction:
    """Which of [context (S), block (K)] goes into cache row start[b] + r: made by `compaction`.

    Row r is context r while r < committed[b], then block row r - committed[b]. So start and
    committed say all; the other two spell it out for backends that gather.
    """

    start: Tensor  # int32 [B]
    committed: Tensor  # int32 [B]
    source: Tensor  # int32 [B, S + K]; behind the block's rows it repeats the last one
    positions: Tensor  # int32 [B, S + K]


def compaction(
    start: Tensor, committed: Tensor, step_tokens: Tensor, block_rows: Tensor
) -> Compaction:
    """The rows that a step writes into the drafter's caches; S and K are scalars []."""
    slots = start.shape[0]
    rows = p.iota(p.add(step_tokens, block_rows), KV_ROWS)
    row, before = p.reshape(rows, (1, KV_ROWS)), p.reshape(committed, (slots, 1))
    from_block = p.add(p.sub(row, before), step_tokens)
    chosen = p.where(p.less(row, before), row, from_block)
    source = p.minimum(chosen, p.sub(p.size(rows, 0), 1))
    positions = p.add(p.reshape(start, (slots, 1)), row)
    return Compaction(start, committed, source, positions)


def inject_kv(
    caches: KeyValue,
    context: KeyValue,
    block: KeyValue,
    place: Compaction,
    tables: KeyValue,
    norm: tuple[Tensor, float] | None,
) -> KeyValue:
    """Write one drafter layer's rows into its caches [B, N, C, D], in place; returns the caches.

    `context` [B, S, N * D] and `block` [B, K, N * D] are projected keys and values. Keys get their
    norm (weight [D], epsilon) and the rotary embedding of their position, which is their cache row;
    `tables` are its cos and sin [P, D/2]. What a backend writes behind the block is never read.
    """
    weight, eps = norm or (None, None)
    where = (place.start, place.committed, place.source, place.positions)
    inputs = [*caches, *context, *block, *where, *tables, *([] if weight is None else [weight])]
    results = [(cache.shape, cache.dtype) for cache in caches]
    key, value = current_graph().add_node("inject_kv", inputs, results, {"eps": eps})
    return key, value


def _compound(op: str, inputs: list[Tensor], like: Tensor, **attrs: Any) -> Tensor:
    return current_graph().add_node(op, inputs, [(like.shape, like.dtype)], attrs)[0]


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    full = p.cast(x, DType.F32)
    mean = p.div(p.reduce("sum", p.mul(full, full), keepdims=True), float(_int(x.shape[-1])))
    rms = p.unary("exp", p.mul(p.unary("log", p.add(mean, eps)), 0.5))
    return p.cast(p.mul(p.div(full, rms), weight), x.dtype)


def _rope(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = _int(x.shape[-1]) // 2
    table = (positions.shape[0], 1, *positions.shape[1:], half)
    c = p.cast(p.reshape(p.take(cos, positions, axis=0), table), x.dtype)
    s = p.cast(p.reshape(p.take(sin, positions, axis=0), table), x.dtype)
    axis = x.rank - 1
    lower = p.take(x, p.constant(np.arange(half), DType.I32), axis)
    upper = p.take(x, p.constant(np.arange(half, 2 * half), DType.I32), axis)
    rotated = [p.sub(p.mul(lower, c), p.mul(upper, s)), p.add(p.mul(upper, c), p.mul(lower, s))]
    return p.concat(rotated, axis, 2 * half)


def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return p.mul(p.mul(gate, p.unary("sigmoid", gate)), up)


def _prefix_count(matches: Tensor) -> Tensor:
    misses = p.cumsum(p.cast(p.unary("logical_not", matches), DType.I32))
    return p.reduce("sum", p.cast(p.less_equal(misses, 0), DType.I32))


def _threshold(x: Tensor, need: Tensor, *weight: Tensor) -> Tensor:
    found = p.add(p.mul(need, 0.0), LEAST_THRESHOLD)
    for digit in THRESHOLD_DIGITS:
        higher = p.add(found, digit)
        above = p.cast(p.less_equal(higher, x), DType.F32)
        total = p.reduce("sum", p.mul(weight[0], above) if weight else above, keepdims=True)
        found = p.add(found, p.mul(p.cast(p.less_equal(need, total), DType.F32), digit))
    return found


def _inject_kv(*inputs: Tensor, eps: float | None) -> KeyValue:
    """One update per cache: context and block are compacted by one gather before it."""
    caches, context, block = (inputs[i : i + 2] for i in (0, 2, 4))
    start, _, source, positions, cos, sin, *weight = inputs[6:]
    slots, heads, _, head_dim = caches[0].shape

    def compact(index: int) -> Tensor:
        both = p.concat([context[index], block[index]], 1, KV_ROWS)
        return p.reshape(p.gather_rows(both, source), (slots, KV_ROWS, heads, head_dim))

    key, value = compact(0), compact(1)
    if eps is not None:
        key = rms_norm(key, weight[0], eps)
    key, value = (p.transpose(x, (0, 2, 1, 3)) for x in (key, value))
    key = rope(key, positions, cos, sin)
    return p.kv_update(caches[0], key, start), p.kv_update(caches[1], value, start)


def _int(dim: int | str) -> int:
    if not isinstance(dim, int):
        raise TypeError(f"dim {dim!r} must be known")
    return dim


DECOMPOSITIONS: dict[str, Callable[..., Tensor | tuple[Tensor, ...]]] = {
    "inject_kv": _inject_kv,
    "rms_norm": _rms_norm,
    "rope": _rope,
    "swiglu": _swiglu,
    "prefix_count": _prefix_count,
    "threshold": _threshold,
}
