"""The evaluator of TensorRT networks: caches, RoPE, quantization, and rules of whole networks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorrt_rtx as trt
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from tiny.trt_evaluator import NetworkEvaluator
from tiny.trt_networks import HandMade
from tiny.trt_types import TYPES, Array, EvaluationError

RNG = np.random.default_rng(9)
BF16, FP8, FP4 = (np.dtype(TYPES[name]) for name in ("BF16", "FP8", "FP4"))
SUM = trt.ElementWiseOperation.SUM


def cache_network(*, mark: bool = True, twice: bool = False) -> HandMade:
    """A cache of 10 rows, a row-wise update of any length, and what follows it."""
    made = HandMade()
    cache = made.input("cache", np.zeros(0, BF16), (-1, 2, 10, 4))
    update = made.input("update", np.zeros(0, BF16), (-1, 2, -1, 4))
    start = made.input("start", np.zeros(0, np.int32), (-1,))
    linear = trt.KVCacheMode.LINEAR
    for _ in range(1 + twice):
        result = made.network.add_kv_cache_update(cache, update, start, linear).get_output(0)
        if mark:
            made.output(result)
    if not mark:
        made.output(made.network.add_cast(result, trt.float32).get_output(0))
    return made


def feeds(start: list[int]) -> dict[str, Array]:
    return {
        "cache": RNG.normal(size=(2, 2, 10, 4)).astype(BF16),
        "update": RNG.normal(size=(2, 2, 3, 4)).astype(BF16),
        "start": np.array(start, np.int32),
    }


def test_a_cache_is_updated_in_place() -> None:
    arrays = feeds([0, 7])
    wanted = arrays["cache"].copy()
    wanted[0, :, 0:3], wanted[1, :, 7:10] = arrays["update"]
    (found,) = cache_network().run(arrays)
    assert found is arrays["cache"]
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("start", [[0, 8], [-1, 0]])
def test_rows_past_the_end_of_a_cache_are_refused(start: list[int]) -> None:
    with pytest.raises(EvaluationError, match="of 10"):
        cache_network().run(feeds(start))


def test_caches_must_be_inputs_and_outputs_and_are_updated_once() -> None:
    with pytest.raises(EvaluationError, match="input and an output"):
        cache_network(mark=False).run(feeds([0, 0]))
    with pytest.raises(EvaluationError, match="twice"):
        cache_network(twice=True).run(feeds([0, 0]))


def test_a_cache_that_is_updated_may_not_be_read_as_it_was() -> None:
    made = cache_network()
    cache = made.network.get_input(0)
    made.output(made.network.add_cast(cache, trt.float32).get_output(0))
    with pytest.raises(EvaluationError, match="read"):
        made.run(feeds([0, 0]))


def onnx_rope(x: Array, cos: Array, sin: Array, positions: Array, **attrs: int) -> Array:
    arrays = {"x": x, "c": cos, "s": sin, "p": positions}
    infos = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
        for n, a in arrays.items()
    ]
    node = helper.make_node("RotaryEmbedding", list(arrays), ["y"], **attrs)
    result = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    graph = helper.make_graph([node], "g", infos, [result])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)])
    return np.asarray(ReferenceEvaluator(model).run(None, arrays)[0])


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("part", [0, 4])
def test_rotary_embedding_is_that_of_onnx(interleaved: bool, part: int) -> None:
    x = RNG.normal(size=(2, 3, 5, 8)).astype(np.float32)
    cos, sin = RNG.normal(size=(2, 13, (part or 8) // 2)).astype(np.float32)
    positions = RNG.integers(0, 13, (2, 5)).astype(np.int64)
    made = HandMade()
    tensors = [made.input(f"in{i}", a) for i, a in enumerate((x, cos, sin, positions))]
    layer = made.network.add_rotary_embedding(*tensors[:3], interleaved, part)
    layer.set_input(3, tensors[3])
    made.output(layer.get_output(0))
    arrays = {"in0": x, "in1": cos, "in2": sin, "in3": positions}
    wanted = onnx_rope(
        x, cos, sin, positions, interleaved=int(interleaved), rotary_embedding_dim=part
    )
    np.testing.assert_allclose(made.run(arrays)[0], wanted, atol=1e-6)
    with pytest.raises(EvaluationError, match="position"):
        made.run({**arrays, "in3": positions + 13})


def nearest(x: float, dtype: Any) -> float:
    """By definition: the closest of all values; halfway, the even one."""
    codes = np.arange(16 if dtype == FP4 else 256, dtype=np.uint8).view(dtype)
    values = codes.astype(np.float64)
    order = np.lexsort((codes.view(np.uint8) & 1, np.abs(values - x)))
    return float(values[order[0]])


def through(made: HandMade, x: Any, scale: Array, dtype: Any) -> Any:
    """x quantized to FP8 and back, as activations are."""
    tensor = made.constant(scale)
    codes = made.network.add_quantize(x, tensor, trt.fp8).get_output(0)
    return made.network.add_dequantize(codes, tensor, dtype).get_output(0)


def test_fp8_goes_to_the_nearest_and_is_clamped() -> None:
    x = np.concatenate([RNG.normal(0, 40, 500), [1e9, -1e9, 0.0, 17.0, 19.0]]).astype(np.float32)
    made = HandMade()
    made.output(through(made, made.input("x", x, (-1,)), np.array(0.25, np.float32), trt.float32))
    (found,) = made.run({"x": x})
    wanted = [nearest(min(max(float(v) / 0.25, -448), 448), FP8) * 0.25 for v in x]
    np.testing.assert_array_equal(found, np.array(wanted, np.float32))


def test_fp8_weights_have_a_scale_per_row() -> None:
    codes = RNG.normal(size=(3, 8)).astype(FP8)
    scale = np.array([1, 0.5, 3], np.float32)
    made = HandMade()
    layer = made.network.add_dequantize(made.constant(codes), made.constant(scale), trt.bfloat16)
    layer.axis = 0
    made.output(layer.get_output(0))
    (found,) = made.run({})
    exact = codes.astype(np.float32) * scale[:, None]
    np.testing.assert_array_equal(found, exact.astype(BF16))


def test_nvfp4_activations_and_weights() -> None:
    x = RNG.normal(0, 3, (2, 48)).astype(np.float32)
    x[0, :16] = 0
    whole = np.array(0.01, np.float32)
    made = HandMade()
    tensor, scale = made.input("x", x, (-1, 48)), made.constant(whole)
    layer = made.network.add_dynamic_quantize(tensor, 1, 16, trt.fp4, trt.fp8)
    layer.set_input(1, scale)
    scales = made.network.add_dequantize(layer.get_output(1), scale, trt.float32).get_output(0)
    made.output(made.network.add_dequantize(layer.get_output(0), scales, trt.float32).get_output(0))
    (found,) = made.run({"x": x})
    for row, block in np.ndindex(2, 3):
        part = x[row, 16 * block :][:16]
        factor = nearest(float(np.abs(part).max()) / 6 / float(whole), FP8) * float(whole)
        values = [nearest(v / factor, FP4) * factor if factor else 0.0 for v in part.tolist()]
        np.testing.assert_allclose(found[row, 16 * block :][:16], values, rtol=1e-6)


def test_dims_of_one_name_must_agree() -> None:
    made = HandMade()
    a, b = (made.input(name, np.zeros(0, np.float32), (-1, 2)) for name in "ab")
    for tensor in (a, b):
        tensor.set_dimension_name(0, "rows")
    made.output(*(made.network.add_cast(t, trt.float16).get_output(0) for t in (a, b)))
    two = np.zeros((2, 2), np.float32)
    assert made.run({"a": two, "b": two})[0].shape == (2, 2)
    with pytest.raises(EvaluationError, match="rows is 1, elsewhere 2"):
        made.run({"a": two, "b": two[:1]})
    for wrong in (two.astype(np.int32), two[:0], two.T[:, :1]):
        with pytest.raises(EvaluationError):
            made.run({"a": wrong, "b": wrong})
    with pytest.raises(EvaluationError, match="inputs"):
        made.run({"a": two})


def test_unknown_layers_and_failed_assertions() -> None:
    made = HandMade()
    x = made.input("x", np.zeros(0, np.float32), (-1, 2))
    made.output(made.network.add_non_zero(x).get_output(0))
    with pytest.raises(EvaluationError, match="NON_ZERO"):
        made.run({"x": np.ones((1, 2), np.float32)})
    made = HandMade()
    flags = made.input("flags", np.zeros(0, np.bool_), (-1,))
    made.network.add_assertion(flags, "all must hold")
    made.output(made.network.add_cast(flags, trt.int32).get_output(0))
    made.run({"flags": np.ones(2, bool)})
    with pytest.raises(EvaluationError, match="all must hold"):
        made.run({"flags": np.array([True, False])})


def test_inner_tensors_and_a_network_evaluated_twice() -> None:
    made = HandMade()
    x = made.input("x", np.zeros(0, np.float32), (-1, 2))
    two = made.constant(np.array([[2.0, 3.0]], np.float32))
    inner = made.network.add_elementwise(x, two, SUM).get_output(0)
    inner.name = "inner"
    active = made.network.add_activation(inner, trt.ActivationType.RELU).get_output(0)
    made.output(made.network.add_elementwise(active, two, SUM).get_output(0))
    array = np.array([[-9.0, 1.0]], np.float32)
    for _ in range(2):  # evaluators may share a network
        values = NetworkEvaluator(made.network, trt).run({"x": array}, taps=["inner"])
        assert values["inner"].tolist() == [[-7, 4]]
        assert values["out0"].tolist() == [[2, 7]]
