"""Emitters of products with weights: dense, FP8 and NVFP4, and of embedding tables.

A quantized product has quantized activations too. No calibration is needed: each row is divided by
its largest magnitude, so that constant scales fit every row, and the product is multiplied by it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dflash_trt.errors import NoLowering
from dflash_trt.graph import DType, LinearWeight, Node
from dflash_trt.lower.trt_emitter import Emitter, TrtEmitter, TrtTensor
from dflash_trt.lower.trt_math import binary, last_slice, reduced, unary
from dflash_trt.lower.trt_weights import Stack
from dflash_trt.quantize.floats import FP4_BLOCK, Fp8Weight, Nvfp4Weight

# Scales of activations in [-1, 1]: powers of two, exact in every type, that clip nothing.
_FP8_SCALE = 2.0**-8
_NVFP4_SCALE = 2.0**-11
_TINY = 2.0**-24  # the scale of a row that is zero: FP16's smallest number


def _embedding(low: TrtEmitter, node: Node) -> list[TrtTensor]:
    a = node.attrs
    table = _dense(low, a["name"], (a["vocab_size"], a["hidden_size"]), low.types[DType.ACT], 2)
    ids = low.value(node.inputs[0], node)
    return low.layer(node, "rows", [table, ids], lambda: low.network.add_gather(table, ids, 0))


def _linear(low: TrtEmitter, node: Node) -> list[TrtTensor]:
    """FP8 weights of one input are one product. TensorRT merges 16-bit ones by itself; with NVFP4
    ones on top of each other it does not come to an end.

    A product is computed in the type of its input, then cast: a head's logits are sums in FP32,
    rounded once to the compute type. A 16-bit weight with an FP32 result would be stored in 32.
    """
    x, weights = low.value(node.inputs[0], node), node.attrs["weights"]
    names = [weight.name for weight in weights]
    if x.shape[-1] < 0:
        raise NoLowering(f"the inner dim of {names[0]} must be known to lower a product")
    is_fp8 = all(low.weights.format_of(name) == "fp8" for name in names)
    # What another product reads too would be stored twice.
    is_apart = low.repeated.isdisjoint(low.weights.reader.canonical(name) for name in names)
    groups = [weights] if is_fp8 and is_apart else [(weight,) for weight in weights]
    return [part for group in groups for part in _products(low, node, x, group)]


def _products(
    low: TrtEmitter, node: Node, x: TrtTensor, weights: Sequence[LinearWeight]
) -> list[TrtTensor]:
    width, act = x.shape[-1], low.types[DType.ACT]
    names = [weight.name for weight in weights]
    sizes = [weight.out_features for weight in weights]
    stack = low.weights.quantized(names, sizes, width) if x.dtype == act else None
    if stack is None:
        parts = [
            _matmul(low, node, x, _dense(low, name, (size, width), x.dtype, len(x.shape)), [name])
            for name, size in zip(names, sizes, strict=True)
        ]
    else:
        parts = _quantized(low, node, x, names, sizes, stack)
    return [_finished(low, node, part, weight) for part, weight in zip(parts, weights, strict=True)]


def _finished(low: TrtEmitter, node: Node, product: TrtTensor, weight: LinearWeight) -> TrtTensor:
    if weight.bias is not None:
        shape = (weight.out_features,)
        bias = _dense(low, weight.bias, shape, product.dtype, len(product.shape))
        product = binary(low, node, "SUM", product, bias)
    return low.cast(product, low.types[node.outputs[0].dtype], node)


def _quantized(
    low: TrtEmitter, node: Node, x: TrtTensor, names: Sequence[str], sizes: Sequence[int],
    stack: Stack,
) -> list[TrtTensor]:  # fmt: skip
    """One product, cut in parts: in x's type, or in FP32 where that would round a part's factor."""
    unit, peak = _unit_rows(low, node, x)
    stem = "/" + "+".join(low.weights.reader.canonical(name) for name in names)
    if isinstance(stack.packed, Fp8Weight):
        inputs = _fp8_rows(low, node, unit), _fp8_matrix(low, node, stem, stack.packed)
    else:
        inputs = _nvfp4_rows(low, node, unit), _nvfp4_matrix(low, node, stem, stack.packed)
    product = _matmul(low, node, *inputs, names)
    if any(factor != 1 for factor in stack.factors):  # before the peak, which FP16 might not hold
        to = x.dtype if stack.is_exact else low.types[DType.F32]
        product, peak = (low.cast(value, to, node) for value in (product, peak))
        factors = np.repeat(stack.factors, sizes).reshape((1,) * (len(x.shape) - 1) + (-1,))
        product = binary(low, node, "PROD", product, low.const(factors, to, node))
    product = binary(low, node, "PROD", product, peak)
    if len(sizes) == 1:
        return [product]
    starts = np.cumsum([0, *sizes[:-1]]).tolist()
    return [
        last_slice(low, node, product, start, size)
        for start, size in zip(starts, sizes, strict=True)
    ]


def _dense(
    low: TrtEmitter, name: str, shape: tuple[int, ...], dtype: object, rank: int
) -> TrtTensor:
    """The constant of a weight in one type, with leading axes of 1 up to `rank`."""
    array = low.weights.dense(name, shape, low.arrays[dtype])
    full = (1,) * (rank - len(shape)) + shape
    return low.stored(array, dtype, full, f"/{low.weights.reader.canonical(name)}")


def _matmul(
    low: TrtEmitter, node: Node, x: TrtTensor, w: TrtTensor, names: Sequence[str]
) -> TrtTensor:
    """x @ w.T."""
    op = low.trt.MatrixOperation
    part = "+".join(".".join(name.split(".")[-2:-1]) for name in names)

    def make() -> TrtTensor:
        return low.network.add_matrix_multiply(x, op.NONE, w, op.TRANSPOSE)

    return low.layer(node, "matmul", [x, w], make, part=part)[0]


def _dequantized(
    low: TrtEmitter, node: Node, codes: TrtTensor, scale: TrtTensor, to: object
) -> TrtTensor:
    make = lambda: low.network.add_dequantize(codes, scale, to)  # noqa: E731
    return low.layer(node, "dequantize", [codes, scale], make, str(to))[0]


def _unit_rows(low: TrtEmitter, node: Node, x: TrtTensor) -> tuple[TrtTensor, TrtTensor]:
    """x with each row divided by its largest magnitude, and those magnitudes.

    All in the type of x, which holds its own magnitudes exactly; a quotient or a product of two
    16-bit numbers is rounded once either way.
    """
    peak = reduced(low, node, "MAX", unary(low, node, "ABS", x), True)
    tiny = low.const(np.full((1,) * len(x.shape), _TINY), x.dtype, node)
    peak = binary(low, node, "MAX", peak, tiny)
    return binary(low, node, "DIV", x, peak), peak


def _fp8_rows(low: TrtEmitter, node: Node, x: TrtTensor) -> TrtTensor:
    scale = low.const(_FP8_SCALE, x.dtype, node)
    make = lambda: low.network.add_quantize(x, scale, low.trt.DataType.FP8)  # noqa: E731
    codes = low.layer(node, "quantize", [x, scale], make)[0]
    return _dequantized(low, node, codes, scale, x.dtype)


def _fp8_matrix(low: TrtEmitter, node: Node, stem: str, weight: Fp8Weight) -> TrtTensor:
    act, fp8 = low.types[DType.ACT], low.trt.DataType.FP8
    codes = low.stored(weight.codes, fp8, (1, *weight.codes.shape), f"{stem}/codes")
    return _dequantized(low, node, codes, low.const(weight.scale, act, node), act)


def _nvfp4_rows(low: TrtEmitter, node: Node, x: TrtTensor) -> TrtTensor:
    types = low.trt.DataType
    scale = low.const(_NVFP4_SCALE, x.dtype, node)

    def make() -> TrtTensor:
        axis = len(x.shape) - 1
        layer = low.network.add_dynamic_quantize(x, axis, FP4_BLOCK, types.FP4, types.FP8)
        layer.set_input(1, scale)
        return layer

    codes, block_scales = low.layer(node, "quantize", [x, scale], make)
    scales = _dequantized(low, node, block_scales, scale, x.dtype)
    return _dequantized(low, node, codes, scales, x.dtype)


def _nvfp4_matrix(low: TrtEmitter, node: Node, stem: str, weight: Nvfp4Weight) -> TrtTensor:
    """Both scales in the compute type: TensorRT has no rule for FP32 ones with a 16-bit result."""
    types = low.trt.DataType
    act = low.types[DType.ACT]
    num_rows, num_blocks = weight.block_scales.shape
    codes = low.stored(weight.codes, types.FP4, (1, num_rows, num_blocks * FP4_BLOCK),
                       f"{stem}/codes")  # fmt: skip
    blocks = low.stored(weight.block_scales, types.FP8, (1, num_rows, num_blocks),
                        f"{stem}/scales")  # fmt: skip
    scale = low.const(weight.scale, act, node)
    return _dequantized(low, node, codes, _dequantized(low, node, blocks, scale, act), act)


LINEAR: dict[str, Emitter] = {"embedding": _embedding, "linear": _linear}
