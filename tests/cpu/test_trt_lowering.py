"""The step graph as a TensorRT network: its inputs, names and weights. No engine is built here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from dflash_trt import contract as c
from dflash_trt import graph as g
from dflash_trt.checkpoint.pair import read_pair
from dflash_trt.errors import BuildError, NoLowering
from dflash_trt.flavor import TENSORRT_RTX, load_flavor
from dflash_trt.graph import DType, Graph, LinearWeight, tracing
from dflash_trt.lower.trt import lower_to_trt, step_fixed
from dflash_trt.lower.trt_weights import COMPUTE_TYPES, TrtWeights
from dflash_trt.nets.step import trace_step
from dflash_trt.quantize.policy import format_of
from tiny import PairMaker, TinyPair
from tiny.trt_ops import StoredArrays

trt = load_flavor(TENSORRT_RTX)
BLOCK, CAPACITY = 4, 40


class Network:
    """An empty strongly typed network and its builder, which must live as long."""

    def __init__(self) -> None:
        self.builder = trt.Builder(trt.Logger(trt.Logger.ERROR))
        flags = 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
        self.network = self.builder.create_network(flags)

    def layers(self) -> list[Any]:
        return [self.network.get_layer(i) for i in range(self.network.num_layers)]

    def inputs(self) -> dict[str, Any]:
        made = [self.network.get_input(i) for i in range(self.network.num_inputs)]
        return {tensor.name: tensor for tensor in made}

    def outputs(self) -> dict[str, Any]:
        made = [self.network.get_output(i) for i in range(self.network.num_outputs)]
        return {tensor.name: tensor for tensor in made}


def lowered(pair: TinyPair, precision: str = "bf16") -> tuple[Network, TrtWeights]:
    made, read = Network(), read_pair(pair.target_dir, pair.drafter_dir)
    weights = TrtWeights(read.weights(), format_of(precision))
    graph = trace_step(read.config, BLOCK, CAPACITY)
    lower_to_trt(graph, made.network, trt, weights, "bf16", step_fixed(BLOCK, CAPACITY))
    return made, weights


@pytest.fixture(scope="module")
def step(pair: TinyPair) -> Network:
    return lowered(pair)[0]


def test_inputs_are_the_contract_without_what_the_engine_fixes(
    step: Network, pair: TinyPair
) -> None:
    facts = read_pair(pair.target_dir, pair.drafter_dir).config
    caches = {spec.name: spec for spec in c.all_caches(facts)}
    assert set(step.inputs()) == set(c.INPUTS) - {c.BLOCK_OFFSETS, c.DRAFT_OFFSETS} | set(caches)
    for name, tensor in step.inputs().items():
        open_dims = [
            tensor.get_dimension_name(axis) for axis, size in enumerate(tensor.shape) if size < 0
        ]
        if name in caches:
            spec = caches[name]
            assert tuple(tensor.shape) == (-1, spec.num_heads, CAPACITY, spec.head_dim)
            assert (tensor.dtype, open_dims) == (trt.bfloat16, [c.SLOTS])
        else:
            assert set(open_dims) <= {
                c.SLOTS, c.STEP_TOKENS, c.VERIFY_ROWS, c.SPECIAL, c.ADJUSTED,
            }  # fmt: skip
            assert "" not in open_dims


def test_outputs_are_the_contracts(step: Network, pair: TinyPair) -> None:
    facts = read_pair(pair.target_dir, pair.drafter_dir).config
    caches = [spec.output for spec in c.all_caches(facts)]
    outputs = step.outputs()
    assert list(outputs) == [c.COMMITTED, c.NEXT, c.LOGITS, *caches]
    assert outputs[c.COMMITTED].dtype == outputs[c.NEXT].dtype == trt.int32
    assert outputs[c.LOGITS].dtype == trt.float32
    assert outputs[c.NEXT].shape[1] == BLOCK  # known: the whole block is always drafted


def test_each_cache_is_updated_in_place_by_its_own_layer(step: Network) -> None:
    updates = {
        layer.get_input(0).name: layer.get_output(0).name
        for layer in step.layers()
        if layer.type == trt.LayerType.KV_CACHE_UPDATE
    }
    caches = {name for name, tensor in step.inputs().items() if tensor.dtype == trt.bfloat16}
    assert updates == {name: c.UPDATED + name for name in caches}


def test_nothing_stops_the_capture_of_a_cuda_graph(step: Network) -> None:
    kinds = {layer.type.name for layer in step.layers()}
    assert not {kind for kind in kinds if kind.startswith(("CONDITION", "LOOP", "NON_ZERO"))}
    assert not {"TRIP_LIMIT", "RECURRENCE", "ITERATOR", "NMS", "PLUGIN_V3"} & kinds


def test_names_lead_back_to_the_net(step: Network) -> None:
    names = [layer.name for layer in step.layers()]
    assert len(set(names)) == len(names)
    assert all(name.startswith("/") for name in names)
    for wanted in (
        "/target.layers.3/self_attn/attention/attention#",
        "/target.layers.0/self_attn/linear/q_proj/matmul#",
        "/target.layers.0.self_attn.q_proj.weight/constant#",
        "/drafter.fuse/linear/fc/matmul#",
        "/drafter.layers.1/mlp/linear/down_proj/",
    ):
        assert any(name.startswith(wanted) for name in names), wanted


def described(made: Network) -> list[Any]:
    return [
        (layer.name, layer.type.name,
         [layer.get_input(i).name for i in range(layer.num_inputs) if layer.get_input(i)],
         [(o.name, o.dtype.name, tuple(o.shape))
          for o in (layer.get_output(i) for i in range(layer.num_outputs))])
        for layer in made.layers()
    ]  # fmt: skip


def test_a_second_lowering_gives_the_same_network(step: Network, pair: TinyPair) -> None:
    assert described(lowered(pair)[0]) == described(step)


def test_what_needs_full_precision_has_it(step: Network) -> None:
    """fc, and the residual stream between layers."""
    fused = [x for x in step.layers() if x.name.startswith("/drafter.fuse/linear/fc/matmul")]
    assert [x.get_input(i).dtype for x in fused for i in (0, 1)] == [trt.float32] * 2
    sums = [x for x in step.layers() if x.name.startswith("/target.layers.1/mlp/add/")]
    assert [x.get_output(0).dtype for x in sums] == [trt.float32]
    heads = [x for x in step.layers() if x.name.startswith("/target.lm_head/linear/lm_head/mat")]
    assert [x.get_input(i).dtype for x in heads for i in (0, 1)] == [trt.bfloat16] * 2


def test_a_checkpoint_in_the_compute_type_is_not_copied(make_pair: PairMaker) -> None:
    pair = make_pair(seed=60, target={"tie_word_embeddings": True})
    for model, folder in ((pair.target, pair.target_dir), (pair.drafter, pair.drafter_dir)):
        model.to(torch.bfloat16).save_pretrained(folder / "bf16")
        for file in folder.glob("tokenizer*"):
            (folder / "bf16" / file.name).write_bytes(file.read_bytes())
    read = read_pair(pair.target_dir / "bf16", pair.drafter_dir / "bf16")
    reader = read.weights()
    weights = TrtWeights(reader, format_of("bf16"))
    graph = trace_step(read.config, BLOCK, CAPACITY)
    lower_to_trt(graph, Network().network, trt, weights, "bf16", step_fixed(BLOCK, CAPACITY))
    held = {array.ctypes.data for array in weights.kept}
    for name in reader.names():
        if name.endswith("proj.weight") or "embed_tokens" in name:
            assert reader.raw(name).ctypes.data in held, name


@pytest.mark.parametrize("compute", ["bf16", "fp16", "fp32"])
def test_other_types_are_converted_once(compute: str) -> None:
    stored = np.random.default_rng(0).normal(size=(6, 5)).astype(np.float32)
    weights = TrtWeights(StoredArrays({"w": stored}), format_of("bf16"))
    dtype = COMPUTE_TYPES[compute]
    first, second = weights.dense("w", (6, 5), dtype), weights.dense("w", (1, 6, 5), dtype)
    np.testing.assert_array_equal(first, stored.astype(dtype))
    assert first.ctypes.data == second.ctypes.data


def test_weights_that_fp16_cannot_hold_are_refused() -> None:
    weights = TrtWeights(StoredArrays({"w": np.full((2, 2), 7e4, np.float32)}), format_of("fp16"))
    with pytest.raises(BuildError, match="w has values beyond the range of fp16"):
        weights.dense("w", (2, 2), COMPUTE_TYPES["fp16"])


def test_only_products_that_the_policy_names_are_quantized(pair: TinyPair) -> None:
    made, _ = lowered(pair, "nvfp4")
    codes = [layer.name for layer in made.layers() if "/codes/" in layer.name]
    assert codes
    assert not any("drafter.fc" in name or "norm" in name for name in codes)
    by_scope = {
        layer.name.rsplit("/", 1)[0]
        for layer in made.layers()
        if layer.type == trt.LayerType.DYNAMIC_QUANTIZE
    }
    assert "/target.layers.0/self_attn/linear" in by_scope
    # q, k and v have one input: it is quantized once.
    assert sum(
        layer.name.startswith("/target.layers.0/self_attn/linear/quantize")
        for layer in made.layers()
    ) == 2  # fmt: skip


def test_a_width_that_has_no_whole_blocks_stays_in_the_compute_type() -> None:
    graph = Graph("ops")
    with tracing(graph):
        x = graph.add_input("x", ("b", "s", 24), DType.ACT)
        graph.add_output("y", g.linear(x, [LinearWeight("w", 8)])[0])
    weights = TrtWeights(StoredArrays({"w": np.ones((8, 24), np.float32)}), lambda name: "nvfp4")
    made = Network()
    lower_to_trt(graph, made.network, trt, weights, "bf16")
    constants = [x for x in made.layers() if x.type == trt.LayerType.CONSTANT]
    assert [x.get_output(0).dtype for x in constants] == [trt.bfloat16]


def test_a_layer_that_tensorrt_refuses_is_named() -> None:
    graph = Graph("ops")
    with tracing(graph), g.scope("layer.7"):
        cache = graph.add_input("cache", ("b", 2, "rows", 8), DType.ACT)  # rows must be known
        new = graph.add_input("new", ("b", 2, 4, 8), DType.ACT)
        graph.add_output("y", g.kv_update(cache, new, graph.add_input("at", ("b",), DType.I32)))
    made = Network()
    weights = TrtWeights(StoredArrays({}), format_of("bf16"))
    with pytest.raises(NoLowering, match="a kv_update layer at /layer"):
        lower_to_trt(graph, made.network, trt, weights, "bf16")


def test_outputs_that_are_inputs_or_constants_are_copies() -> None:
    graph = Graph("ops")
    with tracing(graph):
        x = graph.add_input("x", (2,), DType.F32)
        graph.add_output("same", x)
        graph.add_output("again", x)
        graph.add_output("fixed", g.constant([1.0, 2.0], DType.F32))
    made = Network()
    lower_to_trt(graph, made.network, trt, TrtWeights(StoredArrays({}), format_of("bf16")), "bf16")
    assert list(made.inputs()) == ["x"]
    assert list(made.outputs()) == ["same", "again", "fixed"]


def shuffles(body: Callable[[g.Tensor], list[g.Tensor]]) -> int:
    graph = Graph("ops")
    with tracing(graph):
        for index, tensor in enumerate(body(graph.add_input("x", ("b", 6), DType.F32))):
            graph.add_output(f"y{index}", tensor)
    made = Network()
    lower_to_trt(graph, made.network, trt, TrtWeights(StoredArrays({}), format_of("bf16")), "bf16")
    return sum(layer.type == trt.LayerType.SHUFFLE for layer in made.layers())


def test_a_reshape_and_a_transpose_are_one_layer_if_nothing_reads_what_is_between() -> None:
    def split(x: g.Tensor) -> g.Tensor:
        return g.reshape(x, ("b", 2, 3))

    def turned(x: g.Tensor) -> g.Tensor:
        return g.transpose(x, (0, 2, 1))

    assert shuffles(lambda x: [turned(split(x))]) == 1
    assert shuffles(lambda x: [g.reshape(turned(split(x)), ("b", 6))]) == 2
    assert shuffles(lambda x: [turned(y := split(x)), y]) == 2
    assert shuffles(lambda x: [turned(y := split(x)), g.mul(y, 2.0)]) == 2
