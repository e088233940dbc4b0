"""Walks a graph and collects ONNX nodes: names, constants, branches, equal nodes once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from dflash_trt.graph import DType, Graph, Node, Tensor
from dflash_trt.lower.onnx_weights import OnnxWeights
from dflash_trt.lower.walk import Walker

ONNX_TYPES = {
    DType.ACT: TensorProto.FLOAT,
    DType.F32: TensorProto.FLOAT,
    DType.I32: TensorProto.INT32,
    DType.I64: TensorProto.INT64,
    DType.BOOL: TensorProto.BOOL,
}


class OnnxEmitter(Walker[str]):
    """Walks a graph once; equal nodes (same operator, inputs, attributes) are emitted once."""

    backend = "ONNX"

    def __init__(self, weights: OnnxWeights, emitters: Mapping[str, Emitter]) -> None:
        super().__init__(emitters)
        self.weights = weights
        self.nodes: list[onnx.NodeProto] = []
        self.memo: dict[object, list[str]] = {}

    def branch(self, graph: Graph) -> onnx.GraphProto:
        """A subgraph that reads outer values; what it emits stays inside it."""
        outer_nodes, outer_memo = self.nodes, self.memo
        self.nodes, self.memo = [], dict(outer_memo)
        self.graph(graph)
        result = graph.outputs["result"]
        name = self.fresh("result")
        self.nodes.append(helper.make_node("Identity", [self.names[result]], [name]))
        proto = helper.make_graph(self.nodes, graph.name, [], [value_info(name, result)])
        self.nodes, self.memo = outer_nodes, outer_memo
        return proto

    def emit(
        self, op: str, inputs: list[str], node: Node, num_outputs: int = 1, **attrs: Any
    ) -> list[str]:
        """Append an ONNX node and return the names of its outputs."""
        domain = attrs.pop("domain", "")
        key = (op, tuple(inputs), num_outputs, repr(sorted(attrs.items())))
        if not any(isinstance(value, onnx.GraphProto) for value in attrs.values()):
            if key in self.memo:
                return self.memo[key]
            outputs = self.memo[key] = [self.fresh(node.scope) for _ in range(num_outputs)]
        else:
            outputs = [self.fresh(node.scope) for _ in range(num_outputs)]
        name = self.fresh(f"{node.scope}/{op}")
        self.nodes.append(helper.make_node(op, inputs, outputs, name=name, domain=domain, **attrs))
        return outputs

    def const(self, value: object, dtype: type[np.generic]) -> str:
        """The initializer of a literal."""
        return self.weights.constant(np.asarray(value, dtype))

    def cast(self, name: str, to: int, node: Node) -> str:
        """A value in another ONNX type."""
        return self.emit("Cast", [name], node, to=to)[0]


def value_info(name: str, tensor: Tensor) -> onnx.ValueInfoProto:
    """Declaration of a graph input or output."""
    return helper.make_tensor_value_info(name, ONNX_TYPES[tensor.dtype], list(tensor.shape))


Emitter = Callable[[OnnxEmitter, Node], list[str]]
