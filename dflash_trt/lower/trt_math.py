"""Emitters of arithmetic: elementwise, reductions, sums, argmax, top-k."""

from __future__ import annotations

import numpy as np

from dflash_trt.errors import NoLowering
from dflash_trt.graph import Node, Tensor
from dflash_trt.lower.trt_emitter import Emitter, Literal, TrtEmitter, TrtTensor

MAX_TOP_K = 3840  # of ITopKLayer


def binary(low: TrtEmitter, node: Node, op: str, a: TrtTensor, b: TrtTensor) -> TrtTensor:
    """An elementwise layer over two tensors of one rank."""
    kind = getattr(low.trt.ElementWiseOperation, op)
    make = lambda: low.network.add_elementwise(a, b, kind)  # noqa: E731
    return low.layer(node, op.lower(), [a, b], make)[0]


def unary(low: TrtEmitter, node: Node, op: str, x: TrtTensor) -> TrtTensor:
    """A unary layer."""
    kind = getattr(low.trt.UnaryOperation, op)
    return low.layer(node, op.lower(), [x], lambda: low.network.add_unary(x, kind))[0]


def activation(low: TrtEmitter, node: Node, op: str, x: TrtTensor) -> TrtTensor:
    """An activation layer."""
    kind = getattr(low.trt.ActivationType, op)
    return low.layer(node, op.lower(), [x], lambda: low.network.add_activation(x, kind))[0]


def select(
    low: TrtEmitter, node: Node, condition: TrtTensor, a: TrtTensor, b: TrtTensor
) -> TrtTensor:
    """`a` where the condition holds, else `b`; all of one rank."""
    make = lambda: low.network.add_select(condition, a, b)  # noqa: E731
    return low.layer(node, "select", [condition, a, b], make)[0]


def reduced(
    low: TrtEmitter, node: Node, op: str, x: TrtTensor, keep: bool, axes: int | None = None
) -> TrtTensor:
    """A reduction over the last axis, or over the axes of a bit mask."""
    mask = 1 << (len(x.shape) - 1) if axes is None else axes
    kind = getattr(low.trt.ReduceOperation, op)
    make = lambda: low.network.add_reduce(x, kind, mask, keep)  # noqa: E731
    return low.layer(node, f"reduce_{op.lower()}", [x], make, mask, keep)[0]


def shape_of(low: TrtEmitter, node: Node, x: TrtTensor, axis: int) -> TrtTensor | Literal:
    """The length of an axis, int32 []: a literal where it is known."""
    if x.shape[axis] >= 0:
        return Literal(np.array(x.shape[axis], np.int32))
    shape = low.layer(node, "shape", [x], lambda: low.network.add_shape(x))[0]
    index = low.const(axis, low.trt.DataType.INT32, node)
    make = lambda: low.network.add_gather(shape, index, 0)  # noqa: E731
    length = low.layer(node, "length", [shape, index], make)[0]
    return low.cast(length, low.trt.DataType.INT32, node)


def length_of(low: TrtEmitter, node: Node, tensor: Tensor, axis: int) -> TrtTensor | Literal:
    """The length of an axis, int32 []; one tensor for all axes of one name, so users are equal."""
    dim = low.dims(tensor.shape)[axis]
    if isinstance(dim, int):
        return Literal(np.array(dim, np.int32))
    if dim not in low.lengths:
        low.lengths[dim] = shape_of(low, node, low.value(tensor, node), axis)
    return low.lengths[dim]


def arange(low: TrtEmitter, node: Node, length: TrtTensor | Literal) -> TrtTensor | Literal:
    """0, 1, .. length - 1 as int32; length is a scalar."""
    if isinstance(length, Literal):
        return Literal(np.arange(int(length.array), dtype=np.int32))
    int32 = low.trt.DataType.INT32
    size = reshaped(low, node, length, [1])
    zero, one = low.const(0, int32, node), low.const([1], int32, node)

    def make() -> TrtTensor:
        layer = low.network.add_fill([0], low.trt.FillOperation.LINSPACE, int32)
        for index, tensor in enumerate((size, zero, one)):
            layer.set_input(index, tensor)
        return layer

    return low.layer(node, "arange", [size, zero, one], make)[0]


def reshaped(low: TrtEmitter, node: Node, x: TrtTensor, dims: list[int]) -> TrtTensor:
    """A reshape; in `dims` 0 copies the axis and -1 is inferred."""

    def make() -> TrtTensor:
        layer = low.network.add_shuffle(x)
        layer.reshape_dims = dims
        return layer

    return low.layer(node, "reshape", [x], make, *dims)[0]


def last_slice(low: TrtEmitter, node: Node, x: TrtTensor, start: int, size: int) -> TrtTensor:
    """So many elements of the last axis."""

    def make() -> TrtTensor:
        layer = low.network.add_slice(x, (start,), (size,), (1,))
        layer.axes = (len(x.shape) - 1,)
        return layer

    return low.layer(node, "slice", [x], make, start, size)[0]


def _elementwise(op: str) -> Emitter:
    return lambda low, node: [binary(low, node, op, *low.together(node))]


def _unary(op: str) -> Emitter:
    return lambda low, node: [unary(low, node, op, low.value(node.inputs[0], node))]


def _activation(op: str) -> Emitter:
    return lambda low, node: [activation(low, node, op, low.value(node.inputs[0], node))]


def _mod(low: TrtEmitter, node: Node) -> list[TrtTensor]:
    """TensorRT has no modulo; ours is of integers that are not negative."""
    a, b = low.together(node)
    whole = binary(low, node, "PROD", binary(low, node, "DIV", a, b), b)
    return [binary(low, node, "SUB", a, whole)]


def _less_equal(low: TrtEmitter, node: Node) -> list[TrtTensor]:
    return [unary(low, node, "NOT", binary(low, node, "GREATER", *low.together(node)))]


def _where(low: TrtEmitter, node: Node) -> list[TrtTensor]:
    return [select(low, node, *low.together(node))]


def _cast(low: TrtEmitter, node: Node) -> list[TrtTensor]:
    """Into and out of INT64 through memory: see `_materialized`."""
    x, to = low.value(node.inputs[0], node), low.types[node.outputs[0].dtype]
    if low.trt.DataType.INT64 in (x.dtype, to) and x.dtype != to:
        x = _materialized(low, node, x)
    return [low.cast(x, to, node)]


def _materialized(low: TrtEmitter, node: Node, x: TrtTensor) -> TrtTensor:
    """x, written to memory: a sum along an added axis of one element, which nothing fuses with.

    TensorRT-RTX 1.7 follows each path through the INT64 arithmetic of the noise when it fuses it
    with a reduction before or behind it, and there are millions: the build would take hours.
    """
    rank = len(x.shape)
    axis = low.const(rank, low.trt.DataType.INT32, node)
    column = reshaped(low, node, x, [0] * rank + [1])
    op = low.trt.CumulativeOperation.SUM
    make = lambda: low.network.add_cumulative(column, axis, op, False, False)  # noqa: E731
    same = low.layer(node, "materialize", [column, axis], make)[0]
    return reshaped(low, node, same, [0] * rank)


def _reduce(op: str) -> Emitter:
    def emit(low: TrtEmitter, node: Node) -> list[TrtTensor]:
        x = low.value(node.inputs[0], node)
        return [reduced(low, node, op, x, node.attrs["keepdims"])]

    return emit


def _reduce_all_max(low: TrtEmitter, node: Node) -> list[TrtTensor]:
    x = low.value(node.inputs[0], node)
    return [reduced(low, node, "MAX", x, False, (1 << len(x.shape)) - 1)]


def _cumsum(low: TrtEmitter, node: Node) -> list[TrtTensor]:
    x = low.value(node.inputs[0], node)
    axis = low.const(len(x.shape) - 1, low.trt.DataType.INT32, node)
    op = low.trt.CumulativeOperation.SUM
    make = lambda: low.network.add_cumulative(x, axis, op, False, False)  # noqa: E731
    return low.layer(node, "cumsum", [x, axis], make)


def _argmax(low: TrtEmitter, node: Node) -> list[TrtTensor]:
    """The lowest index that holds the maximum: TopK does not say which of equal values it takes.

    A row of NaN, which only broken weights give, still yields an index inside the row.
    """
    x = low.value(node.inputs[0], node)
    rank, int32 = len(x.shape), low.trt.DataType.INT32
    length = shape_of(low, node, x, rank - 1)
    ids = low.placed(arange(low, node, length), int32, node, rank)
    last = low.placed(length, int32, node, rank)
    last = binary(low, node, "SUB", last, low.const(np.ones((1,) * rank), int32, node))
    best = reduced(low, node, "MAX", x, True)
    hits = select(low, node, binary(low, node, "EQUAL", x, best), ids, last)
    return [reduced(low, node, "MIN", hits, False)]


def _topk(low: TrtEmitter, node: Node) -> list[TrtTensor]:
    """With a fixed k: one that is computed on the device would stop the capture of CUDA graphs."""
    k = low.names[node.inputs[1]]
    if not isinstance(k, Literal):
        raise NoLowering("top-k on TensorRT needs a k that is known when the engine is built")
    count = int(k.array)
    if count > MAX_TOP_K:
        raise NoLowering(f"top-k of {count} is beyond TensorRT's {MAX_TOP_K}")
    x = low.value(node.inputs[0], node)
    op, axes = low.trt.TopKOperation.MAX, 1 << (len(x.shape) - 1)
    make = lambda: low.network.add_topk(x, op, count, axes)  # noqa: E731
    return low.layer(node, "topk", [x], make, count)


MATH: dict[str, Emitter] = {
    "add": _elementwise("SUM"),
    "sub": _elementwise("SUB"),
    "mul": _elementwise("PROD"),
    "div": _elementwise("DIV"),
    "floor_div": _elementwise("DIV"),
    "mod": _mod,
    "minimum": _elementwise("MIN"),
    "maximum": _elementwise("MAX"),
    "equal": _elementwise("EQUAL"),
    "less": _elementwise("LESS"),
    "less_equal": _less_equal,
    "logical_and": _elementwise("AND"),
    "logical_or": _elementwise("OR"),
    "logical_not": _unary("NOT"),
    "exp": _unary("EXP"),
    "log": _unary("LOG"),
    "tanh": _activation("TANH"),
    "sigmoid": _activation("SIGMOID"),
    "where": _where,
    "cast": _cast,
    "reduce_sum": _reduce("SUM"),
    "reduce_max": _reduce("MAX"),
    "reduce_all_max": _reduce_all_max,
    "cumsum": _cumsum,
    "argmax": _argmax,
    "topk": _topk,
}
