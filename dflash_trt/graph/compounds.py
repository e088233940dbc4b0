"""Compound ops: one node each, which a backend claims whole or which is decomposed here.

Each decomposition is plain primitives, so it is the fallback and the oracle of every native
layer, ONNX operator and plugin that claims the op.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

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


def _int(dim: int | str) -> int:
    if not isinstance(dim, int):
        raise TypeError(f"dim {dim!r} must be known")
    return dim


DECOMPOSITIONS: dict[str, Callable[..., Tensor]] = {
    "rms_norm": _rms_norm,
    "rope": _rope,
    "swiglu": _swiglu,
    "prefix_count": _prefix_count,
}
