"""What TensorRT's layers for transformers and quantization compute."""

from __future__ import annotations

from typing import Any

import numpy as np

from tiny.trt_layers import Inputs, normalized, of, optional, same_type
from tiny.trt_types import (
    BOOL,
    FLOATS,
    INTEGERS,
    QUANTIZED,
    TYPES,
    Array,
    numpy_type,
    quantized,
    require,
    wide,
)

NVFP4_BLOCK = 16
LARGEST_FP4 = 6.0


def kv_cache_update(layer: Any, inputs: Inputs) -> list[Array]:
    """IKVCacheUpdateLayer, linear: in place. TensorRT ignores rows past the end: refused here."""
    cache, update, start = (of(inputs, index) for index in range(3))
    require(layer.cache_mode.name == "LINEAR", f"cache mode {layer.cache_mode.name}")
    require(layer.update_form.name == "PADDED_BHND", f"update form {layer.update_form.name}")
    require(same_type(cache, update) in FLOATS, f"a cache of {cache.dtype}")
    slots, heads, capacity, width = cache.shape
    rows = update.shape[2]
    require(update.shape == (slots, heads, rows, width), f"{update.shape} into {cache.shape}")
    require(start.dtype in INTEGERS and start.shape == (slots,), f"write indices {start.shape}")
    for slot, first in enumerate(start.tolist()):
        require(0 <= first <= capacity - rows, f"rows {first}.. +{rows} of {capacity}")
        cache[slot, :, first : first + rows] = update[slot]
    return [cache]


def attention(layer: Any, inputs: Inputs) -> list[Array]:
    """IAttention with a boolean mask, at its input boundary: softmax(q k^T) v, not scaled."""
    spec = layer.attention
    query, key, value = (of(inputs, index) for index in range(3))
    mask = optional(inputs, 3)
    for form in (spec.query_form, spec.key_value_form):
        require(form.name == "PADDED_BHND", f"attention with {form.name}")
    require(spec.norm_op.name == "SOFTMAX", f"attention with {spec.norm_op.name}")
    require(spec.causal_kind.name == "NONE", f"attention with {spec.causal_kind.name}")
    require(all(optional(inputs, i) is None for i in (4, 5, 6)), "attention's inputs 4 to 6")
    require(same_type(query, key, value) in FLOATS, f"attention of {query.dtype}")
    slots, heads, rows, width = query.shape
    kv_heads, capacity = key.shape[1:3]
    require(key.shape == value.shape == (slots, kv_heads, capacity, width), "attention's shapes")
    require(heads % kv_heads == 0, f"{heads} heads over {kv_heads}")
    require(mask is not None, "attention without a mask")
    require(mask.dtype == BOOL, f"a mask of {mask.dtype}")
    shape = (slots, heads, rows, capacity)
    require(mask.ndim == 4 and mask.shape[2:] == shape[2:], f"a mask of {mask.shape} for {shape}")
    require(all(n in (1, m) for n, m in zip(mask.shape, shape, strict=True)), "a mask's shape")
    grouped = wide(query).reshape(slots, kv_heads, -1, rows, width)
    scores = grouped @ wide(key)[:, :, None].swapaxes(-1, -2)
    allowed = np.broadcast_to(mask, shape).reshape(scores.shape)
    require(allowed.any(-1).all(), "a query that may see no key at all")
    weights = normalized(np.where(allowed, scores, -np.inf), -1)
    return [(weights @ wide(value)[:, :, None]).reshape(query.shape)]


def attention_output(layer: Any, inputs: Inputs) -> list[Array]:
    """The other boundary of an IAttention: its result is already there."""
    return [of(inputs, 0)]


def rotary_embedding(layer: Any, inputs: Inputs) -> list[Array]:
    """IRotaryEmbeddingLayer with position ids."""
    x, cos, sin = (of(inputs, index) for index in range(3))
    positions = of(inputs, 3)
    slots, _, rows, width = x.shape
    part = layer.rotary_embedding_dim or width
    require(same_type(x, cos, sin) in FLOATS, f"rotary embedding of {x.dtype}")
    require(cos.ndim == 2 and cos.shape == sin.shape == (len(cos), part // 2), "rotary tables")
    require(positions.dtype == np.int64, f"position ids of {positions.dtype}")
    require(positions.shape == (slots, rows), f"position ids {positions.shape}")
    require(((positions >= 0) & (positions < len(cos))).all(), f"a position past {len(cos)}")
    c, s = (wide(table)[positions][:, None] for table in (cos, sin))
    result = wide(x).copy()
    halves = (slice(0, part, 2), slice(1, part, 2))
    if not layer.interleaved:
        halves = (slice(0, part // 2), slice(part // 2, part))
    a, b = (wide(x)[..., half] for half in halves)
    result[..., halves[0]] = a * c - b * s
    result[..., halves[1]] = b * c + a * s
    return [result]


def quantize(layer: Any, inputs: Inputs) -> list[Array]:
    """IQuantizeLayer: to the nearest FP8 or FP4 of x / scale, clamped."""
    x, scale = of(inputs, 0), of(inputs, 1)
    to = numpy_type(layer.to_type)
    require(optional(inputs, 2) is None, "a zero point")
    require(x.dtype in FLOATS and to in QUANTIZED, f"quantization of {x.dtype} to {to}")
    require(scale.dtype in (np.dtype(np.float32), x.dtype), f"{scale.dtype} scale of {x.dtype}")
    return [quantized(wide(x) / _spread(scale, x.shape, layer.axis), to)]


def dequantize(layer: Any, inputs: Inputs) -> list[Array]:
    """IDequantizeLayer: x * scale."""
    x, scale = of(inputs, 0), of(inputs, 1)
    to = numpy_type(layer.to_type)
    require(optional(inputs, 2) is None, "a zero point")
    require(x.dtype in QUANTIZED and to in FLOATS, f"dequantization of {x.dtype} to {to}")
    require(scale.dtype in (np.dtype(np.float32), to), f"{scale.dtype} scale for {to}")
    return [wide(x) * _spread(scale, x.shape, layer.axis)]


def _spread(scale: Array, shape: tuple[int, ...], axis: int) -> Array:
    """Scales of a tensor, of one axis, or of blocks along one of the last two axes: [shape]."""
    values = wide(scale)
    if values.ndim == len(shape) and values.ndim > 1:
        blocked = [a for a, (n, m) in enumerate(zip(values.shape, shape, strict=True)) if n != m]
        require(len(blocked) <= 1 and all(a >= len(shape) - 2 for a in blocked), "blocked axes")
        # A block scale of zero is that of a block of zeros.
        require((values >= 0).all() and np.isfinite(values).all(), "a scale below zero")
        for a in blocked:
            require(shape[a] % values.shape[a] == 0, f"{values.shape} scales of {shape}")
            values = values.repeat(shape[a] // values.shape[a], a)
        return values
    require((values > 0).all() and np.isfinite(values).all(), "a scale that is not positive")
    if values.size == 1:
        return values.reshape(())
    require(values.shape == (shape[axis],), f"{values.shape} scales of {shape}, axis {axis}")
    return values.reshape([-1 if a == axis else 1 for a in range(len(shape))])


def dynamic_quantize(layer: Any, inputs: Inputs) -> list[Array]:
    """IDynamicQuantizeLayer to NVFP4: block scales FP8(amax / 6 / global), elements FP4."""
    x, global_scale = of(inputs, 0), of(inputs, 1)
    axis = layer.axis % x.ndim
    to, scale_type = numpy_type(layer.to_type), numpy_type(layer.scale_type)
    require(to == TYPES["FP4"] and scale_type == TYPES["FP8"], f"quantization to {to}")
    require(layer.block_size == NVFP4_BLOCK and x.ndim in (2, 3), f"blocks of {layer.block_size}")
    require(x.dtype in FLOATS and axis >= x.ndim - 2, f"{x.dtype} along axis {axis}")
    require(x.shape[axis] % NVFP4_BLOCK == 0, f"{x.shape[axis]} in blocks of {NVFP4_BLOCK}")
    allowed = (np.dtype(np.float32), x.dtype)
    require(global_scale.size == 1 and global_scale.dtype in allowed, "the global scale")
    require(wide(global_scale) > 0, "the global scale is not positive")
    moved = np.moveaxis(wide(x), axis, -1)
    blocks = moved.reshape(*moved.shape[:-1], -1, NVFP4_BLOCK)
    whole = float(wide(global_scale).reshape(()))
    scales = quantized(np.abs(blocks).max(-1) / LARGEST_FP4 / whole, scale_type)
    used = wide(scales)[..., None] * whole
    ratio = np.divide(blocks, used, out=np.zeros_like(blocks), where=used > 0)
    codes = quantized(ratio, to).reshape(moved.shape)
    return [np.moveaxis(codes, -1, axis), np.moveaxis(scales, -1, axis)]
