"""Emitters of products with weights: dense, FP8 and NVFP4, and of embedding tables.

A quantized product has quantized activations too. No calibration is needed: each row is divided by
its largest magnitude, so that constant scales fit every row, and the product is multiplied by it.
"""

from __future__ import annotations

import numpy as np

from dflash_trt.errors import NoLowering
from dflash_trt.graph import DType, LinearWeight, Node
from dflash_trt.lower.trt_emitter import Emitter, TrtEmitter, TrtTensor
from dflash_trt.lower.trt_math import binary, reduced, unary
from dflash_trt.quantize.floats import FP4_BLOCK, Fp8Weight, Nvfp4Weight

# Scales of activations in [-1, 1]: powers of two, exact in every type, that clip nothing.
_FP8_SCALE = 2.0**-8
_NVFP4_SCALE = 2.0**-11
_TINY = 1e-12  # the scale of a row that is zero


def _embedding(low: TrtEmitter, node: Node) -> list[TrtTensor]:
    a = node.attrs
    table = _dense(low, a["name"], (a["vocab_size"], a["hidden_size"]), low.types[DType.ACT], 2)
    ids = low.value(node.inputs[0], node)
    return low.layer(node, "rows", [table, ids], lambda: low.network.add_gather(table, ids, 0))


def _linear(low: TrtEmitter, node: Node) -> list[TrtTensor]:
    """A product for each weight: TensorRT merges those of one input by itself.

    A product is computed in the type of its input, then cast: a head's logits are sums in FP32,
    rounded once to the compute type. A 16-bit weight with an FP32 result would be stored in 32.
    """
    x = low.value(node.inputs[0], node)
    return [_one(low, node, x, weight) for weight in node.attrs["weights"]]


def _one(low: TrtEmitter, node: Node, x: TrtTensor, weight: LinearWeight) -> TrtTensor:
    width = x.shape[-1]
    if width < 0:
        raise NoLowering(f"the inner dim of {weight.name} must be known to lower a product")
    shape = (weight.out_features, width)
    part = ".".join(weight.name.split(".")[-2:-1])
    act = low.types[DType.ACT]
    packed = low.weights.quantized(weight.name, shape) if x.dtype == act else None
    if packed is not None:
        unit, peak = _unit_rows(low, node, x)
        if isinstance(packed, Fp8Weight):
            inputs = _fp8_rows(low, node, unit), _fp8_matrix(low, node, weight.name, packed)
        else:
            inputs = _nvfp4_rows(low, node, unit), _nvfp4_matrix(low, node, weight.name, packed)
        product = _matmul(low, node, *inputs, part)
        full = low.cast(product, low.trt.DataType.FLOAT, node)
        product = low.cast(binary(low, node, "PROD", full, peak), act, node)
    else:
        matrix = _dense(low, weight.name, shape, x.dtype, len(x.shape))
        product = _matmul(low, node, x, matrix, part)
    if weight.bias is not None:
        bias = _dense(low, weight.bias, (weight.out_features,), product.dtype, len(x.shape))
        product = binary(low, node, "SUM", product, bias)
    return low.cast(product, low.types[node.outputs[0].dtype], node)


def _dense(
    low: TrtEmitter, name: str, shape: tuple[int, ...], dtype: object, rank: int
) -> TrtTensor:
    """The constant of a weight in one type, with leading axes of 1 up to `rank`."""
    array = low.weights.dense(name, shape, low.arrays[dtype])
    full = (1,) * (rank - len(shape)) + shape
    return low.stored(array, dtype, full, f"/{low.weights.reader.canonical(name)}")


def _matmul(low: TrtEmitter, node: Node, x: TrtTensor, w: TrtTensor, part: str) -> TrtTensor:
    """x @ w.T."""
    op = low.trt.MatrixOperation

    def make() -> TrtTensor:
        return low.network.add_matrix_multiply(x, op.NONE, w, op.TRANSPOSE)

    return low.layer(node, "matmul", [x, w], make, part=part)[0]


def _dequantized(
    low: TrtEmitter, node: Node, codes: TrtTensor, scale: TrtTensor, to: object
) -> TrtTensor:
    make = lambda: low.network.add_dequantize(codes, scale, to)  # noqa: E731
    return low.layer(node, "dequantize", [codes, scale], make, str(to))[0]


def _unit_rows(low: TrtEmitter, node: Node, x: TrtTensor) -> tuple[TrtTensor, TrtTensor]:
    """x with each row divided by its largest magnitude, and those magnitudes in FP32."""
    full = low.trt.DataType.FLOAT
    peak = low.cast(reduced(low, node, "MAX", unary(low, node, "ABS", x), True), full, node)
    tiny = low.const(np.full((1,) * len(x.shape), _TINY), full, node)
    peak = binary(low, node, "MAX", peak, tiny)
    unit = binary(low, node, "DIV", low.cast(x, full, node), peak)
    return low.cast(unit, x.dtype, node), peak


def _fp8_rows(low: TrtEmitter, node: Node, x: TrtTensor) -> TrtTensor:
    types = low.trt.DataType
    scale = low.const(_FP8_SCALE, types.FLOAT, node)
    make = lambda: low.network.add_quantize(x, scale, types.FP8)  # noqa: E731
    codes = low.layer(node, "quantize", [x, scale], make)[0]
    return _dequantized(low, node, codes, scale, x.dtype)


def _fp8_matrix(low: TrtEmitter, node: Node, name: str, weight: Fp8Weight) -> TrtTensor:
    types, stem = low.trt.DataType, f"/{low.weights.reader.canonical(name)}"
    codes = low.stored(weight.codes, types.FP8, (1, *weight.codes.shape), f"{stem}/codes")
    scale = low.const(weight.scale, types.FLOAT, node)
    return _dequantized(low, node, codes, scale, low.types[DType.ACT])


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


def _nvfp4_matrix(low: TrtEmitter, node: Node, name: str, weight: Nvfp4Weight) -> TrtTensor:
    """Both scales in the compute type: TensorRT has no rule for FP32 ones with a 16-bit result."""
    types, stem = low.trt.DataType, f"/{low.weights.reader.canonical(name)}"
    act = low.types[DType.ACT]
    num_rows, num_blocks = weight.block_scales.shape
    codes = low.stored(weight.codes, types.FP4, (1, num_rows, num_blocks * FP4_BLOCK),
                       f"{stem}/codes")  # fmt: skip
    blocks = low.stored(weight.block_scales, types.FP8, (1, num_rows, num_blocks),
                        f"{stem}/scales")  # fmt: skip
    scale = low.const(weight.scale, act, node)
    return _dequantized(low, node, codes, _dequantized(low, node, blocks, scale, act), act)


LINEAR: dict[str, Emitter] = {"embedding": _embedding, "linear": _linear}
