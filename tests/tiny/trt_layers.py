"""What each arithmetic layer of TensorRT computes, from its documentation; strict about the rest.

A layer takes its TensorRT object and its inputs (None where an optional one is not set).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tiny.trt_types import (
    BOOL,
    FLOATS,
    INTEGERS,
    Array,
    EvaluationError,
    narrow,
    numpy_type,
    require,
    wide,
)

Inputs = Sequence[Array | None]
NUMBERS = FLOATS | INTEGERS
BOOLS = frozenset({BOOL})
MAX_TOPK = 3840


def of(inputs: Inputs, index: int) -> Array:
    """An input that must be there."""
    value = inputs[index] if index < len(inputs) else None
    if value is None:
        raise EvaluationError(f"input {index} is missing")
    return value


def optional(inputs: Inputs, index: int) -> Array | None:
    """An input that may be missing."""
    return inputs[index] if index < len(inputs) else None


def same_rank(*xs: Array) -> None:
    """Broadcasting in TensorRT: the same rank, lengths equal or one."""
    shapes = [x.shape for x in xs]
    if len({len(shape) for shape in shapes}) > 1:
        raise EvaluationError(f"ranks differ: {shapes}")
    for lengths in zip(*shapes, strict=True):
        if len({*lengths, 1}) > 2:
            raise EvaluationError(f"{shapes} do not match")


def same_type(*xs: Array) -> np.dtype[Any]:
    """A strongly typed network converts nothing by itself."""
    if len({x.dtype for x in xs}) > 1:
        raise EvaluationError(f"types differ: {[str(x.dtype) for x in xs]}")
    return xs[0].dtype


def of_type(what: str, x: Array, allowed: frozenset[np.dtype[Any]]) -> None:
    """Refuse a type that a layer is not documented for."""
    if x.dtype not in allowed:
        raise EvaluationError(f"{what} of {x.dtype}")


def axis_of(mask: int, rank: int) -> int:
    """The axis of a bit mask with one bit."""
    axes = axes_of(mask, rank)
    require(len(axes) == 1, f"axes {mask:b}: exactly one is allowed")
    return axes[0]


def axes_of(mask: int, rank: int) -> tuple[int, ...]:
    """The axes of a bit mask."""
    require(0 < mask < 1 << rank, f"axes {mask:b} of a tensor of rank {rank}")
    return tuple(axis for axis in range(rank) if mask >> axis & 1)


LOGIC = {"AND": np.logical_and, "OR": np.logical_or, "XOR": np.logical_xor}
COMPARE = {"EQUAL": np.equal, "GREATER": np.greater, "LESS": np.less}
ARITHMETIC = {
    "SUM": np.add, "PROD": np.multiply, "MAX": np.maximum, "MIN": np.minimum, "SUB": np.subtract,
}  # fmt: skip
FLOATING = ARITHMETIC | {"DIV": np.divide, "POW": np.power}


def elementwise(layer: Any, inputs: Inputs) -> list[Array]:
    """IElementWiseLayer."""
    a, b = of(inputs, 0), of(inputs, 1)
    dtype, op = same_type(a, b), layer.op.name
    same_rank(a, b)
    if op in LOGIC:
        of_type(op, a, BOOLS)
        return [LOGIC[op](a, b)]
    of_type(op, a, NUMBERS)
    if op in COMPARE:
        return [COMPARE[op](a, b)]
    return [_integer(op, a, b) if dtype in INTEGERS else _floating(op, wide(a), wide(b))]


def _floating(op: str, a: Array, b: Array) -> Array:
    require(op in FLOATING, f"{op} of floating point is not evaluated")
    return np.asarray(FLOATING[op](a, b))


def _integer(op: str, a: Array, b: Array) -> Array:
    if op in ("DIV", "FLOOR_DIV"):
        require((b != 0).all(), f"{op} by zero")
        # How DIV rounds a negative quotient is not documented.
        require(op == "FLOOR_DIV" or ((a >= 0).all() and (b > 0).all()), "DIV of negative integers")
        return np.asarray(np.floor_divide(a, b))
    require(op in ARITHMETIC, f"{op} of integers is not evaluated")
    exact = ARITHMETIC[op](a.astype(np.float64), b.astype(np.float64))
    limits = np.iinfo(a.dtype)
    require(((exact <= limits.max) & (exact >= limits.min)).all(), "an integer overflow")
    return np.asarray(ARITHMETIC[op](a, b))


UNARY = {
    "EXP": np.exp, "LOG": np.log, "SQRT": np.sqrt, "RECIP": np.reciprocal, "ABS": np.abs,
    "NEG": np.negative, "SIN": np.sin, "COS": np.cos, "FLOOR": np.floor, "CEIL": np.ceil,
    "ROUND": np.rint,
}  # fmt: skip
UNARY_INTEGERS = frozenset({"ABS", "NEG"})


def unary(layer: Any, inputs: Inputs) -> list[Array]:
    """IUnaryLayer."""
    x, op = of(inputs, 0), layer.op.name
    if op == "NOT":
        of_type(op, x, BOOLS)
        return [~x]
    require(op in UNARY, f"{op} is not evaluated")
    of_type(op, x, NUMBERS if op in UNARY_INTEGERS else FLOATS)
    return [np.asarray(UNARY[op](wide(x)))]


ACTIVATION = {
    "RELU": lambda x: np.maximum(x, 0.0),
    "SIGMOID": lambda x: 0.5 * (1 + np.tanh(0.5 * x)),
    "TANH": np.tanh,
}


def activation(layer: Any, inputs: Inputs) -> list[Array]:
    """IActivationLayer."""
    x = of(inputs, 0)
    op = layer.type.name
    require(op in ACTIVATION, f"activation {op} is not evaluated")
    of_type(op, x, FLOATS)
    return [np.asarray(ACTIVATION[op](wide(x)))]


def cast(layer: Any, inputs: Inputs) -> list[Array]:
    """ICastLayer: floats round to the nearest float, and toward zero to an integer."""
    x, to = of(inputs, 0), numpy_type(layer.to_type)
    of_type("cast", x, NUMBERS | BOOLS)
    if to in FLOATS:
        return [narrow(x.astype(np.float64), to)]
    if to in INTEGERS:
        value = np.trunc(wide(x)) if x.dtype in FLOATS else x
        limits = np.iinfo(to)
        fits = (value >= limits.min) & (value <= limits.max)
        require(fits.all(), "cast: a value does not fit")
        return [value.astype(to)]
    require(to == BOOL, f"cast to {layer.to_type.name}")
    return [x.astype(np.bool_)]


def identity(layer: Any, inputs: Inputs) -> list[Array]:
    """IIdentityLayer, without its conversions."""
    return [of(inputs, 0)]


def select(layer: Any, inputs: Inputs) -> list[Array]:
    """ISelectLayer."""
    condition, a, b = (of(inputs, index) for index in range(3))
    of_type("select by a condition", condition, BOOLS)
    same_type(a, b)
    same_rank(condition, a, b)
    return [np.where(condition, a, b)]


def reduce(layer: Any, inputs: Inputs) -> list[Array]:
    """IReduceLayer: floats are summed exactly and rounded once."""
    x, op = of(inputs, 0), layer.op.name
    of_type("reduction", x, NUMBERS)
    functions = {"SUM": np.sum, "PROD": np.prod, "MAX": np.max, "MIN": np.min, "AVG": np.mean}
    require(op in functions, f"reduction {op} is not evaluated")
    require(op != "AVG" or x.dtype in FLOATS, "average of integers")
    axes = axes_of(layer.axes, x.ndim)
    result = np.asarray(functions[op](wide(x), axis=axes, keepdims=layer.keep_dims))
    return [_fits(result, x.dtype)]


def cumulative(layer: Any, inputs: Inputs) -> list[Array]:
    """ICumulativeLayer."""
    x, axis = of(inputs, 0), of(inputs, 1)
    require(layer.op.name == "SUM", "only running sums are evaluated")
    of_type("running sum", x, NUMBERS)
    require(axis.shape == () and 0 <= axis < x.ndim, f"running sum along axis {axis}")
    values = np.flip(wide(x), axis) if layer.reverse else wide(x)
    sums = values.cumsum(axis=int(axis))
    result = sums - values if layer.exclusive else sums
    return [_fits(np.flip(result, axis) if layer.reverse else result, x.dtype)]


def _fits(result: Array, dtype: np.dtype[Any]) -> Array:
    """Integer sums, which NumPy made in 64 bits, in their own type."""
    if dtype not in INTEGERS:
        return result
    limits = np.iinfo(dtype)
    require(((result >= limits.min) & (result <= limits.max)).all(), "an integer overflow")
    return result.astype(dtype)


def softmax(layer: Any, inputs: Inputs) -> list[Array]:
    """ISoftMaxLayer."""
    x = of(inputs, 0)
    of_type("softmax", x, FLOATS)
    return [normalized(wide(x), axis_of(layer.axes, x.ndim))]


def normalized(x: Array, axis: int) -> Array:
    """Softmax."""
    e = np.exp(x - x.max(axis, keepdims=True))
    return np.asarray(e / e.sum(axis, keepdims=True))


def topk(layer: Any, inputs: Inputs, ties: str) -> list[Array]:
    """ITopKLayer. Which of equal values comes first is not documented: `ties` chooses.

    "lower" index first is ONNX's rule; "higher" shows what must not depend on it.
    """
    x = of(inputs, 0)
    axis = axis_of(layer.axes, x.ndim)
    dynamic = optional(inputs, 1)
    if dynamic is not None:
        require(dynamic.dtype in INTEGERS and dynamic.size == 1, "k must be one integer")
    k = layer.k if dynamic is None else int(dynamic.reshape(()))
    of_type("top-k", x, NUMBERS)
    require(axis >= x.ndim - 4, "top-k: the axis must be one of the last four")
    require(1 <= k <= min(x.shape[axis], MAX_TOPK), f"top {k} of {x.shape[axis]}")
    require(not np.isnan(wide(x)).any(), "top-k of NaN")
    require(layer.op.name == "MAX", "smallest elements are not evaluated")
    keys = np.moveaxis(wide(x), axis, -1)
    if ties == "lower":
        order = np.argsort(-keys, axis=-1, kind="stable")
    else:
        order = np.flip(np.argsort(keys, axis=-1, kind="stable"), -1)
    indices = np.moveaxis(order[..., :k], -1, axis)
    values = np.take_along_axis(x, indices, axis)
    return [values, indices.astype(numpy_type(layer.indices_type))]


def matrix_multiply(layer: Any, inputs: Inputs) -> list[Array]:
    """IMatrixMultiplyLayer: exact sums, rounded once."""
    a, b = of(inputs, 0), of(inputs, 1)
    same_type(a, b)
    of_type("matrix product", a, FLOATS)
    operands = []
    for x, op in ((a, layer.op0.name), (b, layer.op1.name)):
        require(op in ("NONE", "TRANSPOSE") and x.ndim >= 2, f"operand {x.shape} as {op}")
        operands.append(wide(x).swapaxes(-1, -2) if op == "TRANSPOSE" else wide(x))
    left, right = operands
    same_rank(left[..., 0, 0], right[..., 0, 0])
    require(left.shape[-1] == right.shape[-2], f"product of {left.shape} and {right.shape}")
    return [left @ right]


def assertion(layer: Any, inputs: Inputs) -> list[Array]:
    """IAssertionLayer."""
    require(of(inputs, 0).all(), f"assertion: {layer.message}")
    return []
