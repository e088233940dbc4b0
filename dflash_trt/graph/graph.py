"""The step graph in memory: tensors with named dims, nodes with scopes; knows no backend.

A net is a Python function that calls the op surface (`graph.primitives`, `graph.compounds`) while a
`Graph` is being traced. Parameters are names: tracing touches no weight bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from dflash_trt.errors import GraphError

Dim = int | str
Shape = tuple[Dim, ...]


class DType(Enum):
    """Element types of the op surface.

    ACT is an activation in the backend's compute type (FP32 on the CPU; BF16 or FP16 on a GPU);
    F32 is where the numbers need full precision on every backend.
    """

    ACT = "activation"
    F32 = "float32"
    I32 = "int32"
    I64 = "int64"
    BOOL = "bool"


@dataclass(frozen=True, eq=False)
class Tensor:
    """A value in the graph: compared by identity; dims are ints or names from `contract`."""

    name: str
    shape: Shape
    dtype: DType

    @property
    def rank(self) -> int:
        """Number of axes."""
        return len(self.shape)


@dataclass(frozen=True, eq=False)
class Node:
    """One op with its operands. `scope` is the parameter path it belongs to, for node names."""

    op: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    attrs: dict[str, Any]
    scope: str


@dataclass(eq=False)
class Graph:
    """Nodes in execution order. Branches of `cond` are graphs that read outer tensors freely."""

    name: str
    inputs: list[Tensor] = field(default_factory=list)
    outputs: dict[str, Tensor] = field(default_factory=dict)
    nodes: list[Node] = field(default_factory=list)
    parent: Graph | None = None
    _count: int = 0

    def add_input(self, name: str, shape: Shape, dtype: DType) -> Tensor:
        """Declare a graph input that is bound by name at run time."""
        tensor = Tensor(name, shape, dtype)
        self.inputs.append(tensor)
        return tensor

    def add_output(self, name: str, tensor: Tensor) -> None:
        """Declare `tensor` as the graph output `name`."""
        if name in self.outputs:
            raise GraphError(f"output {name!r} is declared twice")
        self.outputs[name] = tensor

    def add_node(
        self,
        op: str,
        inputs: Sequence[Tensor],
        results: Sequence[tuple[Shape, DType]],
        attrs: dict[str, Any] | None = None,
    ) -> tuple[Tensor, ...]:
        """Append a node and return its outputs, named `/scope/op.number`."""
        stem = "/".join(("", *_SCOPE.get(), op))
        base = f"{stem}.{self._next_number()}"
        outputs = tuple(
            Tensor(f"{base}:{i}" if i else base, shape, dtype)
            for i, (shape, dtype) in enumerate(results)
        )
        self.nodes.append(Node(op, tuple(inputs), outputs, dict(attrs or {}), stem))
        return outputs

    def _next_number(self) -> int:
        root = self
        while root.parent is not None:
            root = root.parent
        root._count += 1
        return root._count

    def walk(self) -> Iterator[Node]:
        """All nodes in order, those of branches after the node that owns them."""
        for node in self.nodes:
            yield node
            for value in node.attrs.values():
                if isinstance(value, Graph):
                    yield from value.walk()


_GRAPH: ContextVar[Graph | None] = ContextVar("graph", default=None)
_SCOPE: ContextVar[tuple[str, ...]] = ContextVar("scope", default=())


def current_graph() -> Graph:
    """The graph being traced. Raises `GraphError` when an op is called outside `tracing`."""
    graph = _GRAPH.get()
    if graph is None:
        raise GraphError("an op was called outside of `with tracing(graph):`")
    return graph


@contextmanager
def tracing(graph: Graph) -> Iterator[Graph]:
    """Make `graph` the one that ops append to."""
    token = _GRAPH.set(graph)
    try:
        yield graph
    finally:
        _GRAPH.reset(token)


@contextmanager
def scope(name: str) -> Iterator[None]:
    """Prefix the names of nodes traced inside, e.g. `layers.0`, `self_attn`."""
    token = _SCOPE.set((*_SCOPE.get(), name))
    try:
        yield
    finally:
        _SCOPE.reset(token)
