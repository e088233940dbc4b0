"""TensorRT's element types as NumPy's, and the bytes of a network's constants.

Every tensor is held in its own type. Layers compute in float64 ("wide") and what they give is
rounded once to the type of the tensor, which is as exact as any kernel can be.
"""

from __future__ import annotations

import ctypes
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

TYPES: dict[str, Any] = {
    "FLOAT": np.float32,
    "HALF": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "FP8": ml_dtypes.float8_e4m3fn,
    "FP4": ml_dtypes.float4_e2m1fn,
    "INT32": np.int32,
    "INT64": np.int64,
    "BOOL": np.bool_,
}
FLOATS = frozenset(np.dtype(TYPES[name]) for name in ("FLOAT", "HALF", "BF16"))
QUANTIZED = frozenset(np.dtype(TYPES[name]) for name in ("FP8", "FP4"))
WIDENED = FLOATS | QUANTIZED
INTEGERS = frozenset(np.dtype(TYPES[name]) for name in ("INT32", "INT64"))
BOOL = np.dtype(np.bool_)
LARGEST = {np.dtype(TYPES["FP8"]): 448.0, np.dtype(TYPES["FP4"]): 6.0}


class EvaluationError(AssertionError):
    """The network does something that TensorRT does not define."""


def require(holds: object, message: str) -> None:
    """Raise `EvaluationError` unless `holds`."""
    if not holds:
        raise EvaluationError(message)


def numpy_type(data_type: Any) -> np.dtype[Any]:
    """The NumPy type of a TensorRT DataType."""
    if data_type.name not in TYPES:
        raise EvaluationError(f"type {data_type.name} is not evaluated")
    return np.dtype(TYPES[data_type.name])


def wide(x: Array) -> Array:
    """Floating point as float64, for computing; integers and booleans as they are."""
    return x.astype(np.float64) if x.dtype in WIDENED else x


def narrow(x: Array, dtype: np.dtype[Any]) -> Array:
    """A computed result, rounded to the type of its tensor; only floats may be rounded."""
    if x.dtype == dtype:
        return x
    if x.dtype != np.float64 or dtype not in FLOATS:
        raise EvaluationError(f"a {x.dtype} result in a {dtype} tensor")
    # ml_dtypes rounds from float32; to odd first, so that rounding twice is rounding once.
    return x.astype(dtype) if dtype in (np.float32, np.float16) else _to_odd(x).astype(dtype)


def quantized(x: Array, dtype: np.dtype[Any]) -> Array:
    """x to the nearest FP8 or FP4, clamped to the largest."""
    require(np.isfinite(x).all(), "a quantized value is not finite")
    limit = LARGEST[dtype]
    return _to_odd(np.clip(x, -limit, limit)).astype(dtype)


def _to_odd(x: Array) -> npt.NDArray[np.float32]:
    """float64 to float32, the last bit set where anything was cut off."""
    near = np.asarray(x.astype(np.float32))
    cut = np.isfinite(near) & (near != x)
    is_past = cut & (np.abs(near.astype(np.float64)) > np.abs(x))
    bits = near.view(np.uint32) - is_past.astype(np.uint32) | cut
    return np.asarray(bits, np.uint32).view(np.float32)


class _Weights(ctypes.Structure):
    """`nvinfer1::Weights`."""

    _fields_ = (("type", ctypes.c_int32), ("values", ctypes.c_void_p), ("count", ctypes.c_int64))


def constant(layer: Any) -> Array:
    """The values of an IConstantLayer, read from where TensorRT itself will read them."""
    shape = tuple(layer.shape)
    weights = layer.weights
    if isinstance(weights, np.ndarray):
        return weights.reshape(shape).copy()
    # The binding converts types that NumPy knows; of the others it shows no address. A wrapped
    # object begins with the Python header and the pointer to the C++ object.
    pointer = ctypes.c_void_p.from_address(id(weights) + object.__basicsize__).value
    found = _Weights.from_address(pointer or 0)
    is_it = found.type == int(weights.dtype) and found.count == weights.size and found.values
    require(is_it, "the binding keeps weights elsewhere than it did")
    dtype = numpy_type(weights.dtype)
    require(found.count == np.prod(shape, dtype=np.int64), f"{layer.name}: count and shape differ")
    is_packed = weights.dtype.name == "FP4"
    size = -(-found.count // 2) if is_packed else found.count * dtype.itemsize
    raw = np.frombuffer(ctypes.string_at(found.values, size), np.uint8)
    if is_packed:  # two to a byte, the first in the low half
        raw = np.stack([raw & 15, raw >> 4], axis=-1).reshape(-1)[: found.count]
    return raw.view(dtype).reshape(shape)
