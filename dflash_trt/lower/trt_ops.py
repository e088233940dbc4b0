"""One emitter for each op that TensorRT expresses whole; the others are decomposed."""

from __future__ import annotations

import numpy as np

from dflash_trt.graph import Graph, Node
from dflash_trt.lower.trt_attention import ATTENTION
from dflash_trt.lower.trt_emitter import Emitter, Literal, TrtEmitter, TrtTensor
from dflash_trt.lower.trt_linear import LINEAR
from dflash_trt.lower.trt_math import (
    MATH,
    activation,
    arange,
    binary,
    reduced,
    shape_of,
    unary,
)
from dflash_trt.lower.trt_search import SEARCH
from dflash_trt.lower.walk import copied_dims


def _constant(low: TrtEmitter, node: Node) -> list[Literal]:
    return [Literal(node.attrs["value"])]


def _param(low: TrtEmitter, node: Node) -> list[Literal]:
    name, shape = node.attrs["name"], low.dims(node.outputs[0].shape)
    dtype = low.arrays[low.types[node.outputs[0].dtype]]
    return [Literal(low.weights.dense(name, [int(d) for d in shape], dtype), f"/{name}")]


def _size(low: TrtEmitter, node: Node) -> list[TrtTensor | Literal]:
    x, axis = low.names[node.inputs[0]], node.attrs["axis"]
    if isinstance(x, Literal):
        return [Literal(np.array(x.array.shape[axis], np.int32))]
    return [shape_of(low, node, x, axis)]


def _iota(low: TrtEmitter, node: Node) -> list[TrtTensor | Literal]:
    return [arange(low, node, low.names[node.inputs[0]])]


def _shuffle(low: TrtEmitter, node: Node) -> list[TrtTensor]:
    """A reshape, a transpose, or both in either order."""
    first = low.halves.get(node)
    steps = [node] if first is None else [first, node]
    x = low.value(steps[0].inputs[0], node)
    kinds = [step.op for step in steps]
    ways = [
        copied_dims(*(low.dims(tensor.shape) for tensor in (step.inputs[0], step.outputs[0])))
        if step.op == "reshape"
        else list(step.attrs["perm"])
        for step in steps
    ]

    def make() -> TrtTensor:
        layer = low.network.add_shuffle(x)
        for kind, way in zip(kinds, ways, strict=True):
            if kind == "reshape":
                layer.reshape_dims = way
            elif kind == kinds[0]:
                layer.first_transpose = way
            else:
                layer.second_transpose = way
        return layer

    return low.layer(node, "+".join(kinds), [x], make, *map(tuple, ways))


def _concat(low: TrtEmitter, node: Node) -> list[TrtTensor]:
    parts = [low.value(tensor, node) for tensor in node.inputs]

    def make() -> TrtTensor:
        layer = low.network.add_concatenation(parts)
        layer.axis = node.attrs["axis"]
        return layer

    return low.layer(node, "concat", parts, make, node.attrs["axis"])


def _gather_rows(low: TrtEmitter, node: Node) -> list[TrtTensor]:
    x, rows = (low.value(tensor, node) for tensor in node.inputs)

    def make() -> TrtTensor:
        layer = low.network.add_gather(x, rows, 1)
        layer.num_elementwise_dims = 1
        return layer

    return low.layer(node, "gather_rows", [x, rows], make)


def _take(low: TrtEmitter, node: Node) -> list[TrtTensor]:
    x, index = (low.value(tensor, node) for tensor in node.inputs)
    axis = node.attrs["axis"]
    return low.layer(node, "take", [x, index], lambda: low.network.add_gather(x, index, axis), axis)


def _gather_last(low: TrtEmitter, node: Node) -> list[TrtTensor]:
    x, index = (low.value(tensor, node) for tensor in node.inputs)

    def make() -> TrtTensor:
        layer = low.network.add_gather_v2(x, index, low.trt.GatherMode.ELEMENT)
        layer.axis = len(x.shape) - 1
        return layer

    return low.layer(node, "gather_last", [x, index], make)


def _scatter_last(low: TrtEmitter, node: Node) -> list[TrtTensor]:
    inputs = [low.value(tensor, node) for tensor in node.inputs]

    def make() -> TrtTensor:
        layer = low.network.add_scatter(*inputs, low.trt.ScatterMode.ELEMENT)
        layer.axis = len(inputs[0].shape) - 1
        return layer

    return low.layer(node, "scatter_last", inputs, make)


def _cond(low: TrtEmitter, node: Node) -> list[TrtTensor]:
    """The way that is always right: a conditional layer would stop the capture of CUDA graphs."""
    then: Graph = node.attrs["then"]
    low.graph(then)
    return [low.names[then.outputs["result"]]]


def _rms_norm(low: TrtEmitter, node: Node) -> list[TrtTensor]:
    """In FP32 throughout. TensorRT's normalization layer subtracts the mean, so it is not used."""
    full = low.trt.DataType.FLOAT
    x = low.cast(low.value(node.inputs[0], node), full, node)
    rank = len(x.shape)
    mean = reduced(low, node, "AVG", binary(low, node, "PROD", x, x), True)
    eps = low.const(np.full((1,) * rank, node.attrs["eps"]), full, node)
    rms = unary(low, node, "SQRT", binary(low, node, "SUM", mean, eps))
    weight = low.value(node.inputs[1], node, rank)
    scaled = binary(low, node, "PROD", binary(low, node, "DIV", x, rms), weight)
    return [low.cast(scaled, low.types[node.outputs[0].dtype], node)]


def _swiglu(low: TrtEmitter, node: Node) -> list[TrtTensor]:
    """In FP32: one rounding at the end, not three."""
    full = low.trt.DataType.FLOAT
    gate, up = (low.cast(low.value(tensor, node), full, node) for tensor in node.inputs)
    silu = binary(low, node, "PROD", gate, activation(low, node, "SIGMOID", gate))
    product = binary(low, node, "PROD", silu, up)
    return [low.cast(product, low.types[node.outputs[0].dtype], node)]


EMITTERS: dict[str, Emitter] = {
    **MATH,
    **LINEAR,
    **ATTENTION,
    **SEARCH,
    "constant": _constant,
    "param": _param,
    "size": _size,
    "iota": _iota,
    "reshape": _shuffle,
    "transpose": _shuffle,
    "concat": _concat,
    "gather_rows": _gather_rows,
    "take": _take,
    "gather_last": _gather_last,
    "scatter_last": _scatter_last,
    "cond": _cond,
    "rms_norm": _rms_norm,
    "swiglu": _swiglu,
}
