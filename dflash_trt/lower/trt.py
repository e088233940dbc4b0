"""Lowering of the op surface to TensorRT's INetworkDefinition, for both of its Python modules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dflash_trt.contract import BLOCK_OFFSETS, BLOCK_ROWS, CAPACITY, DRAFT_OFFSETS, DRAFT_ROWS
from dflash_trt.graph import Graph, Node, Tensor
from dflash_trt.lower.trt_emitter import Array, Literal, TrtEmitter, TrtTensor
from dflash_trt.lower.trt_ops import EMITTERS
from dflash_trt.lower.trt_plugin import injection_by
from dflash_trt.lower.trt_weights import TrtWeights


@dataclass(frozen=True)
class Fixed:
    """What an engine fixes: sizes of named dims, and graph inputs that become constants."""

    sizes: Mapping[str, int] = field(default_factory=dict)
    inputs: Mapping[str, Array] = field(default_factory=dict)


def step_fixed(block: int, capacity: int) -> Fixed:
    """What the engine of a step graph fixes: it always drafts the whole block, caches of one size.

    So `block_offsets` and `draft_offsets` are no inputs of it.
    """
    return Fixed(
        sizes={BLOCK_ROWS: block, DRAFT_ROWS: block - 1, CAPACITY: capacity},
        inputs={
            BLOCK_OFFSETS: np.arange(block, dtype=np.int32),
            DRAFT_OFFSETS: np.arange(1, block, dtype=np.int32),
        },
    )


def lower_to_trt(
    graph: Graph,
    network: Any,
    trt: Any,
    weights: TrtWeights,
    compute: str,
    fixed: Fixed | None = None,
    decompose: Collection[str] = (),
    plugin: Any = None,
) -> None:
    """Add inputs, layers and outputs of a graph to a strongly typed, empty network.

    `trt` is the module `tensorrt` or `tensorrt_rtx`; `compute` is bf16, fp16 or fp32. Dims that are
    not fixed are -1 and named. `weights.kept` and the reader's mapped files must stay until the
    engine is built. `decompose` names compounds to expand although TensorRT has a layer; `plugin`
    is the creator of the KV-injection plugin (`kv_plugin.load_plugin`), None for native layers.
    The same graph and weights give the same layers, in order and by name. Raises `NoLowering`.
    """
    fixed = fixed or Fixed()
    claimed = {op: emit for op, emit in EMITTERS.items() if op not in decompose}
    if plugin is not None:
        claimed["inject_kv"] = injection_by(plugin)
    lowering = TrtEmitter(network, trt, weights, compute, claimed, fixed.sizes)
    lowering.unused = _unused(graph)
    lowering.halves = _first_halves(graph)
    lowering.repeated = _repeated(graph, weights)
    for tensor in graph.inputs:
        if tensor.name in fixed.inputs:
            lowering.names[tensor] = Literal(fixed.inputs[tensor.name])
        else:
            lowering.names[tensor] = _input(lowering, tensor)
    lowering.graph(graph)
    for name, tensor in graph.outputs.items():
        _output(lowering, name, tensor)


def _unused(graph: Graph) -> set[Node]:
    """Nodes that no output needs where every `cond` computes `then`."""
    nodes = list(graph.walk())
    maker = _makers(nodes)
    unused, wanted = set(nodes), list(graph.outputs.values())
    while wanted:
        node = maker.get(wanted.pop())
        if node in unused:
            unused.remove(node)
            is_cond = node.op == "cond"
            wanted += [node.attrs["then"].outputs["result"]] if is_cond else node.inputs
    return unused


def _makers(nodes: Iterable[Node]) -> dict[Tensor, Node]:
    return {output: node for node in nodes for output in node.outputs}


def _first_halves(graph: Graph) -> dict[Node, Node]:
    """The first by the second of each reshape and transpose that follow one another.

    Both become one layer if nothing else reads what is between. A layer costs a build milliseconds.
    """
    nodes = list(graph.walk())
    maker = _makers(nodes)
    graphs = [graph, *(a for node in nodes for a in node.attrs.values() if isinstance(a, Graph))]
    reads = Counter(tensor for node in nodes for tensor in node.inputs)
    reads.update(tensor for each in graphs for tensor in each.outputs.values())
    halves: dict[Node, Node] = {}
    for node in nodes:
        before = maker.get(node.inputs[0]) if node.inputs else None
        if before is None or before in halves or reads[node.inputs[0]] > 1:
            continue
        if {before.op, node.op} == {"reshape", "transpose"}:
            halves[node] = before
    return halves


def _repeated(graph: Graph, weights: TrtWeights) -> frozenset[str]:
    """Names of weights that more than one product reads."""
    products = (node for node in graph.walk() if node.op == "linear")
    uses = Counter(
        weights.reader.canonical(weight.name)
        for node in products
        for weight in node.attrs["weights"]
    )
    return frozenset(name for name, count in uses.items() if count > 1)


def _input(low: TrtEmitter, tensor: Tensor) -> TrtTensor:
    dims = low.dims(tensor.shape)
    shape = [dim if isinstance(dim, int) else -1 for dim in dims]
    added = low.network.add_input(tensor.name, low.types[tensor.dtype], shape)
    for axis, dim in enumerate(dims):
        if isinstance(dim, str):
            added.set_dimension_name(axis, dim)
    return added


def _output(low: TrtEmitter, name: str, tensor: Tensor) -> None:
    """Name and mark an output. A value that has another name to keep gets a copy."""
    node, made = Node("output", (), (), {}, "/output"), low.names[tensor]
    value = low.value(tensor, node)
    if isinstance(made, Literal) or made.is_network_input or made.is_network_output:
        make = lambda: low.network.add_identity(value)  # noqa: E731
        value = low.layer(node, "identity", [value], make, name)[0]
    value.name = name
    low.network.mark_output(value)
