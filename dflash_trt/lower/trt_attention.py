"""Emitters of attention over caches: rotary embedding, cache update, attention."""

from __future__ import annotations

import numpy as np

from dflash_trt.config import LayerMask
from dflash_trt.graph import DType, Node
from dflash_trt.lower.trt_emitter import Emitter, Literal, TrtEmitter, TrtTensor
from dflash_trt.lower.trt_math import arange, binary, reshaped, shape_of, unary


def _rope(low: TrtEmitter, node: Node) -> list[TrtTensor]:
    """The native layer; it wants its tables in the type of x, as Hugging Face rotates too.

    Positions are INT64, the one type that its documentation names; INT32 builds as well.
    """
    x, positions = (low.value(tensor, node) for tensor in node.inputs[:2])
    positions = low.cast(positions, low.trt.DataType.INT64, node)
    tables = [
        low.placed(value, x.dtype, node)
        if isinstance(value := low.names[tensor], Literal)
        else low.cast(value, x.dtype, node)
        for tensor in node.inputs[2:]
    ]

    def make() -> TrtTensor:
        layer = low.network.add_rotary_embedding(x, *tables, False, x.shape[-1])
        layer.set_input(3, positions)
        return layer

    return low.layer(node, "rotary", [x, *tables, positions], make)


def _kv_update(low: TrtEmitter, node: Node) -> list[TrtTensor]:
    inputs = [low.value(tensor, node) for tensor in node.inputs]
    mode = low.trt.KVCacheMode.LINEAR
    return low.layer(
        node, "kv_update", inputs, lambda: low.network.add_kv_cache_update(*inputs, mode)
    )


def _attention(low: TrtEmitter, node: Node) -> list[TrtTensor]:
    """The native layer. It does not scale: the query comes scaled.

    Without a window the mask is the layer's own, aligned to the last key of each row. TensorRT
    takes either that or a mask tensor, so a window's tensor holds the causal part too.
    """
    query, key, value, kv_length = (low.value(tensor, node) for tensor in node.inputs)
    mask: LayerMask = node.attrs["mask"]
    scale = low.const(np.full((1,) * 4, query.shape[-1] ** -0.5), query.dtype, node)
    scaled = binary(low, node, "PROD", query, scale)
    kinds = low.trt.CausalMaskKind
    allowed = None if mask.window is None else _window(low, node, mask, (query, key, kv_length))
    kind = kinds.LOWER_RIGHT if mask.causal and allowed is None else kinds.NONE

    def make() -> TrtTensor:
        softmax = low.trt.AttentionNormalizationOp.SOFTMAX
        layer = low.network.add_attention_v2(scaled, key, value, softmax, kind)
        layer.key_value_lengths = kv_length
        if allowed is not None:
            layer.mask = allowed
        # There are fused kernels for 16-bit types only.
        layer.decomposable = low.types[DType.ACT] == low.trt.DataType.FLOAT
        return layer

    inputs = [scaled, key, value, kv_length, *([] if allowed is None else [allowed])]
    return low.layer(node, "attention", inputs, make, str(kind))


def _window(
    low: TrtEmitter, node: Node, mask: LayerMask, tensors: tuple[TrtTensor, TrtTensor, TrtTensor]
) -> TrtTensor:
    """bool [B, 1, S, C]: keys less than `window` positions before the query, none past the last."""
    query, key, kv_length = tensors
    int32 = low.trt.DataType.INT32
    assert mask.window is not None

    def number(value: int) -> TrtTensor:
        return low.const(np.full((1,) * 4, value), int32, node)

    num_rows = shape_of(low, node, query, 2)
    rows = low.placed(arange(low, node, num_rows), int32, node)
    rows = reshaped(low, node, rows, [1, 1, -1, 1])
    end = reshaped(low, node, kv_length, [0, 1, 1, 1])
    first = binary(low, node, "SUB", end, low.placed(num_rows, int32, node, 4))
    position = binary(low, node, "SUM", first, rows)
    keys = low.placed(arange(low, node, shape_of(low, node, key, 2)), int32, node, 4)
    oldest = binary(low, node, "SUB", position, number(mask.window))
    newest = position if mask.causal else binary(low, node, "SUB", end, number(1))
    recent = binary(low, node, "LESS", oldest, keys)
    known = unary(low, node, "NOT", binary(low, node, "GREATER", keys, newest))
    return binary(low, node, "AND", recent, known)


ATTENTION: dict[str, Emitter] = {"rope": _rope, "kv_update": _kv_update, "attention": _attention}
