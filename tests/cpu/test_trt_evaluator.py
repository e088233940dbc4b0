"""The evaluator of TensorRT networks: layers made by hand, against NumPy, PyTorch and ONNX."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorrt_rtx as trt
import torch
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from tiny.trt_networks import HandMade
from tiny.trt_types import TYPES, Array, EvaluationError, narrow

RNG = np.random.default_rng(8)
BF16, FP8, FP4 = (np.dtype(TYPES[name]) for name in ("BF16", "FP8", "FP4"))
OPS, UNARY, REDUCE = trt.ElementWiseOperation, trt.UnaryOperation, trt.ReduceOperation
X = RNG.normal(0, 2, (2, 3, 8)).astype(np.float32)
Y = RNG.normal(0, 2, (1, 3, 1)).astype(np.float32)
INTS = RNG.integers(0, 9, (3, 5)).astype(np.int32)
WIDE = RNG.integers(0, 2**61, (2, 5)).astype(np.int64)
FLAGS = RNG.random((2, 3, 8)) < 0.5

Layer = Callable[..., Any]


def run(add: Layer, *arrays: Array, dynamic: bool = True, **options: Any) -> list[Array]:
    """One layer over network inputs whose dims are not known, or are."""
    made = HandMade()
    tensors = [
        made.input(f"in{i}", array, (-1,) * array.ndim if dynamic else None)
        for i, array in enumerate(arrays)
    ]
    layer = add(made.network, *tensors)
    made.output(*(layer.get_output(i) for i in range(layer.num_outputs)))
    return made.run({f"in{i}": array.copy() for i, array in enumerate(arrays)}, **options)


def binary(op: Any) -> Layer:
    return lambda net, a, b: net.add_elementwise(a, b, op)


def test_bfloat16_is_rounded_once_to_the_nearest() -> None:
    x = RNG.normal(size=50_000) * 10.0 ** RNG.integers(-30, 30, 50_000)
    found = narrow(x, BF16)
    for toward in (np.inf, -np.inf):
        other = np.nextafter(found, BF16.type(toward)).astype(np.float64)
        assert (np.abs(found.astype(np.float64) - x) <= np.abs(other - x)).all()
    tie = 1 + 2.0**-8  # between 1 and its neighbour 1 + 2^-7; through float32 all would be ties
    assert narrow(np.array([tie, tie + 2.0**-40, tie - 2.0**-40]), BF16).tolist() == [
        1.0, 1 + 2.0**-7, 1.0,
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["FLOAT", "HALF", "BF16", "INT32", "INT64", "BOOL", "FP8", "FP4"])
def test_constants_are_read_as_they_are_stored(name: str) -> None:
    values = np.array([[0, 1, -2, 4, 6, -0.5, 3, 1.5], [1, 0, 0, 2, -6, 2, -1, 4]])
    array = values.astype(np.bool_ if name == "BOOL" else TYPES[name])
    made = HandMade()
    tensor = made.constant(array)
    if name in ("FP8", "FP4"):  # no network output may be of these
        scale = made.constant(np.array(2.0, np.float32))
        tensor = made.network.add_dequantize(tensor, scale, trt.float32).get_output(0)
    made.output(made.network.add_identity(tensor).get_output(0))
    (found,) = made.run({})
    np.testing.assert_array_equal(found, array.astype(float) * 2 if "FP" in name else array)


ELEMENTWISE = {
    "SUM": np.add, "PROD": np.multiply, "SUB": np.subtract, "MAX": np.maximum,
    "MIN": np.minimum, "DIV": np.divide, "EQUAL": np.equal, "GREATER": np.greater,
    "LESS": np.less,
}  # fmt: skip


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BF16])
@pytest.mark.parametrize("op", ELEMENTWISE)
def test_elementwise_floats(op: str, dtype: Any) -> None:
    a, b = X.astype(dtype), Y.astype(dtype)
    (found,) = run(binary(getattr(OPS, op)), a, b)
    wanted = ELEMENTWISE[op](a.astype(np.float32), b.astype(np.float32))
    assert found.dtype == (np.bool_ if wanted.dtype == np.bool_ else dtype)
    np.testing.assert_array_equal(found, wanted.astype(found.dtype))


def test_elementwise_integers() -> None:
    prime = np.array([[2**31 - 1]], np.int64)
    assert (run(binary(OPS.FLOOR_DIV), WIDE, prime)[0] == WIDE // prime).all()
    assert (run(binary(OPS.FLOOR_DIV), INTS - 4, INTS + 1)[0] == (INTS - 4) // (INTS + 1)).all()
    rest = WIDE % prime
    assert (run(binary(OPS.PROD), rest, prime - 1)[0] == rest * (prime - 1)).all()


@pytest.mark.parametrize(
    ("op", "a", "b"),
    [
        (OPS.PROD, WIDE, WIDE + 2),
        (OPS.SUM, np.array([2**31 - 1], np.int32), np.array([1], np.int32)),
        (OPS.FLOOR_DIV, INTS, INTS * 0),
        (OPS.DIV, INTS - 9, INTS + 1),
        (OPS.SUM, X, Y[0]),
        (OPS.SUM, X, X.astype(np.float16)),
        (OPS.SUM, X, X[:, :2]),
    ],
)
def test_what_tensorrt_does_not_define_is_refused(op: Any, a: Array, b: Array) -> None:
    with pytest.raises((EvaluationError, RuntimeError)):
        run(binary(op), a, b)


def test_unary_activation_select_and_cast() -> None:
    positive = np.abs(X) + 0.1
    for op, function in (("EXP", np.exp), ("LOG", np.log), ("SQRT", np.sqrt), ("NEG", np.negative)):
        (found,) = run(lambda net, x, o=op: net.add_unary(x, getattr(UNARY, o)), positive)
        np.testing.assert_allclose(found, function(positive), rtol=2e-7)
    (found,) = run(lambda net, x: net.add_activation(x, trt.ActivationType.SIGMOID), X)
    np.testing.assert_allclose(found, torch.sigmoid(torch.from_numpy(X)), rtol=3e-7)
    (found,) = run(lambda net, x: net.add_unary(x, UNARY.NOT), FLAGS)
    np.testing.assert_array_equal(found, ~FLAGS)
    (found,) = run(lambda net, c, a, b: net.add_select(c, a, b), FLAGS, X, Y)
    np.testing.assert_array_equal(found, np.where(FLAGS, X, Y))
    (found,) = run(lambda net, x: net.add_cast(x, trt.int32), X)
    np.testing.assert_array_equal(found, X.astype(np.int32))
    with pytest.raises(EvaluationError, match="does not fit"):
        run(lambda net, x: net.add_cast(x, trt.int32), WIDE)


def test_reductions_and_running_sums() -> None:
    for op, function in (("SUM", np.sum), ("MAX", np.max), ("AVG", np.mean)):
        for axes, mask in (((2,), 4), ((0, 2), 5)):
            (found,) = run(
                lambda net, x, o=op, m=mask: net.add_reduce(x, getattr(REDUCE, o), m, True), X
            )
            np.testing.assert_allclose(found, function(X, axis=axes, keepdims=True), rtol=1e-6)
    half = np.full((1, 4096), 0.1, np.float16)  # a sum in FP16 would stop at 256
    (found,) = run(lambda net, x: net.add_reduce(x, REDUCE.SUM, 2, False), half)
    assert found[0] == np.float16(4096 * np.float64(np.float16(0.1)))

    def scan(net: Any, x: Any, **options: bool) -> Any:
        axis = net.add_constant((), np.array(1, np.int32)).get_output(0)
        return net.add_cumulative(x, axis, trt.CumulativeOperation.SUM, **options)

    (found,) = run(lambda net, x: scan(net, x, exclusive=False, reverse=False), INTS)
    np.testing.assert_array_equal(found, INTS.cumsum(1))
    (found,) = run(lambda net, x: scan(net, x, exclusive=True, reverse=True), INTS)
    np.testing.assert_array_equal(found, np.flip(np.flip(INTS, 1).cumsum(1), 1) - INTS)


def test_topk_sorts_and_shows_both_orders_of_ties() -> None:
    x = np.array([[1, 5, 5, 0], [2, 2, 2, 2]], np.float32)

    def layer(net: Any, x: Any) -> Any:
        return net.add_topk(x, trt.TopKOperation.MAX, 3, 2)

    assert run(layer, x, ties="lower")[1].tolist() == [[1, 2, 0], [0, 1, 2]]
    assert run(layer, x, ties="higher")[1].tolist() == [[2, 1, 0], [3, 2, 1]]
    assert run(layer, x)[0].tolist() == [[5, 5, 1], [2, 2, 2]]
    with pytest.raises((EvaluationError, RuntimeError)):
        run(layer, x[:, :2])


def test_matrix_products_are_rounded_once() -> None:
    a, b = (RNG.normal(size=s).astype(BF16) for s in ((2, 4, 96), (1, 5, 96)))
    none, turned = trt.MatrixOperation.NONE, trt.MatrixOperation.TRANSPOSE
    (found,) = run(lambda net, x, w: net.add_matrix_multiply(x, none, w, turned), a, b)
    wanted = a.astype(np.float64) @ b.astype(np.float64).swapaxes(-1, -2)
    np.testing.assert_array_equal(found, narrow(wanted, BF16))


def test_shuffle_slice_and_concatenation() -> None:
    def shuffle(net: Any, x: Any) -> Any:
        layer = net.add_shuffle(x)
        layer.first_transpose, layer.reshape_dims = (2, 0, 1), (0, -1)
        layer.second_transpose = (1, 0)
        return layer

    (found,) = run(shuffle, X)
    np.testing.assert_array_equal(found, X.transpose(2, 0, 1).reshape(8, -1).T)

    def reshaped(net: Any, x: Any, dims: Any) -> Any:
        layer = net.add_shuffle(x)
        layer.set_input(1, dims)
        return layer

    (found,) = run(reshaped, X, np.array([0, 3, -1], np.int64), dynamic=False)
    np.testing.assert_array_equal(found, X.reshape(2, 3, 8))

    def sliced(net: Any, x: Any, size: Any) -> Any:
        layer = net.add_slice(x, (0, 1, 7), (0, 0, 0), (1, 1, -2))
        layer.set_input(2, size)
        return layer

    size = np.array([2, 2, 4], np.int32)
    np.testing.assert_array_equal(run(sliced, X, size, dynamic=False)[0], X[:, 1:3, ::-2])
    with pytest.raises(EvaluationError, match="slice"):
        run(sliced, X, size + 1, dynamic=False)

    def joined(net: Any, a: Any, b: Any) -> Any:
        layer = net.add_concatenation([a, b])
        layer.axis = 1
        return layer

    (found,) = run(joined, X, X[:, :1])
    np.testing.assert_array_equal(found, np.concatenate([X, X[:, :1]], 1))


def onnx_op(op: str, *inputs: Array, **attrs: Any) -> Array:
    """What onnx's own reference makes of an operator."""
    names = [f"x{i}" for i in range(len(inputs))]
    infos = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
        for n, a in zip(names, inputs, strict=True)
    ]
    result = helper.make_tensor_value_info("y", TensorProto.UNDEFINED, None)
    graph = helper.make_graph([helper.make_node(op, names, ["y"], **attrs)], "g", infos, [result])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)])
    return np.asarray(ReferenceEvaluator(model).run(None, dict(zip(names, inputs, strict=True)))[0])


@pytest.mark.parametrize(
    ("mode", "indices", "axis", "batch", "reference"),
    [
        ("DEFAULT", [[2, 0], [1, 1]], 1, 0, ("Gather", {"axis": 1})),
        ("ELEMENT", RNG.integers(0, 8, (2, 3, 5)), 2, 0, ("GatherElements", {"axis": 2})),
        ("ND", [[[2], [0]], [[1], [1]]], 0, 1, ("GatherND", {"batch_dims": 1})),
        ("ND", [[2, 7], [0, 1]], 0, 1, ("GatherND", {"batch_dims": 1})),
        ("ND", [[1, 2], [0, 0]], 0, 0, ("GatherND", {})),
    ],
)
def test_gathers_are_those_of_onnx(
    mode: str, indices: Any, axis: int, batch: int, reference: tuple[str, dict[str, int]]
) -> None:
    at = np.asarray(indices, np.int32)

    def layer(net: Any, x: Any, index: Any) -> Any:
        made = net.add_gather_v2(x, index, getattr(trt.GatherMode, mode))
        made.axis, made.num_elementwise_dims = axis, batch
        return made

    (found,) = run(layer, X, at, dynamic=False)
    op, attrs = reference
    np.testing.assert_array_equal(found, onnx_op(op, X, at.astype(np.int64), **attrs))
    for wrong in (at + 8, at - 8):
        with pytest.raises(EvaluationError, match="index"):
            run(layer, X, wrong, dynamic=False)


def test_gather_by_rows_of_a_batch() -> None:
    at = np.array([[2, 0], [1, 1]], np.int32)

    def layer(net: Any, x: Any, index: Any) -> Any:
        made = net.add_gather(x, index, 1)
        made.num_elementwise_dims = 1
        return made

    np.testing.assert_array_equal(run(layer, X, at)[0], np.stack([X[b][at[b]] for b in range(2)]))


def test_scatter_writes_and_refuses_two_values_in_one_place() -> None:
    at = np.array([[0, 4], [2, 2], [3, 1]], np.int32)
    new = np.array([[7, 8], [9, 9], [1, 2]], np.int32)

    def layer(net: Any, x: Any, index: Any, values: Any) -> Any:
        made = net.add_scatter(x, index, values, trt.ScatterMode.ELEMENT)
        made.axis = 1
        return made

    (found,) = run(layer, INTS, at, new)
    np.testing.assert_array_equal(found, onnx_op("ScatterElements", INTS, at, new, axis=1))
    new[1, 1] += 1
    with pytest.raises(EvaluationError, match="one place"):
        run(layer, INTS, at, new)


def test_fill_counts() -> None:
    def layer(net: Any, x: Any) -> Any:
        made = net.add_fill((1,), trt.FillOperation.LINSPACE, trt.int32)
        made.set_input(0, net.add_shape(x).get_output(0))
        made.set_input(1, net.add_constant((), np.array(3, np.int32)).get_output(0))
        made.set_input(2, net.add_constant((1,), np.array([2], np.int32)).get_output(0))
        return made

    (found,) = run(layer, np.zeros(5, np.float32))
    assert found.dtype == np.int32
    assert found.tolist() == [3, 5, 7, 9, 11]


QUERY, KEY, VALUE = (
    RNG.normal(size=(3, heads, rows, 8)).astype(np.float32)
    for heads, rows in ((6, 4), (2, 20), (2, 20))
)
LIVE = np.array([4, 9, 17], np.int32)
ROW, CACHED = np.indices((4, 20), sparse=True)
MASKS = {
    "lengths": np.broadcast_to(LIVE[:, None, None] > CACHED, (3, 4, 20)),
    "causal": ROW + LIVE[:, None, None] - 4 >= CACHED,
    "window": np.broadcast_to((CACHED <= ROW + 6) & (CACHED > ROW), (3, 4, 20)),
}


def attend(kind: str = "NONE") -> Layer:
    def layer(net: Any, q: Any, k: Any, v: Any, *mask: Any) -> Any:
        made = net.add_attention_v2(
            q, k, v, trt.AttentionNormalizationOp.SOFTMAX, getattr(trt.CausalMaskKind, kind)
        )
        if mask:
            (made.mask,) = mask
        return made

    return layer


@pytest.mark.parametrize("name", MASKS)
def test_attention_sees_what_its_mask_allows(name: str) -> None:
    """Heads share keys, and the mask is one for all heads; PyTorch says what comes of it."""
    mask = MASKS[name][:, None].copy()
    q, k, v, allowed = (torch.from_numpy(x) for x in (QUERY, KEY, VALUE, mask))
    wanted = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, allowed, scale=1.0, enable_gqa=True
    )
    dead = ~mask.any((1, 2))[:, None, :, None]
    key, value = (np.where(dead, 1e30, x).astype(np.float32) for x in (KEY, VALUE))
    (found,) = run(attend(), QUERY, key, value, mask)
    np.testing.assert_allclose(found, wanted.numpy(), atol=1e-6)


def test_attention_that_the_lowering_does_not_make_is_refused() -> None:
    mask = MASKS["lengths"][:, None].copy()
    none = mask.copy()
    none[1, :, 2] = False
    added = np.where(mask, 0, -np.inf).astype(np.float32)
    for kind, given, match in (
        ("NONE", [none], "no key"),
        ("NONE", [added], "a mask of float32"),
        ("LOWER_RIGHT", [], "LOWER_RIGHT"),
        ("NONE", [], "without a mask"),
    ):
        with pytest.raises(EvaluationError, match=match):
            run(attend(kind), QUERY, KEY, VALUE, *given)
