"""Runs a few traced ops through the TensorRT lowering, by the evaluator."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorrt_rtx as trt

from dflash_trt.graph import Graph, Tensor, tracing
from dflash_trt.lower.trt import Fixed, lower_to_trt
from dflash_trt.lower.trt_weights import TrtWeights
from dflash_trt.quantize.floats import FloatCodes
from tiny.ops import TYPES, Array, Arrays
from tiny.trt_evaluator import NetworkEvaluator


@dataclass(frozen=True)
class Stored:
    """What a checkpoint says of a tensor."""

    dtype: str = "F32"
    kept_as: str | None = None


class StoredArrays(Arrays):
    """A weight reader as the TensorRT lowering wants it; `codes` are weights stored as such."""

    def __init__(
        self, arrays: Mapping[str, Array], codes: Mapping[str, FloatCodes] | None = None
    ) -> None:
        super().__init__(arrays)
        self._codes = dict(codes or {})

    def float_codes(self, name: str) -> FloatCodes | None:
        return self._codes.get(name)

    def info(self, name: str) -> Stored:
        return Stored()

    def raw(self, name: str) -> Array:
        return self._arrays[name]


def evaluator_of(
    graph: Graph,
    weights: TrtWeights,
    compute: str = "fp32",
    *,
    fixed: Fixed | None = None,
    decompose: Collection[str] = (),
    change: Callable[[Any], None] | None = None,
    **evaluator: Any,
) -> NetworkEvaluator:
    """The evaluator of a graph's network, which `change` may spoil before."""
    builder = trt.Builder(trt.Logger(trt.Logger.ERROR))
    flags = 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
    network = builder.create_network(flags)
    lower_to_trt(graph, network, trt, weights, compute, fixed, decompose)
    if change is not None:
        change(network)
    return NetworkEvaluator(network, trt, **evaluator)


def run_ops_trt(
    body: Callable[..., Any], inputs: Mapping[str, Array],
    dims: Mapping[str, tuple[int | str, ...]] | None = None,
    weights: Mapping[str, Array] | None = None, quantized: str | None = None, **options: Any,
) -> list[Array]:  # fmt: skip
    """Trace, lower and evaluate `body`; `dims` names axes where sizes must not be known.

    `quantized` is the format of all weights of products.
    """
    graph = Graph("ops")
    with tracing(graph):
        made = body(**{
            name: graph.add_input(name, (dims or {}).get(name, a.shape), TYPES[str(a.dtype)])
            for name, a in inputs.items()
        })  # fmt: skip
    results = [made] if isinstance(made, Tensor) else list(made)
    for index, tensor in enumerate(results):
        graph.add_output(f"out{index}", tensor)
    held = TrtWeights(StoredArrays(weights or {}), lambda name: quantized)
    evaluator = evaluator_of(graph, held, **options)
    found = evaluator.run({name: np.array(array) for name, array in inputs.items()})
    return [found[f"out{index}"] for index in range(len(results))]
