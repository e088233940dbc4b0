"""Emitters of attention over caches: rotary embedding, cache update, attention."""

from __future__ import annotations

import numpy as np

from dflash_trt.config import LayerMask
from dflash_trt.graph import Node
from dflash_trt.lower.trt_emitter import Emitter, Literal, TrtEmitter, TrtTensor
from dflash_trt.lower.trt_math import arange, binary, length_of, reshaped, unary


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

    The query heads that share a key head are rows of one head: with more heads than keys have,
    TensorRT-RTX 1.7 copies every whole cache, once for each of them, in every step.

    Which keys a row sees is always a mask tensor. With lengths and the layer's own mask, kernels of
    TensorRT 11.1 and 11.2 read a cache past its rows' ends (NVIDIA/TensorRT-Model-Connect, pull
    requests 1035 and 1048).

    Where no fused kernel fits, by sizes or by GPU, TensorRT computes it as products and a softmax.
    """
    query, key, value = (low.value(tensor, node) for tensor in node.inputs[:3])
    heads, key_heads, head_dim = query.shape[1], key.shape[1], query.shape[-1]
    copies = heads // key_heads
    scale = low.const(np.full((1,) * 4, head_dim**-0.5), query.dtype, node)
    rows = binary(low, node, "PROD", query, scale)
    allowed = _allowed(low, node, copies)
    if copies > 1:
        rows = reshaped(low, node, rows, [0, key_heads, -1, head_dim])

    def make() -> TrtTensor:
        softmax, kind = low.trt.AttentionNormalizationOp.SOFTMAX, low.trt.CausalMaskKind.NONE
        layer = low.network.add_attention_v2(rows, key, value, softmax, kind)
        layer.mask = allowed
        layer.decomposable = True
        return layer

    made = low.layer(node, "attention", [rows, key, value, allowed], make)[0]
    return [reshaped(low, node, made, [0, heads, -1, head_dim]) if copies > 1 else made]


def _allowed(low: TrtEmitter, node: Node, copies: int) -> TrtTensor:
    """bool [B, 1, copies * S, C]: the keys that each row sees; the rows are there `copies` times.

    None past the last key, and where the layer's mask says so none behind the query (causal), or
    none `window` or more positions before it. All layers of one mask share the tensor.
    """
    query, key, _, kv_length = node.inputs
    mask: LayerMask = node.attrs["mask"]
    int32 = low.trt.DataType.INT32

    def number(value: int) -> TrtTensor:
        return low.const(np.full((1,) * 4, value), int32, node)

    num_rows = length_of(low, node, query, 2)
    row = low.placed(arange(low, node, num_rows), int32, node, 3)
    row = binary(low, node, "SUM", row, low.const(np.zeros((1, copies, 1)), int32, node))
    row = reshaped(low, node, row, [1, 1, -1, 1])
    end = reshaped(low, node, low.value(kv_length, node), [0, 1, 1, 1])
    first = binary(low, node, "SUB", end, low.placed(num_rows, int32, node, 4))
    position = binary(low, node, "SUM", first, row)
    keys = low.placed(arange(low, node, length_of(low, node, key, 2)), int32, node, 4)
    last = binary(low, node, "SUB", end, number(1))
    # A mask needs every row, so one that is the same for all of them is made of them too.
    newest = position if mask.causal else binary(low, node, "MAX", position, last)
    known = unary(low, node, "NOT", binary(low, node, "GREATER", keys, newest))
    if mask.window is None:
        return known
    oldest = binary(low, node, "SUB", position, number(mask.window))
    return binary(low, node, "AND", binary(low, node, "LESS", oldest, keys), known)


ATTENTION: dict[str, Emitter] = {"rope": _rope, "kv_update": _kv_update, "attention": _attention}
