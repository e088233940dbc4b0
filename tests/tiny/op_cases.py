"""Uses of every op of the surface, with what NumPy says they give: one list for every lowering."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from dflash_trt import graph as g
from dflash_trt.config import LayerMask
from dflash_trt.graph import DType, LinearWeight, compounds

Array = npt.NDArray[Any]
RNG = np.random.default_rng(12)
X = RNG.normal(0, 2, (2, 3, 8)).astype(np.float32)
Y = RNG.normal(0, 2, (3, 1)).astype(np.float32)
POSITIVE = np.abs(X) + 0.1
WHOLE = RNG.integers(0, 50, (2, 7)).astype(np.int32)
WIDE = RNG.integers(0, 2**61, (2, 5)).astype(np.int64)
FLAGS = RNG.random((3, 6)) < 0.7
W1, W2 = (RNG.normal(size=(n, 8)).astype(np.float32) for n in (5, 3))
BIAS = RNG.normal(size=5).astype(np.float32)
TABLE = RNG.normal(size=(11, 4)).astype(np.float32)


@dataclass
class Case:
    """An op's use on `inputs`, and what numpy says it gives."""

    body: Callable[..., Any]
    inputs: dict[str, Array]
    wanted: list[Array]
    weights: dict[str, Array] = field(default_factory=dict)
    dims: dict[str, tuple[int | str, ...]] = field(default_factory=dict)


def simple(body: Callable[..., Any], *inputs: Array, wanted: Any, **options: Any) -> Case:
    named = {f"in{index}": array for index, array in enumerate(inputs)}
    results = wanted if isinstance(wanted, list) else [wanted]

    def call(**tensors: Any) -> Any:
        return body(*tensors.values())

    return Case(call, named, [np.asarray(result) for result in results], **options)


def softmax(x: Array) -> Array:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


QUERY, KEY, VALUE = (
    RNG.normal(size=(3, heads, rows, 8)).astype(np.float32)
    for heads, rows in ((6, 4), (2, 20), (2, 20))
)
LIVE = np.array([4, 9, 17], np.int32)


def attend(mask: LayerMask) -> Array:
    """By definition, one slot, head and query at a time."""
    out = np.zeros_like(QUERY)
    for b, length in enumerate(LIVE):
        for n in range(6):
            for s in range(4):
                at = length - 4 + s
                first = 0 if mask.window is None else max(at - mask.window + 1, 0)
                keys = list(range(first, at + 1 if mask.causal else length))
                scores = KEY[b, n // 3, keys] @ QUERY[b, n, s] / 8**0.5
                out[b, n, s] = softmax(scores) @ VALUE[b, n // 3, keys]
    return out


def attention_case(causal: bool, window: int | None) -> Case:
    mask = LayerMask(causal, window)
    return simple(
        lambda q, k, v, n: g.attention(q, k, v, n, mask), QUERY, KEY, VALUE, LIVE,
        wanted=attend(mask),
    )  # fmt: skip


def updated(start: list[int]) -> Array:
    cache = KEY.copy()
    for b, at in enumerate(start):
        cache[b, :, at : at + 4] = QUERY[b, :2]
    return cache


def rotated(x: Array, positions: Array, cos: Array, sin: Array) -> Array:
    c, s = (table[positions][:, None] for table in (cos, sin))
    half = x.shape[-1] // 2
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * c - b * s, b * c + a * s], axis=-1)


POSITIONS = np.array([[0, 1, 2, 3], [7, 8, 9, 10], [3, 3, 0, 12]], np.int32)
COS, SIN = (RNG.normal(size=(13, 4)).astype(np.float32) for _ in range(2))
NORM = (1 + RNG.normal(size=8)).astype(np.float32)


def normed(eps: float) -> Array:
    return X / np.sqrt((X.astype(np.float64) ** 2).mean(-1, keepdims=True) + eps) * NORM


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x.astype(np.float64)))


def linear_body(x: Any) -> Any:
    return g.linear(x, [LinearWeight("a", 5, "bias"), LinearWeight("b", 3)], DType.F32)


def cond_body(x: Any, flag: Any) -> Any:
    """`then` is right in either case, as it must be."""

    def always() -> Any:
        return g.where(flag, g.add(x, 1.0), g.mul(g.add(x, 1.0), 2.0))

    return g.cond(flag, always, lambda: g.mul(g.add(x, 1.0), 2.0))


DEPTHS = -np.abs(RNG.normal(0, 6, (2, 3, 40))).astype(np.float32)
DEPTHS[..., 7] = 0.0
DEPTHS[0, 0, 30:] = DEPTHS[0, 0, 12]  # ties stay or go together
SHARES = np.exp(DEPTHS)


def above(x: Any, need: Any, *weight: Any) -> Any:
    return g.cast(g.less_equal(compounds.threshold(x, need, *weight), x), DType.I32)


def highest(need: Array, weight: Array) -> Array:
    """The fewest of the largest that add up to what is needed."""
    order = np.argsort(-DEPTHS, -1, kind="stable")
    sums = np.take_along_axis(weight, order, -1).cumsum(-1, dtype=np.float64)
    last = (sums < need).sum(-1, keepdims=True)
    cut = np.take_along_axis(np.take_along_axis(DEPTHS, order, -1), last, -1)
    return (cut <= DEPTHS).astype(np.int32)


RANKS = np.array([[[15], [1], [40]], [[2], [17], [39]]], np.float32)
MASSES = SHARES.sum(-1, keepdims=True) * np.float32([[[0.99], [0.5], [1e-6]]])

X_LAST = RNG.normal(size=(2, 3, 7)).astype(np.float32)
AT = np.array([[[0, 6], [2, 2], [5, 1]], [[3, 4], [6, 0], [1, 1]]], np.int32)
NEW = RNG.normal(size=(2, 3, 2)).astype(np.float32)
NEW[..., 1] = np.where(AT[..., 0] == AT[..., 1], NEW[..., 0], NEW[..., 1])


def scattered() -> Array:
    out = X_LAST.copy()
    np.put_along_axis(out, AT, NEW, axis=-1)
    return out


KV_CACHES = [RNG.normal(size=(3, 2, 12, 8)).astype(np.float32) for _ in "kv"]
KV_CONTEXT = [RNG.normal(size=(3, 4, 16)).astype(np.float32) for _ in "kv"]
KV_BLOCK = [RNG.normal(size=(3, 3, 16)).astype(np.float32) for _ in "kv"]
KV_START, KV_COMMITTED = np.array([0, 4, 5], np.int32), np.array([4, 0, 1], np.int32)


def injected(eps: float | None) -> list[Array]:
    """Committed rows, then the block, then its last row again: this fallback's own garbage."""
    caches = [cache.copy() for cache in KV_CACHES]
    for b, (start, committed) in enumerate(zip(KV_START, KV_COMMITTED, strict=True)):
        at = start + np.arange(7)
        for cache, context, block in zip(caches, KV_CONTEXT, KV_BLOCK, strict=True):
            rows = np.concatenate([context[b, :committed], block[b]])
            rows = np.pad(rows, ((0, 7 - len(rows)), (0, 0)), "edge").reshape(7, 2, 8)
            if cache is caches[0]:
                if eps is not None:
                    rows = rows / np.sqrt((rows**2).mean(-1, keepdims=True) + eps) * NORM
                rows = rotated(rows.swapaxes(0, 1)[None], at[None], COS, SIN)[0].swapaxes(0, 1)
            cache[b, :, at] = rows
    return caches


def inject_body(*x: Any, eps: float | None = None) -> list[Any]:
    norm = None if eps is None else (x[10], eps)
    place = compounds.compaction(x[6], x[7], g.size(x[2], 1), g.size(x[4], 1))
    return list(compounds.inject_kv(x[:2], x[2:4], x[4:6], place, x[8:10], norm))


KV_INPUTS = [*KV_CACHES, *KV_CONTEXT, *KV_BLOCK, KV_START, KV_COMMITTED, COS, SIN]
KV_DIMS = {
    **{f"in{index}": ("b", 2, 12, 8) for index in (0, 1)},
    **{f"in{index}": ("b", "s", 16) for index in (2, 3)},
    **{f"in{index}": ("b", "k", 16) for index in (4, 5)},
    **{f"in{index}": ("b",) for index in (6, 7)},
}
UNARY = {"exp": np.exp, "log": np.log, "tanh": np.tanh, "sigmoid": sigmoid}
ROWS = np.array([[2, 0, 0, 1], [1, 1, 2, 2]], np.int32)
TIED = np.array([[1, 5, 5, 0], [2, 2, 2, 2]], np.float32)
TOP_THREE = [np.array([[5, 5, 1], [2, 2, 2]], np.float32),
             np.array([[1, 2, 0], [0, 1, 2]], np.int32)]  # fmt: skip
CASES: dict[str, Case] = {
    "add": simple(g.add, X, Y, wanted=X + Y),
    "gather_last": simple(g.gather_last, X_LAST, AT, wanted=np.take_along_axis(X_LAST, AT, -1)),
    "scatter_last": simple(g.scatter_last, X_LAST, AT, NEW, wanted=scattered()),
    "add-number": simple(lambda x: g.add(x, 3), WHOLE, wanted=WHOLE + 3),
    "sub": simple(g.sub, X, Y, wanted=X - Y),
    "mul": simple(g.mul, X, Y, wanted=X * Y),
    "mul-int64": simple(lambda x: g.mul(g.mod(x, 2**31 - 1), 2**31 - 2), WIDE,
                        wanted=WIDE % (2**31 - 1) * (2**31 - 2)),
    "div": simple(g.div, X, Y, wanted=X / Y),
    "floor_div": simple(lambda x: g.floor_div(x, 7), WHOLE, wanted=WHOLE // 7),
    "floor_div-int64": simple(lambda x: g.floor_div(x, 2**31 - 1), WIDE,
                              wanted=WIDE // (2**31 - 1)),
    "mod": simple(lambda x: g.mod(x, 7), WHOLE, wanted=WHOLE % 7),
    "minimum": simple(g.minimum, X, Y, wanted=np.minimum(X, Y)),
    "maximum": simple(lambda x: g.maximum(x, 9), WHOLE, wanted=np.maximum(WHOLE, 9)),
    "equal": simple(lambda x: g.equal(x, 9), WHOLE, wanted=WHOLE == 9),
    "less": simple(g.less, X, Y, wanted=X < Y),
    "less_equal": simple(lambda x: g.less_equal(x, 9), WHOLE, wanted=WHOLE <= 9),
    "logical_or": simple(g.logical_or, FLAGS, FLAGS[::-1].copy(), wanted=FLAGS | FLAGS[::-1]),
    "logical_and": simple(g.logical_and, FLAGS, FLAGS[::-1].copy(), wanted=FLAGS & FLAGS[::-1]),
    "logical_not": simple(lambda x: g.unary("logical_not", x), FLAGS, wanted=~FLAGS),
    **{name: simple(lambda x, n=name: g.unary(n, x), POSITIVE, wanted=fn(POSITIVE))
       for name, fn in UNARY.items()},
    "cast-to-int": simple(lambda x: g.cast(x, DType.I32), X, wanted=X.astype(np.int32)),
    "cast-to-int64": simple(lambda x: g.cast(x, DType.I64), WHOLE, wanted=WHOLE.astype(np.int64)),
    "cast-to-float": simple(lambda x: g.cast(x, DType.F32), FLAGS,
                            wanted=FLAGS.astype(np.float32)),
    "cast-act": simple(lambda x: g.cast(g.cast(x, DType.ACT), DType.F32), X, wanted=X),
    "where": simple(lambda c, a, b: g.where(c, a, b), FLAGS[:, :1], X[0], Y,
                    wanted=np.where(FLAGS[:, :1], X[0], Y)),
    "size": simple(lambda x: g.size(x, 1), X, wanted=np.int32(3), dims={"in0": ("b", "s", 8)}),
    "iota": simple(lambda x: g.iota(g.add(g.size(x, 1), 2), "n"), WHOLE,
                   wanted=np.arange(9, dtype=np.int32), dims={"in0": ("b", "s")}),
    "reshape-split": simple(lambda x: g.reshape(x, ("b", "s", 2, 4)), X,
                            wanted=X.reshape(2, 3, 2, 4), dims={"in0": ("b", "s", 8)}),
    "reshape-merge": simple(lambda x: g.reshape(x, ("b", "all")), X, wanted=X.reshape(2, 24),
                            dims={"in0": ("b", "s", 8)}),
    "transpose": simple(lambda x: g.transpose(x, (2, 0, 1)), X, wanted=X.transpose(2, 0, 1)),
    "transpose-of-reshape": simple(
        lambda x: g.transpose(g.reshape(x, ("b", "s", 2, 4)), (0, 2, 1, 3)), X,
        wanted=X.reshape(2, 3, 2, 4).transpose(0, 2, 1, 3), dims={"in0": ("b", "s", 8)}),
    "reshape-of-transpose": simple(
        lambda x: g.reshape(g.transpose(x, (1, 0, 2)), ("s", "all")), X,
        wanted=X.transpose(1, 0, 2).reshape(3, 16), dims={"in0": ("b", "s", 8)}),
    "transpose-of-read-reshape": simple(
        lambda x: [g.transpose(y := g.reshape(x, ("b", 12, 2)), (0, 2, 1)), g.mul(y, 2.0)], X,
        wanted=[X.reshape(2, 12, 2).transpose(0, 2, 1), X.reshape(2, 12, 2) * 2]),
    "concat": simple(lambda a, b: g.concat([a, b, a], 1, 9), X, X + 1,
                     wanted=np.concatenate([X, X + 1, X], 1)),
    "gather_rows": simple(g.gather_rows, X, ROWS,
                          wanted=np.stack([X[b][ROWS[b]] for b in range(2)])),
    "gather_rows-ints": simple(g.gather_rows, WHOLE, ROWS,
                               wanted=np.take_along_axis(WHOLE, ROWS, 1)),
    "take": simple(lambda x, i: g.take(x, i, 1), X, np.array([2, 0], np.int32),
                   wanted=X[:, [2, 0]]),
    "take-rows-of-a-table": simple(lambda x, i: g.take(x, i, 0), TABLE, ROWS, wanted=TABLE[ROWS]),
    "reduce_sum": simple(lambda x: g.reduce("sum", x), X, wanted=X.sum(-1)),
    "reduce_max": simple(lambda x: g.reduce("max", x, keepdims=True), X,
                         wanted=X.max(-1, keepdims=True)),
    "reduce_all_max": simple(g.reduce_all, WHOLE, wanted=WHOLE.max()),
    "cumsum": simple(g.cumsum, WHOLE, wanted=WHOLE.cumsum(-1).astype(np.int32)),
    "argmax": simple(g.argmax, TIED, wanted=np.array([1, 0], np.int32)),
    # On TensorRT a k that is computed would stop the capture of CUDA graphs.
    "topk-computed": simple(lambda x, k: list(g.topk(x, k, "k")), TIED, np.array(3, np.int32),
                            wanted=TOP_THREE),
    "topk": simple(lambda x: list(g.topk(x, g.constant(3, DType.I32), 3)), TIED, wanted=TOP_THREE),
    "constant": simple(lambda x: g.mul(x, g.constant(TABLE[:8, 0], DType.F32)), X,
                       wanted=X * TABLE[:8, 0]),
    "param": simple(lambda x: g.mul(x, g.param("p", (8,))), X, wanted=X * NORM,
                    weights={"p": NORM}),
    "embedding": simple(lambda i: g.embedding(i, "t", 11, 4), ROWS, wanted=TABLE[ROWS],
                        weights={"t": TABLE}),
    "linear": simple(linear_body, X, wanted=[X @ W1.T + BIAS, X @ W2.T],
                     weights={"a": W1, "b": W2, "bias": BIAS}),
    "kv_update": simple(lambda c, u, s: g.kv_update(c, u, s), KEY, QUERY[:, :2].copy(),
                        np.array([0, 16, 5], np.int32), wanted=updated([0, 16, 5]),
                        dims={"in0": ("b", 2, 20, 8), "in1": ("b", 2, "r", 8), "in2": ("b",)}),
    "attention": attention_case(True, None),
    "attention-bidirectional": attention_case(False, None),
    "attention-causal-window": attention_case(True, 3),
    "attention-bidirectional-window": attention_case(False, 5),
    "attention-window-of-one": attention_case(True, 1),
    "rms_norm": simple(lambda x, w: compounds.rms_norm(x, w, 1e-6), X, NORM, wanted=normed(1e-6)),
    "rms_norm-epsilon": simple(lambda x, w: compounds.rms_norm(x, w, 0.5), X, NORM,
                               wanted=normed(0.5)),
    "rope": simple(compounds.rope, QUERY, POSITIONS, COS, SIN,
                   wanted=rotated(QUERY, POSITIONS, COS, SIN),
                   dims={"in0": ("b", "n", "s", 8), "in1": ("b", "s")}),
    "inject_kv": simple(partial(inject_body, eps=0.1), *KV_INPUTS, NORM, wanted=injected(0.1),
                        dims=KV_DIMS),
    "inject_kv-without-norm": simple(inject_body, *KV_INPUTS, wanted=injected(None),
                                     dims=KV_DIMS),
    "swiglu": simple(compounds.swiglu, X, X[::-1].copy(), wanted=X * sigmoid(X) * X[::-1]),
    "prefix_count": simple(compounds.prefix_count,
                           np.array([[1, 1, 0, 1], [0, 1, 1, 1], [1, 1, 1, 1]], bool),
                           wanted=np.array([2, 0, 4], np.int32)),
    "threshold-of-ranks": simple(above, DEPTHS, RANKS, wanted=highest(RANKS, SHARES * 0 + 1)),
    "threshold-of-masses": simple(above, DEPTHS, MASSES, SHARES, wanted=highest(MASSES, SHARES)),
    "cond-then": simple(cond_body, X, np.array(True), wanted=X + 1),
    "cond-otherwise": simple(cond_body, X, np.array(False), wanted=(X + 1) * 2),
}  # fmt: skip


def check(found: list[Array], wanted: list[Array], tolerance: float = 2e-5) -> None:
    """Fail unless the arrays are equal, floating point up to `tolerance`."""
    assert len(found) == len(wanted)
    for a, b in zip(found, wanted, strict=True):
        assert a.shape == b.shape
        if np.issubdtype(b.dtype, np.floating):
            np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)
        else:
            assert a.dtype == b.dtype
            np.testing.assert_array_equal(a, b)
