"""`inject_kv` lowered to the plugin: what its layer is fed, run by the kernel's CPU build."""

from __future__ import annotations

import ctypes
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from dflash_trt import graph as g
from dflash_trt.build.network_hash import hash_network
from dflash_trt.errors import BuildError
from dflash_trt.graph import DType, Graph, compounds, tracing
from dflash_trt.lower.trt import lower_to_trt
from dflash_trt.lower.trt_weights import TrtWeights
from kv import interface as kv
from tiny.fake_plugin import Creator, Network, with_plugins
from tiny.trt_evaluator import NetworkEvaluator
from tiny.trt_ops import StoredArrays

trt = pytest.importorskip("tensorrt_rtx", exc_type=ImportError)

BF16 = np.dtype(ml_dtypes.bfloat16)
SLOTS, HEADS, DIM, CAPACITY, ROWS, BLOCK, POSITIONS = 3, 2, 64, 16, 5, 3, 20
EPS = 1e-5


def feeds() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(5)

    def act(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, dtype=np.float32).astype(BF16)

    made = {f"cache_{x}": act(SLOTS, HEADS, CAPACITY, DIM) for x in "kv"}
    made |= {f"context_{x}": act(SLOTS, ROWS, HEADS * DIM) for x in "kv"}
    made |= {f"block_{x}": act(SLOTS, BLOCK, HEADS * DIM) for x in "kv"}
    made["start"] = np.array([0, 4, 8], np.int32)
    made["committed"] = np.array([5, 0, 2], np.int32)
    return made


WEIGHT = np.random.default_rng(6).standard_normal(DIM, dtype=np.float32)
ANGLES = np.random.default_rng(7).uniform(0, 6.3, (POSITIONS, DIM // 2)).astype(np.float32)


def trace(inputs: dict[str, np.ndarray], eps: float = EPS) -> Graph:
    graph = Graph("inject")
    with tracing(graph):
        types = {BF16: DType.ACT, np.dtype(np.int32): DType.I32}
        x = {n: graph.add_input(n, a.shape, types[a.dtype]) for n, a in inputs.items()}
        place = compounds.compaction(
            x["start"], x["committed"], g.size(x["context_k"], 1), g.size(x["block_k"], 1)
        )
        pairs = ((x[f"{name}_k"], x[f"{name}_v"]) for name in ("cache", "context", "block"))
        tables = g.constant(np.cos(ANGLES), DType.F32), g.constant(np.sin(ANGLES), DType.F32)
        norm = (g.param("w", (DIM,)), eps)
        for name, cache in zip("kv", compounds.inject_kv(*pairs, place, tables, norm), strict=True):
            graph.add_output(f"updated_{name}", cache)
    return graph


def lowered(network: Any, compute: str, plugin: Any, eps: float = EPS) -> None:
    weights = TrtWeights(StoredArrays({"w": WEIGHT}), lambda name: None)
    lower_to_trt(trace(feeds(), eps), network, trt, weights, compute, plugin=plugin)
    network.kept = weights


def run_kernel(kernel: ctypes.CDLL, fed: list[np.ndarray]) -> list[np.ndarray]:
    """The launch that the plugin makes of its inputs, in the order of kv_inject_plugin.h."""
    start, committed, cos, sin, ck, cv, bk, bv, weight, key, value = fed
    at = [np.ascontiguousarray(a) for a in (start, committed, cos, sin, ck, cv, bk, bv, weight)]
    caches = [np.array(key), np.array(value)]
    launch = kv.Launch(
        slots=SLOTS, context_rows=ck.shape[1], block_rows=bk.shape[1], num_layers=1,
        num_kv_heads=key.shape[1], head_dim=2 * cos.shape[1], capacity=key.shape[2],
        num_positions=cos.shape[0], type=kv.BF16, quant=kv.NONE, ring=0, eps=EPS,
        context_stride=ck.shape[2], block_stride=bk.shape[2],
        **{n: at[i].ctypes.data for i, n in enumerate(("length", "committed", "cos", "sin"))},
    )  # fmt: skip
    launch.k_norm[0] = at[8].ctypes.data
    for pair in range(2):
        launch.context[pair], launch.block[pair] = (
            at[4 + pair].ctypes.data,
            at[6 + pair].ctypes.data,
        )
        launch.cache[pair] = caches[pair].ctypes.data
    assert kernel.dflash_kv_inject(ctypes.byref(launch), None) == kv.SUCCESS
    return caches


def test_the_plugin_does_what_the_native_layers_do(kernel: ctypes.CDLL) -> None:
    network, creator = Network(), Creator()
    lowered(network, "bf16", creator)
    assert len(network.layers) == 1
    assert creator.given == [{"eps": pytest.approx(EPS), "num_layers": 1, "block": 1, "norm": 1}]
    made = NetworkEvaluator(network.real, trt).run(feeds())
    written = run_kernel(kernel, [made[name] for name in network.layers[0].fed])

    plain = Network()
    lowered(plain, "fp32", None)
    assert plain.layers == []
    exact_feeds = {n: a.astype(np.float32) if a.dtype == BF16 else a for n, a in feeds().items()}
    exact = NetworkEvaluator(plain.real, trt).run(exact_feeds)
    for name, cache in zip("kv", written, strict=True):
        for slot, (start, committed) in enumerate([(0, 5), (4, 0), (8, 2)]):
            end = start + committed + BLOCK
            want = exact[f"updated_{name}"][slot, :, :end]
            # One rounding to BF16, of 8 bits.
            np.testing.assert_allclose(
                cache[slot, :, :end].astype(np.float32), want, rtol=2**-8, atol=1e-6
            )
            untouched = feeds()[f"cache_{name}"][slot, :, end:]
            assert cache[slot, :, end:].tobytes() == untouched.tobytes()


def test_native_layers_where_the_plugin_has_no_kernel() -> None:
    network, creator = Network(), Creator()
    lowered(network, "fp32", creator)
    assert (network.layers, creator.given) == ([], [])


def test_a_plugin_that_refuses_its_attributes_ends_the_build() -> None:
    class Refusing(Creator):
        def create_plugin(self, name: str, fields: Any, phase: Any) -> Any:
            return None

    with pytest.raises(BuildError, match="refused"):
        lowered(Network(), "bf16", Refusing())


def hashed(plugin: Any, eps: float = EPS) -> str:
    network = Network()
    lowered(network, "bf16", plugin, eps)
    return hash_network(with_plugins(), network, network.kept.kept, [])


def test_the_hash_of_a_network_is_that_of_its_plugins_attributes() -> None:
    by_plugin = hashed(Creator())
    assert hashed(Creator()) == by_plugin  # the same attributes, other objects
    assert hashed(None) != by_plugin
    assert hashed(Creator(), eps=2 * EPS) != by_plugin
