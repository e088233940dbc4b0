"""Every op's layers are ones that TensorRT builds: each case alone, for SM120, without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_trt import contract as c
from dflash_trt import graph as g
from dflash_trt.build.tensorrt import build_engine
from dflash_trt.config import LayerMask
from dflash_trt.flavor import DEVICE_TABLE, TENSORRT_RTX, load_flavor
from dflash_trt.graph import DType, Graph, LinearWeight, Shape, Tensor, compounds, tracing
from dflash_trt.lower.trt import lower_to_trt
from dflash_trt.lower.trt_weights import TrtWeights
from tiny.op_cases import CASES
from tiny.ops import TYPES, Array
from tiny.trt_ops import StoredArrays

trt = load_flavor(TENSORRT_RTX)
RNG = np.random.default_rng(3)
B, S, CAPACITY = "slots", "step_tokens", 64
LENGTHS = {B: (1, 2, 4), S: (1, 4, 8)}


def build(
    folder: Path, body: Callable[..., Any], shapes: Mapping[str, tuple[DType, Shape]],
    weights: Mapping[str, Array], compute: str, quantized: str | None = None,
    sizes: Mapping[Any, tuple[int, int, int]] = LENGTHS,
) -> None:  # fmt: skip
    graph = Graph("ops")
    with tracing(graph):
        made = body(**{n: graph.add_input(n, shape, dtype) for n, (dtype, shape) in shapes.items()})
    for index, tensor in enumerate([made] if isinstance(made, Tensor) else made):
        graph.add_output(f"out{index}", tensor)
    held = TrtWeights(StoredArrays(weights), lambda name: quantized)

    def define(network: Any) -> list[Array]:
        lower_to_trt(graph, network, trt, held, compute)
        return held.kept

    profile = c.Profile(c.DECODE, dict(sizes))
    file, device = folder / "ops.engine", DEVICE_TABLE["sm120"]
    build_engine(trt, device, define, [profile], file, lambda phase, part: None)
    assert file.stat().st_size > 0


@pytest.mark.parametrize("name", sorted(set(CASES) - {"topk-computed"}))  # that one is refused
def test_every_case_builds(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    shapes = {n: (TYPES[str(a.dtype)], case.dims.get(n, a.shape)) for n, a in case.inputs.items()}
    sizes = {
        dim: (1, size, size)
        for n, array in case.inputs.items()
        for dim, size in zip(shapes[n][1], array.shape, strict=True)
        if isinstance(dim, str)
    }
    build(tmp_path, case.body, shapes, case.weights, "fp32", sizes=sizes)


HEADS = [(9, 3, 64), (4, 1, 80), (32, 8, 128), (16, 2, 256)]  # query, key and value heads, width
MASKS = [LayerMask(True), LayerMask(False), LayerMask(True, 16), LayerMask(False, 16)]


@pytest.mark.parametrize(
    ("heads", "mask", "compute"),
    [*product(HEADS, MASKS, ["bf16"]), *product(HEADS, MASKS[:1], ["fp16"])],
)
def test_attention_over_caches_builds_for_every_head(
    heads: tuple[int, int, int], mask: LayerMask, compute: str, tmp_path: Path
) -> None:
    num_heads, kv_heads, width = heads
    table = RNG.normal(size=(CAPACITY, width // 2)).astype(np.float32)

    def body(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, start: Tensor) -> Any:
        rows = g.size(q, 2)
        at = g.add(g.reshape(start, (B, 1)), g.reshape(g.iota(rows, S), (1, S)))
        cos, sin = g.constant(table, DType.F32), g.constant(1 - table, DType.F32)
        query, key = (compounds.rope(x, at, cos, sin) for x in (q, k))
        key, value = g.kv_update(keys, key, start), g.kv_update(values, v, start)
        return [g.attention(query, key, value, g.add(start, rows), mask), key, value]

    act, rows = DType.ACT, (B, kv_heads, S, width)
    cache = (B, kv_heads, CAPACITY, width)
    shapes: dict[str, tuple[DType, Shape]] = {
        "q": (act, (B, num_heads, S, width)), "k": (act, rows), "v": (act, rows),
        "keys": (act, cache), "values": (act, cache), "start": (DType.I32, (B,)),
    }  # fmt: skip
    build(tmp_path, body, shapes, {}, compute)


@pytest.mark.parametrize("compute", ["bf16", "fp16"])
@pytest.mark.parametrize("quantized", [None, "fp8", "nvfp4"])
def test_products_build_in_every_format(
    quantized: str | None, compute: str, tmp_path: Path
) -> None:
    weights = {
        "q.weight": RNG.normal(size=(192, 144)).astype(np.float32),
        "k.weight": RNG.normal(size=(48, 144)).astype(np.float32),
        "k.bias": RNG.normal(size=48).astype(np.float32),
        "fc.weight": RNG.normal(size=(64, 144)).astype(np.float32),
    }

    def body(x: Tensor) -> Any:
        q, k = g.linear(x, [LinearWeight("q.weight", 192), LinearWeight("k.weight", 48, "k.bias")])
        full = g.linear(g.cast(x, DType.F32), [LinearWeight("fc.weight", 64)], DType.F32)
        return [q, k, *full]

    shapes: dict[str, tuple[DType, Shape]] = {"x": (DType.ACT, (B, S, 144))}
    build(tmp_path, body, shapes, weights, compute, quantized)
