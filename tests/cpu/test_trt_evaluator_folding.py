"""The evaluator against TensorRT itself, as far as TensorRT computes without a GPU.

TensorRT works out the shapes of a network while it is defined, with arithmetic of its own. So a
small result can be asked for by making it the dims of a tensor: here 1 for each element that is
what the evaluator says, and 2 for each that is not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorrt_rtx as trt

from tiny.trt_networks import HandMade
from tiny.trt_types import TYPES, Array

RNG = np.random.default_rng(10)
OPS, UNARY, REDUCE = trt.ElementWiseOperation, trt.UnaryOperation, trt.ReduceOperation
PRIME = 2**31 - 1
ULPS = np.float32(3e-7)  # for functions that are rounded otherwise here and there

INTS, SMALL, WIDE = (
    RNG.integers(low, high, 8).astype(np.int64) for low, high in ((-50, 50), (1, 9), (2**60, 2**62))
)
FLOATS = np.array([0.3, 1.5, 2.5, 3.75, 0.01, 40.0, 7.0, 1.0], np.float32)
GRID = np.arange(1, 7, dtype=np.int64).reshape(2, 3)
PAIRS = np.array([[2, 0], [1, 1]], np.int32)

Layer = Callable[..., Any]


def binary(op: str) -> Layer:
    return lambda net, a, b: net.add_elementwise(a, b, getattr(OPS, op))


def unary(op: str) -> Layer:
    return lambda net, x: net.add_unary(x, getattr(UNARY, op))


def activation(op: str) -> Layer:
    return lambda net, x: net.add_activation(x, getattr(trt.ActivationType, op))


def cast(*types: Any) -> Layer:
    def layer(net: Any, x: Any) -> Any:
        for to in types:
            made = net.add_cast(x, to)
            x = made.get_output(0)
        return made

    return layer


def gather(mode: str, axis: int = 0, batch: int = 0) -> Layer:
    def layer(net: Any, x: Any, index: Any) -> Any:
        made = net.add_gather_v2(x, index, getattr(trt.GatherMode, mode))
        made.axis, made.num_elementwise_dims = axis, batch
        return made

    return layer


def shuffle(net: Any, x: Any) -> Any:
    made = net.add_shuffle(x)
    made.first_transpose, made.reshape_dims, made.second_transpose = (1, 0), (0, 1, -1), (2, 0, 1)
    return made


def concatenation(net: Any, a: Any, b: Any) -> Any:
    made = net.add_concatenation([a, b])
    made.axis = 1
    return made


def fill(net: Any, *inputs: Any) -> Any:
    made = net.add_fill((1,), trt.FillOperation.LINSPACE, trt.int64)
    for index, tensor in enumerate(inputs):
        made.set_input(index, tensor)
    return made


def reduce(op: str, axes: int, keep: bool) -> Layer:
    return lambda net, x: net.add_reduce(x, getattr(REDUCE, op), axes, keep)


def product(net: Any, x: Any) -> Any:
    none, turned = trt.MatrixOperation.NONE, trt.MatrixOperation.TRANSPOSE
    return net.add_matrix_multiply(x, none, x, turned)


EXACT: dict[str, tuple[Any, ...]] = {
    **{f"{op}, integers": (binary(op), INTS, SMALL)
       for op in ("SUM", "SUB", "PROD", "MAX", "MIN", "FLOOR_DIV", "EQUAL", "LESS", "GREATER")},
    **{f"{op}, floats": (binary(op), FLOATS, FLOATS[::-1].copy())
       for op in ("SUM", "SUB", "PROD", "DIV", "MAX", "MIN", "LESS")},
    "FLOOR_DIV, int32": (binary("FLOOR_DIV"), INTS.astype(np.int32), SMALL.astype(np.int32)),
    "FLOOR_DIV, 62 bits": (binary("FLOOR_DIV"), WIDE, np.array([PRIME])),
    "PROD, 62 bits": (binary("PROD"), WIDE % PRIME, np.array([PRIME - 1])),
    "SUB, 62 bits": (binary("SUB"), WIDE, WIDE[::-1].copy()),
    "AND": (binary("AND"), INTS > 0, SMALL > 4),
    "OR": (binary("OR"), INTS > 0, SMALL > 4),
    "NOT": (unary("NOT"), INTS > 0),
    **{op: (unary(op), FLOATS) for op in ("SQRT", "FLOOR", "NEG", "ABS", "ROUND")},
    "cast: float to int": (cast(trt.int32), FLOATS - 3),
    "cast: wide int to float": (cast(trt.float32), WIDE),
    "cast: int to wide int": (cast(trt.int64), INTS.astype(np.int32)),
    "cast: bool to int": (cast(trt.int32), INTS > 0),
    "cast: to bfloat16": (cast(trt.bfloat16, trt.float32), FLOATS),
    "cast: to float16": (cast(trt.float16, trt.float32), FLOATS),
    "cast: from bfloat16": (cast(trt.float32), FLOATS.astype(TYPES["BF16"])),
    "select": (lambda net, c, a, b: net.add_select(c, a, b), INTS > 0, INTS, SMALL[:1]),
    "reduce: last axis": (reduce("SUM", 2, False), GRID),
    "reduce: first axis, kept": (reduce("MAX", 1, True), GRID),
    "shuffle": (shuffle, GRID),
    "slice": (lambda net, x: net.add_slice(x, (1, 2), (2, 2), (-1, -2)), GRID),
    "concatenation": (concatenation, GRID, GRID[:, :1]),
    "gather": (gather("DEFAULT", 1), GRID, np.array([2, 0], np.int32)),
    "gather: rows of a batch": (gather("DEFAULT", 1, 1), GRID, PAIRS),
    "gather: elements": (gather("ELEMENT", 1), GRID, PAIRS),
    "gather: tuples": (gather("ND"), GRID, np.array([[0, 2], [1, 1]], np.int32)),
    "gather: tuples of a batch": (gather("ND", 0, 1), GRID, np.array([[2], [0]], np.int32)),
    "fill": (fill, np.array([4]), np.array(3), np.array([2])),
    "matrix product": (product, FLOATS.reshape(2, 4)),
}  # fmt: skip
NEAR: dict[str, tuple[Any, ...]] = {
    **{op: (unary(op), FLOATS) for op in ("EXP", "LOG")},
    **{op: (activation(op), FLOATS) for op in ("TANH", "SIGMOID")},
    "reduce: float sum": (reduce("SUM", 1, True), FLOATS),
}  # fmt: skip


def folded(made: HandMade, dims: Any) -> tuple[int, ...]:
    """What TensorRT makes of a tensor of integers above 0."""
    made_fill = made.network.add_fill((1,), trt.FillOperation.LINSPACE, trt.int32)
    step = np.ones(dims.shape[0], np.int32)
    for index, tensor in enumerate((dims, *map(made.constant, (np.array(0, np.int32), step)))):
        made_fill.set_input(index, tensor)
    return tuple(made_fill.get_output(0).shape)


def differing(add: Layer, *arrays: Array, near: bool = False, spoil: bool = False) -> int:
    """Elements of a layer's result, or of a spoilt one, that TensorRT does not fold to."""
    made = HandMade()
    net = made.network
    result = add(net, *map(made.constant, arrays)).get_output(0)
    if result.dtype == trt.bool:
        result = net.add_cast(result, trt.int32).get_output(0)
    flat = net.add_shuffle(result)
    flat.reshape_dims = (-1,)
    found = flat.get_output(0)
    made.output(found)
    (wanted,) = made.run({})
    if spoil:
        wanted = wanted // 2 + 1
    known = made.constant(wanted)
    if near:
        apart = net.add_elementwise(found, known, OPS.SUB).get_output(0)
        apart = net.add_unary(apart, UNARY.ABS).get_output(0)
        most = made.constant(np.abs(wanted) * ULPS + ULPS)
        is_equal = net.add_elementwise(apart, most, OPS.LESS).get_output(0)
    else:
        is_equal = net.add_elementwise(found, known, OPS.EQUAL).get_output(0)
    one, two = made.constant(np.array([1])), made.constant(np.array([2]))
    dims = folded(made, net.add_select(is_equal, one, two).get_output(0))
    assert set(dims) <= {1, 2}, "TensorRT folds no such layer"
    return dims.count(2)


@pytest.mark.parametrize("name", EXACT)
def test_a_layer_gives_what_tensorrt_folds_it_to(name: str) -> None:
    assert differing(*EXACT[name]) == 0
    assert differing(*EXACT[name], spoil=True) > 0  # a wrong result shows


@pytest.mark.parametrize("name", NEAR)
def test_a_function_is_near_what_tensorrt_folds_it_to(name: str) -> None:
    assert differing(*NEAR[name], near=True) == 0
    assert differing(*NEAR[name], near=True, spoil=True) > 0


def test_division_of_negative_integers_is_not_what_floor_division_is() -> None:
    """Why the evaluator refuses the one and not the other: TensorRT cuts here, and says nowhere."""
    made = HandMade()
    a, b, hundred = (made.constant(np.array([n])) for n in (-7, 2, 100))
    for op, wanted in ((OPS.DIV, 97), (OPS.FLOOR_DIV, 96)):
        quotient = made.network.add_elementwise(a, b, op).get_output(0)
        total = made.network.add_elementwise(quotient, hundred, OPS.SUM).get_output(0)
        assert folded(made, total) == (wanted,)
