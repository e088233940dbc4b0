"""What the layers of TensorRT that move elements do: reshape, slice, gather, scatter, fill."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tiny.trt_layers import Inputs, of, of_type, optional, same_type
from tiny.trt_types import FLOATS, INTEGERS, Array, EvaluationError, numpy_type, require


def shape(layer: Any, inputs: Inputs) -> list[Array]:
    """IShapeLayer."""
    return [np.array(of(inputs, 0).shape, np.int64)]


def shuffle(layer: Any, inputs: Inputs) -> list[Array]:
    """IShuffleLayer: transpose, reshape, transpose."""
    x = of(inputs, 0)
    x = x.transpose(tuple(layer.first_transpose)[: x.ndim])
    dims = _dims(layer.reshape_dims, optional(inputs, 1))
    if dims is not None:
        if layer.zero_is_placeholder:
            placeholders = [i for i, n in enumerate(dims) if n == 0]
            require(all(i < x.ndim for i in placeholders), f"{dims} copies a dim of {x.shape}")
            dims = [x.shape[i] if n == 0 else n for i, n in enumerate(dims)]
        require(dims.count(-1) <= 1 and min(dims, default=0) >= -1, f"reshape to {dims}")
        known = int(np.prod([n for n in dims if n != -1], dtype=np.int64))
        whole = x.size % known == 0 if -1 in dims and known else x.size == known
        if not whole:
            raise EvaluationError(f"reshape of {x.shape} to {dims}")
        x = x.reshape(dims)
    return [x.transpose(tuple(layer.second_transpose)[: x.ndim])]


def squeeze(layer: Any, inputs: Inputs) -> list[Array]:
    """ISqueezeLayer."""
    x, axes = of(inputs, 0), of(inputs, 1).reshape(-1)
    require(all(x.shape[axis] == 1 for axis in axes), f"squeeze of axes {axes} of {x.shape}")
    return [np.squeeze(x, tuple(int(axis) for axis in axes))]


def unsqueeze(layer: Any, inputs: Inputs) -> list[Array]:
    """IUnsqueezeLayer."""
    return [np.expand_dims(of(inputs, 0), tuple(int(a) for a in of(inputs, 1).reshape(-1)))]


def slice_(layer: Any, inputs: Inputs) -> list[Array]:
    """ISliceLayer with strict bounds."""
    x = of(inputs, 0)
    require(layer.mode.name == "STRICT_BOUNDS", f"slices with {layer.mode.name} are not evaluated")
    axes = _dims(layer.axes, optional(inputs, 5)) or list(range(x.ndim))
    static = (layer.start, layer.shape, layer.stride)
    start, size, stride = (
        _dims(dims, optional(inputs, index)) or [] for index, dims in enumerate(static, 1)
    )
    require(len(start) == len(size) == len(stride) == len(axes), f"slice {start} {size} {stride}")
    index: list[Any] = [slice(None)] * x.ndim
    for axis, first, count, step in zip(axes, start, size, stride, strict=True):
        rows = first + step * np.arange(count)
        inside = (rows >= 0) & (rows < x.shape[axis])
        require(count >= 0 and inside.all(), f"slice {start} {size} {stride} of {x.shape}")
        index[axis] = rows
    for axis in range(x.ndim):
        if not isinstance(index[axis], slice):
            x = x.take(index[axis], axis)
    return [x]


def concatenation(layer: Any, inputs: Inputs) -> list[Array]:
    """IConcatenationLayer."""
    xs = [of(inputs, index) for index in range(len(inputs))]
    same_type(*xs)
    others = {(x.ndim, *np.delete(x.shape, layer.axis)) for x in xs}
    require(len(others) == 1, f"concatenation of {[x.shape for x in xs]} along {layer.axis}")
    return [np.concatenate(xs, layer.axis)]


def gather(layer: Any, inputs: Inputs) -> list[Array]:
    """IGatherLayer. An index outside of the data gives an undocumented or zero element: refused."""
    x, indices = of(inputs, 0), of(inputs, 1)
    of_type("gather by indices", indices, INTEGERS)
    mode, axis, batch = layer.mode.name, layer.axis, layer.num_elementwise_dims
    if mode == "ELEMENT":
        require(batch == 0 and x.ndim == indices.ndim, f"gather of {x.shape} by {indices.shape}")
        _inside(indices, x.shape[axis])
        fits = all(
            n <= m for a, (n, m) in enumerate(zip(indices.shape, x.shape, strict=True)) if a != axis
        )
        require(fits, f"gather of {x.shape} by {indices.shape}")
        where = list(np.indices(indices.shape, sparse=True))
        where[axis] = indices
        return [x[tuple(where)]]
    if mode == "ND":
        return [_gather_nd(x, indices, batch)]
    require(mode == "DEFAULT" and batch in (0, 1), f"gather {mode} with {batch} batch dims")
    _inside(indices, x.shape[axis])
    if batch == 0:
        return [x.take(indices, axis)]
    require(axis >= 1 and x.shape[0] == indices.shape[0], f"{x.shape} by {indices.shape}")
    rows = [x[b].take(indices[b], axis - 1) for b in range(len(x))]
    return [np.stack(rows)]


def _gather_nd(x: Array, indices: Array, batch: int) -> Array:
    depth = indices.shape[-1]
    require(x.shape[:batch] == indices.shape[:batch], f"batch dims of {x.shape}, {indices.shape}")
    require(batch + depth <= x.ndim and batch < indices.ndim, f"{x.shape} by {indices.shape}")
    for position in range(depth):
        _inside(indices[..., position], x.shape[batch + position])
    grid = np.indices(indices.shape[:-1], sparse=True)[:batch]
    where = (*grid, *np.moveaxis(indices, -1, 0))
    return np.asarray(x[where])


def scatter(layer: Any, inputs: Inputs) -> list[Array]:
    """IScatterLayer by element. Writing two values to one place is undefined: refused."""
    x, indices, updates = (of(inputs, index) for index in range(3))
    axis = layer.axis
    require(layer.mode.name == "ELEMENT", f"scatter {layer.mode.name} is not evaluated")
    same_type(x, updates)
    require(indices.dtype in INTEGERS and indices.shape == updates.shape, "scatter's indices")
    require(x.ndim == indices.ndim, f"scatter of {updates.shape} into {x.shape}")
    _inside(indices, x.shape[axis])
    where = list(np.indices(indices.shape, sparse=True))
    where[axis] = indices
    result = x.copy()
    result[tuple(where)] = updates
    written = result[tuple(where)]
    is_same = (written == updates) | ((written != written) & (updates != updates))
    require(is_same.all(), "scatter of different values to one place")
    return [result]


def fill(layer: Any, inputs: Inputs) -> list[Array]:
    """IFillLayer: evenly spaced numbers."""
    require(layer.operation.name == "LINSPACE", f"fill {layer.operation.name} is not evaluated")
    dims = _dims(layer.shape, optional(inputs, 0)) or []
    dtype = numpy_type(layer.get_output(0).dtype)
    require(dtype in INTEGERS | {np.dtype(np.float32)}, f"fill of {dtype}")
    start, delta = optional(inputs, 1), optional(inputs, 2)
    require((start is None) == (delta is None), "fill: start and delta, both or none")
    if start is None or delta is None:
        require(len(dims) == 1, f"fill of {dims} with one delta")
        start, delta = np.asarray(layer.alpha), np.asarray([layer.beta])
    else:
        require(start.dtype == delta.dtype == dtype, f"fill of {dtype} from {start.dtype}")
        require(start.shape == () and delta.shape == (len(dims),), "fill: start [], delta [rank]")
    grid = np.indices(dims, sparse=True)
    steps = sum((i * d for i, d in zip(grid, delta, strict=True)), np.zeros(dims))
    result = np.asarray(start + steps)
    return [result.astype(np.float64) if dtype in FLOATS else result.astype(dtype)]


def _dims(static: Any, dynamic: Array | None) -> list[int] | None:
    """Dims given as a tensor, or else as a parameter; None where neither is."""
    if dynamic is not None:
        require(dynamic.ndim == 1 and dynamic.dtype in INTEGERS, f"dims of shape {dynamic.shape}")
        return [int(n) for n in dynamic]
    return None if static is None else [int(n) for n in _plain(static)]


def _plain(dims: Any) -> Sequence[int]:
    return tuple(dims)


def _inside(indices: Array, length: int) -> None:
    inside = (indices >= 0) & (indices < length)
    if not inside.all():
        raise EvaluationError(f"index {indices[~inside][:1]} of {length} elements")
