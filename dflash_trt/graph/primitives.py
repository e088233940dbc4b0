"""Primitive ops: every backend must lower each of them. Shapes are inferred; nothing is computed.

Letters in shape comments: B slots, S step tokens, R rows, C capacity, V vocabulary, H hidden,
N heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from dflash_trt.config import LayerMask
from dflash_trt.errors import GraphError
from dflash_trt.graph.graph import Dim, DType, Graph, Shape, Tensor, current_graph, tracing

COMPARE = frozenset({"equal", "less", "less_equal", "logical_and", "logical_or"})
UNARY = frozenset({"exp", "log", "tanh", "sigmoid", "logical_not"})

_NUMPY = {DType.F32: np.float32, DType.ACT: np.float32, DType.I32: np.int32, DType.I64: np.int64}


@dataclass(frozen=True)
class LinearWeight:
    """A weight [out, in] by name, with an optional bias [out] by name."""

    name: str
    out_features: int
    bias: str | None = None


def param(name: str, shape: tuple[int, ...], dtype: DType = DType.F32) -> Tensor:
    """A small parameter (a norm's weight) by its canonical name."""
    return _one("param", [], shape, dtype, name=name)


def constant(value: object, dtype: DType) -> Tensor:
    """A literal tensor. Tables that nets compute (rotary cos/sin) are constants too."""
    array = np.asarray(value, dtype=np.bool_ if dtype is DType.BOOL else _NUMPY[dtype])
    return _one("constant", [], array.shape, dtype, value=array)


def linear(x: Tensor, weights: Sequence[LinearWeight], dtype: DType = DType.ACT) -> list[Tensor]:
    """Products x [.., in] @ w.T [.., out] of one input with several weights, one result each.

    Named together so that a backend may run them as one matrix product.
    """
    results = [((*x.shape[:-1], w.out_features), dtype) for w in weights]
    return list(current_graph().add_node("linear", [x], results, {"weights": tuple(weights)}))


def embedding(ids: Tensor, name: str, vocab_size: int, hidden_size: int) -> Tensor:
    """Rows of the table `name` [V, H]; ids [..] must lie in 0..V-1."""
    attrs = {"name": name, "vocab_size": vocab_size, "hidden_size": hidden_size}
    result = ((*ids.shape, hidden_size), DType.ACT)
    return current_graph().add_node("embedding", [ids], [result], attrs)[0]


def binary(op: str, a: Tensor, b: Tensor | float | int) -> Tensor:
    """Elementwise arithmetic with broadcasting; a Python number takes the dtype of `a`."""
    other = b if isinstance(b, Tensor) else constant(b, a.dtype)
    if other.dtype is not a.dtype:
        raise GraphError(f"{op}: {a.dtype} and {other.dtype} do not mix; cast one of them")
    dtype = DType.BOOL if op in COMPARE else a.dtype
    return _one(op, [a, other], broadcast(a.shape, other.shape), dtype)


def add(a: Tensor, b: Tensor | float | int) -> Tensor:
    """a + b."""
    return binary("add", a, b)


def sub(a: Tensor, b: Tensor | float | int) -> Tensor:
    """a - b."""
    return binary("sub", a, b)


def mul(a: Tensor, b: Tensor | float | int) -> Tensor:
    """a * b."""
    return binary("mul", a, b)


def div(a: Tensor, b: Tensor | float | int) -> Tensor:
    """a / b, floating point."""
    return binary("div", a, b)


def floor_div(a: Tensor, b: Tensor | int) -> Tensor:
    """Integer division of non-negative numbers."""
    return binary("floor_div", a, b)


def mod(a: Tensor, b: Tensor | int) -> Tensor:
    """Remainder of non-negative integers."""
    return binary("mod", a, b)


def minimum(a: Tensor, b: Tensor | float | int) -> Tensor:
    """Elementwise smaller."""
    return binary("minimum", a, b)


def maximum(a: Tensor, b: Tensor | float | int) -> Tensor:
    """Elementwise larger."""
    return binary("maximum", a, b)


def equal(a: Tensor, b: Tensor | int) -> Tensor:
    """a == b."""
    return binary("equal", a, b)


def less(a: Tensor, b: Tensor | float | int) -> Tensor:
    """a < b."""
    return binary("less", a, b)


def less_equal(a: Tensor, b: Tensor | float | int) -> Tensor:
    """a <= b."""
    return binary("less_equal", a, b)


def logical_and(a: Tensor, b: Tensor) -> Tensor:
    """a and b, booleans."""
    return binary("logical_and", a, b)


def logical_or(a: Tensor, b: Tensor) -> Tensor:
    """a or b, booleans."""
    return binary("logical_or", a, b)


def unary(op: str, x: Tensor) -> Tensor:
    """Elementwise function of `UNARY`."""
    return _one(op, [x], x.shape, x.dtype)


def cast(x: Tensor, dtype: DType) -> Tensor:
    """x in another type; float to int truncates toward zero."""
    return x if x.dtype is dtype else _one("cast", [x], x.shape, dtype)


def where(condition: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """a where the condition holds, else b."""
    shape = broadcast(condition.shape, broadcast(a.shape, b.shape))
    return _one("where", [condition, a, b], shape, a.dtype)


def size(x: Tensor, axis: int) -> Tensor:
    """Length of an axis as an int32 scalar []."""
    return _one("size", [x], (), DType.I32, axis=axis)


def iota(length: Tensor, dim: Dim) -> Tensor:
    """0, 1, .. length-1 as int32 [dim]; `length` is a scalar computed from sizes."""
    return _one("iota", [length], (dim,), DType.I32)


def reshape(x: Tensor, shape: Shape) -> Tensor:
    """x with split or merged axes. Named dims must be x's own; one other dim may be merged."""
    return _one("reshape", [x], shape, x.dtype)


def transpose(x: Tensor, perm: tuple[int, ...]) -> Tensor:
    """x with permuted axes."""
    return _one("transpose", [x], tuple(x.shape[i] for i in perm), x.dtype, perm=perm)


def concat(xs: Sequence[Tensor], axis: int, dim: Dim) -> Tensor:
    """xs joined along `axis`, whose new length is called `dim`."""
    shape = list(xs[0].shape)
    shape[axis] = dim
    return _one("concat", xs, tuple(shape), xs[0].dtype, axis=axis)


def gather_rows(x: Tensor, rows: Tensor) -> Tensor:
    """For each b: x[b, rows[b]]; x [B, S, ..], rows int32 [B, R] -> [B, R, ..]."""
    return _one("gather_rows", [x, rows], (*rows.shape, *x.shape[2:]), x.dtype)


def take(x: Tensor, index: Tensor, axis: int) -> Tensor:
    """x at int32 positions [R] of one axis, the same for every other axis."""
    shape = (*x.shape[:axis], *index.shape, *x.shape[axis + 1 :])
    return _one("take", [x, index], shape, x.dtype, axis=axis)


def gather_last(x: Tensor, index: Tensor) -> Tensor:
    """x [.., V] at int32 positions [.., P] of the last axis, row by row."""
    return _one("gather_last", [x, index], index.shape, x.dtype)


def scatter_last(x: Tensor, index: Tensor, values: Tensor) -> Tensor:
    """x [.., V] with values [.., P] written at positions [.., P] of the last axis, row by row.

    A position may repeat only with equal values.
    """
    return _one("scatter_last", [x, index, values], x.shape, x.dtype)


def reduce(op: str, x: Tensor, *, keepdims: bool = False) -> Tensor:
    """`sum` or `max` over the last axis."""
    shape = (*x.shape[:-1], 1) if keepdims else x.shape[:-1]
    return _one(f"reduce_{op}", [x], shape, x.dtype, keepdims=keepdims)


def reduce_all(x: Tensor) -> Tensor:
    """Largest element of x as a scalar []."""
    return _one("reduce_all_max", [x], (), x.dtype)


def cumsum(x: Tensor) -> Tensor:
    """Running sum over the last axis, the element itself counted."""
    return _one("cumsum", [x], x.shape, x.dtype)


def argmax(x: Tensor) -> Tensor:
    """First index of the largest value over the last axis, int32: ties go to the lower id."""
    return _one("argmax", [x], x.shape[:-1], DType.I32)


def topk(x: Tensor, k: Tensor, dim: Dim) -> tuple[Tensor, Tensor]:
    """The k largest of the last axis, sorted, ties by lower index: values and int32 indices."""
    shape = (*x.shape[:-1], dim)
    results = [(shape, x.dtype), (shape, DType.I32)]
    values, indices = current_graph().add_node("topk", [x, k], results)
    return values, indices


def kv_update(cache: Tensor, update: Tensor, start: Tensor) -> Tensor:
    """The cache [B, N, C, D] with `update` [B, N, R, D] written in place at rows start[b]..

    The cache must be a graph input and the result a graph output, bound to one memory; each cache
    is updated once per step (a TensorRT rule). start + R must not pass C.
    """
    return _one("kv_update", [cache, update, start], cache.shape, cache.dtype)


def attention(
    query: Tensor, key: Tensor, value: Tensor, kv_length: Tensor, mask: LayerMask
) -> Tensor:
    """softmax(q k^T / sqrt(D)) v over each row's first kv_length[b] keys.

    query [B, N, S, D]; key, value: caches [B, Nkv, C, D]; kv_length int32 [B]. Query s sits at
    position kv_length - S + s. `mask.causal`: keys up to that position only; `mask.window`: keys
    less than that many positions before it.
    """
    inputs = [query, key, value, kv_length]
    return _one("attention", inputs, query.shape, query.dtype, mask=mask)


def cond(predicate: Tensor, then: Callable[[], Tensor], otherwise: Callable[[], Tensor]) -> Tensor:
    """`then()`, or `otherwise()` where the scalar boolean says that this cheaper way will do.

    A backend may compute `then()` always, so it MUST be right in either case. The predicate is for
    the others alone.
    """
    graphs = []
    for branch in (then, otherwise):
        graph = Graph(branch.__name__, parent=current_graph())
        with tracing(graph):
            graph.add_output("result", branch())
        graphs.append(graph)
    result = graphs[0].outputs["result"]
    attrs = {"then": graphs[0], "otherwise": graphs[1]}
    return current_graph().add_node("cond", [predicate], [(result.shape, result.dtype)], attrs)[0]


def broadcast(a: Shape, b: Shape) -> Shape:
    """Numpy's rule over named dims: equal, or one of them 1."""
    rank = max(len(a), len(b))
    left = (1,) * (rank - len(a)) + a
    right = (1,) * (rank - len(b)) + b
    out: list[Dim] = []
    for x, y in zip(left, right, strict=True):
        if x != y and 1 not in (x, y):
            raise GraphError(f"shapes {a} and {b} do not broadcast")
        out.append(y if x == 1 else x)
    return tuple(out)


def _one(op: str, inputs: Sequence[Tensor], shape: Shape, dtype: DType, **attrs: object) -> Tensor:
    return current_graph().add_node(op, inputs, [(shape, dtype)], attrs)[0]
