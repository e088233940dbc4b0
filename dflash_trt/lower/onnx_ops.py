"""One emitter for each op that ONNX expresses whole; the others are decomposed.

ONNX Runtime's own operators are used where the standard has none: FusedMatMul reads a weight as
checkpoints store it, [out, in]; MatMulNBits reads packed blocks.
"""

from __future__ import annotations

import numpy as np
from onnx import TensorProto, helper

from dflash_trt.contract import BLOCK_ROWS
from dflash_trt.errors import NoLowering
from dflash_trt.graph import Dim, LinearWeight, Node
from dflash_trt.lower.onnx_emitter import ONNX_TYPES, Emitter, OnnxEmitter, value_info
from dflash_trt.lower.walk import copied_dims

MICROSOFT = "com.microsoft"
STACKED_BELOW = 1024  # outputs; above, a split costs more than one more product
INT8_ACTIVATIONS = 4  # MatMulNBits accuracy_level: activations quantized per block, INT32 sums


def _simple(op: str) -> Emitter:
    return lambda low, node: low.emit(op, [low.names[x] for x in node.inputs], node)


def _param(low: OnnxEmitter, node: Node) -> list[str]:
    return [low.weights.dense(node.attrs["name"], node.outputs[0].shape)]


def _constant(low: OnnxEmitter, node: Node) -> list[str]:
    return [low.weights.constant(node.attrs["value"])]


def _embedding(low: OnnxEmitter, node: Node) -> list[str]:
    a = node.attrs
    table = low.weights.dense(a["name"], (a["vocab_size"], a["hidden_size"]))
    return low.emit("Gather", [table, low.names[node.inputs[0]]], node, axis=0)


def _linear(low: OnnxEmitter, node: Node) -> list[str]:
    """Narrow products are stacked into one and split; wide ones are worth a node each."""
    weights: tuple[LinearWeight, ...] = node.attrs["weights"]
    if min(w.out_features for w in weights) < STACKED_BELOW:
        parts = _stacked_product(low, node, weights)
    else:
        parts = [part for w in weights for part in _stacked_product(low, node, (w,))]
    return [
        part if w.bias is None
        else low.emit("Add", [part, low.weights.dense(w.bias, (w.out_features,))], node)[0]
        for part, w in zip(parts, weights, strict=True)
    ]  # fmt: skip


def _stacked_product(low: OnnxEmitter, node: Node, weights: tuple[LinearWeight, ...]) -> list[str]:
    """One product of the input with all weights."""
    x = node.inputs[0]
    in_features = _known(x.shape[-1])
    names = [w.name for w in weights]
    sizes = [w.out_features for w in weights]
    packed = low.weights.packed(names, (sum(sizes), in_features))
    if packed is None:
        stacked = low.weights.stacked(names, sizes, in_features)
        inputs = [low.names[x], stacked]
        product = low.emit("FusedMatMul", inputs, node, domain=MICROSOFT, transB=1)
    else:
        inputs = [low.names[x], packed.codes, packed.scales]
        product = low.emit(
            "MatMulNBits", inputs, node, domain=MICROSOFT, K=in_features, N=sum(sizes),
            bits=packed.bits, block_size=packed.block_size, accuracy_level=INT8_ACTIVATIONS,
        )  # fmt: skip
        if packed.offsets is not None:
            product = _add_offsets(low, node, product, packed.offsets, packed.block_size)
    if len(weights) == 1:
        return product
    split = low.const(sizes, np.int64)
    return low.emit("Split", [product[0], split], node, len(weights), axis=-1)


def _add_offsets(
    low: OnnxEmitter, node: Node, product: list[str], offsets: str, block_size: int
) -> list[str]:
    """Blocks with a minimum (Q4_1): x W = x (scale * code) + sum(x of block) * offset, exactly."""
    x = node.inputs[0]
    blocks = _known(x.shape[-1]) // block_size
    shape = low.const([0] * (x.rank - 1) + [blocks, block_size], np.int64)
    in_blocks = low.emit("Reshape", [low.names[x], shape], node)
    sums = low.emit("ReduceSum", [*in_blocks, low.const([-1], np.int64)], node, keepdims=0)
    minimum = low.emit("FusedMatMul", [*sums, offsets], node, domain=MICROSOFT, transB=1)
    return low.emit("Add", [*product, *minimum], node)


def _cast(low: OnnxEmitter, node: Node) -> list[str]:
    source, target = ONNX_TYPES[node.inputs[0].dtype], ONNX_TYPES[node.outputs[0].dtype]
    name = low.names[node.inputs[0]]
    return [name if source == target else low.cast(name, target, node)]


def _size(low: OnnxEmitter, node: Node) -> list[str]:
    shape = low.emit("Shape", [low.names[node.inputs[0]]], node)[0]
    axis = low.const(node.attrs["axis"], np.int64)
    length = low.emit("Gather", [shape, axis], node)[0]
    return [low.cast(length, TensorProto.INT32, node)]


def _iota(low: OnnxEmitter, node: Node) -> list[str]:
    zero, one = low.const(0, np.int32), low.const(1, np.int32)
    return low.emit("Range", [zero, low.names[node.inputs[0]], one], node)


def _reshape(low: OnnxEmitter, node: Node) -> list[str]:
    shape = copied_dims(node.inputs[0].shape, node.outputs[0].shape)
    return low.emit("Reshape", [low.names[node.inputs[0]], low.const(shape, np.int64)], node)


def _transpose(low: OnnxEmitter, node: Node) -> list[str]:
    return low.emit("Transpose", [low.names[node.inputs[0]]], node, perm=list(node.attrs["perm"]))


def _concat(low: OnnxEmitter, node: Node) -> list[str]:
    return low.emit("Concat", [low.names[x] for x in node.inputs], node, axis=node.attrs["axis"])


def _gather_rows(low: OnnxEmitter, node: Node) -> list[str]:
    x, rows = (low.names[t] for t in node.inputs)
    wide = low.cast(rows, TensorProto.INT64, node)
    index = low.emit("Unsqueeze", [wide, low.const([-1], np.int64)], node)[0]
    return low.emit("GatherND", [x, index], node, batch_dims=1)


def _gather_last(low: OnnxEmitter, node: Node) -> list[str]:
    return low.emit(
        "GatherElements", [low.names[x] for x in node.inputs], node, axis=node.inputs[0].rank - 1
    )


def _scatter_last(low: OnnxEmitter, node: Node) -> list[str]:
    return low.emit(
        "ScatterElements", [low.names[x] for x in node.inputs], node, axis=node.inputs[0].rank - 1
    )


def _take(low: OnnxEmitter, node: Node) -> list[str]:
    return low.emit("Gather", [low.names[x] for x in node.inputs], node, axis=node.attrs["axis"])


def _reduce(op: str) -> Emitter:
    def emit(low: OnnxEmitter, node: Node) -> list[str]:
        inputs = [low.names[node.inputs[0]], low.const([-1], np.int64)]
        return low.emit(op, inputs, node, keepdims=int(node.attrs["keepdims"]))

    return emit


def _reduce_all_max(low: OnnxEmitter, node: Node) -> list[str]:
    return low.emit("ReduceMax", [low.names[node.inputs[0]]], node, keepdims=0)


def _cumsum(low: OnnxEmitter, node: Node) -> list[str]:
    return low.emit("CumSum", [low.names[node.inputs[0]], low.const(-1, np.int64)], node)


def _argmax(low: OnnxEmitter, node: Node) -> list[str]:
    index = low.emit("ArgMax", [low.names[node.inputs[0]]], node, axis=-1, keepdims=0)[0]
    return [low.cast(index, TensorProto.INT32, node)]


def _topk(low: OnnxEmitter, node: Node) -> list[str]:
    x, k = (low.names[t] for t in node.inputs)
    shape = low.const([1], np.int64)
    count = low.emit("Reshape", [low.cast(k, TensorProto.INT64, node), shape], node)[0]
    values, ids = low.emit("TopK", [x, count], node, 2, axis=-1, largest=1, sorted=1)
    return [values, low.cast(ids, TensorProto.INT32, node)]


def _kv_update(low: OnnxEmitter, node: Node) -> list[str]:
    cache, update, start = (low.names[t] for t in node.inputs)
    index = low.cast(start, TensorProto.INT64, node)
    return low.emit("TensorScatter", [cache, update, index], node, axis=-2, mode="linear")


def _attention(low: OnnxEmitter, node: Node) -> list[str]:
    """Attention over the whole caches, each row up to its own length.

    ONNX Runtime's cost follows the rows of the caches, live or not: the session binds short ones.
    """
    query, key, value, kv_length = (low.names[t] for t in node.inputs)
    mask = node.attrs["mask"]
    lengths = low.cast(kv_length, TensorProto.INT64, node)
    window = "" if mask.window is None else _window_mask(low, node, mask.window)
    inputs = [query, key, value, window, "", "", lengths]
    if node.inputs[0].shape[2] != BLOCK_ROWS:
        return low.emit("Attention", inputs, node, is_causal=int(mask.causal))
    return _unless_empty(low, node, inputs, int(mask.causal))


def _unless_empty(low: OnnxEmitter, node: Node, inputs: list[str], is_causal: int) -> list[str]:
    """Attention, or nothing in a step that drafts nothing: ONNX Runtime refuses zero queries."""
    rows = low.emit("Shape", [inputs[0]], node, start=2, end=3)[0]
    some = low.emit("Greater", [rows, low.const([0], np.int64)], node)[0]
    result = node.outputs[0]
    full, nothing = low.fresh("result"), low.fresh("result")
    branches = [
        helper.make_graph([made], made.op_type, [], [value_info(made.output[0], result)])
        for made in (
            helper.make_node("Attention", inputs, [full], is_causal=is_causal),
            helper.make_node("Identity", inputs[:1], [nothing]),
        )
    ]
    return low.emit("If", [some], node, then_branch=branches[0], else_branch=branches[1])


def _window_mask(low: OnnxEmitter, node: Node, window: int) -> str:
    """bool [B, 1, S, C]: the keys less than `window` positions before each query."""
    query, cache, _, kv_length = (low.names[t] for t in node.inputs)
    columns, scalar = low.const([-1, 1, 1, 1], np.int64), low.const([], np.int64)

    def num_rows(name: str) -> str:
        shape = low.emit("Shape", [name], node, start=2, end=3)[0]
        return low.emit("Reshape", [low.cast(shape, TensorProto.INT32, node), scalar], node)[0]

    rows, total = num_rows(query), num_rows(cache)
    span = low.emit("Range", [low.const(0, np.int32), rows, low.const(1, np.int32)], node)[0]
    column = low.emit("Unsqueeze", [span, low.const([-1], np.int64)], node)[0]
    first = low.emit("Sub", [low.emit("Reshape", [kv_length, columns], node)[0], rows], node)[0]
    position = low.emit("Add", [first, column], node)[0]  # [B, 1, S, 1]
    keys = low.emit("Range", [low.const(0, np.int32), total, low.const(1, np.int32)], node)[0]
    oldest = low.emit("Sub", [position, low.const(window, np.int32)], node)[0]
    return low.emit("Less", [oldest, keys], node)[0]


def _rms_norm(low: OnnxEmitter, node: Node) -> list[str]:
    inputs = [low.names[t] for t in node.inputs]
    return low.emit("RMSNormalization", inputs, node, axis=-1, epsilon=float(node.attrs["eps"]))


def _rope(low: OnnxEmitter, node: Node) -> list[str]:
    x, positions, cos, sin = (low.names[t] for t in node.inputs)
    index = low.cast(positions, TensorProto.INT64, node)
    return low.emit("RotaryEmbedding", [x, cos, sin, index], node)


def _cond(low: OnnxEmitter, node: Node) -> list[str]:
    then, otherwise = (low.branch(node.attrs[name]) for name in ("then", "otherwise"))
    predicate = [low.names[node.inputs[0]]]
    return low.emit("If", predicate, node, then_branch=then, else_branch=otherwise)


def _known(dim: Dim) -> int:
    if not isinstance(dim, int):
        raise NoLowering(f"dim {dim!r} must be known to lower a product")
    return dim


EMITTERS: dict[str, Emitter] = {
    "param": _param,
    "constant": _constant,
    "embedding": _embedding,
    "linear": _linear,
    "cast": _cast,
    "size": _size,
    "iota": _iota,
    "reshape": _reshape,
    "transpose": _transpose,
    "concat": _concat,
    "gather_rows": _gather_rows,
    "gather_last": _gather_last,
    "scatter_last": _scatter_last,
    "take": _take,
    "reduce_sum": _reduce("ReduceSum"),
    "reduce_max": _reduce("ReduceMax"),
    "reduce_all_max": _reduce_all_max,
    "cumsum": _cumsum,
    "argmax": _argmax,
    "topk": _topk,
    "kv_update": _kv_update,
    "attention": _attention,
    "rms_norm": _rms_norm,
    "rope": _rope,
    "cond": _cond,
    **{
        op: _simple(name)
        for op, name in {
            "add": "Add",
            "sub": "Sub",
            "mul": "Mul",
            "div": "Div",
            "floor_div": "Div",  # integers: ONNX divides toward zero, and ours are not negative
            "mod": "Mod",
            "minimum": "Min",
            "maximum": "Max",
            "equal": "Equal",
            "less": "Less",
            "less_equal": "LessOrEqual",
            "logical_and": "And",
            "logical_or": "Or",
            "logical_not": "Not",
            "exp": "Exp",
            "log": "Log",
            "tanh": "Tanh",
            "sigmoid": "Sigmoid",
            "where": "Where",
        }.items()
    },
}
