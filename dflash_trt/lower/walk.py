"""The walk that every lowering shares: each node claimed whole, or decomposed into primitives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from dflash_trt.errors import NoLowering
from dflash_trt.graph import Dim, Graph, Node, Tensor, scope, tracing
from dflash_trt.graph.compounds import DECOMPOSITIONS

Value = TypeVar("Value")


class Walker(Generic[Value]):
    """Visits a graph in order; `names` maps each tensor to what the backend made of it.

    An emitter is called with the walker and the node, and returns a value per output.
    """

    backend = ""  # for messages

    def __init__(self, emitters: Mapping[str, Callable[[Any, Node], list[Value]]]) -> None:
        self.emitters = emitters
        self.names: dict[Tensor, Value] = {}
        self.count = 0

    def graph(self, graph: Graph) -> None:
        """Emit all nodes of a graph."""
        for node in graph.nodes:
            self.node(node)

    def node(self, node: Node) -> None:
        """Emit one node: claimed whole, or decomposed."""
        emitter = self.emitters.get(node.op)
        if emitter is not None:
            results = emitter(self, node)
        elif node.op in DECOMPOSITIONS:
            results = self.expand(node)
        else:
            raise NoLowering(f"op {node.op!r} has no lowering to {self.backend}")
        self.names.update(zip(node.outputs, results, strict=True))

    def expand(self, node: Node) -> list[Value]:
        """Emit the decomposition of a compound, under its own scope."""
        inner = Graph(node.op)
        with tracing(inner), scope(node.scope.strip("/")):
            result = DECOMPOSITIONS[node.op](*node.inputs, **node.attrs)
        self.graph(inner)
        results = result if isinstance(result, tuple) else (result,)
        return [self.names[tensor] for tensor in results]

    def fresh(self, stem: str) -> str:
        """A name that no other value has."""
        self.count += 1
        return f"{stem}#{self.count}"


def copied_dims(old: tuple[Dim, ...], new: tuple[Dim, ...]) -> list[int]:
    """A reshape as ONNX and TensorRT spell it: 0 copies the axis, -1 is inferred.

    Raises `NoLowering` when two axes would have to be inferred.
    """
    shape: list[int] = []
    for axis, dim in enumerate(new):
        if isinstance(dim, int):
            shape.append(dim)
        elif axis < len(old) and old[axis] == dim:
            shape.append(0)
        else:
            shape.append(-1)
    if shape.count(-1) > 1:
        raise NoLowering(f"reshape {old} -> {new} has two dims that cannot be inferred")
    return shape
