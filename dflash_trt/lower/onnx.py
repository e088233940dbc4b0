"""Lowering of the op surface to ONNX (opset 24), run by ONNX Runtime: the CPU path."""

from __future__ import annotations

from collections.abc import Collection

import onnx
from onnx import helper

from dflash_trt.graph import Graph, Tensor
from dflash_trt.lower.onnx_emitter import OnnxEmitter, value_info
from dflash_trt.lower.onnx_ops import EMITTERS, MICROSOFT
from dflash_trt.lower.onnx_weights import OnnxWeights

OPSET = 24
IR_VERSION = 11


def lower_to_onnx(
    graph: Graph, weights: OnnxWeights, decompose: Collection[str] = ()
) -> onnx.ModelProto:
    """The model of a graph; weight bytes go to `weights` as they are met, none stay in memory.

    `decompose` names compounds to expand although ONNX has an operator: for tests of the oracle.
    Raises `NoLowering` for an op that has neither an emitter nor a decomposition.
    """
    claimed = {op: emit for op, emit in EMITTERS.items() if op not in decompose}
    lowering = OnnxEmitter(weights, claimed)
    for tensor in graph.inputs:
        lowering.names[tensor] = tensor.name
    lowering.graph(graph)
    outputs = []
    for name, tensor in graph.outputs.items():
        lowering.nodes.append(helper.make_node("Identity", [lowering.names[tensor]], [name]))
        outputs.append(value_info(name, tensor))
    inputs = [value_info(t.name, t) for t in graph.inputs]
    nodes = _rename_outputs(lowering.nodes, graph.outputs)
    proto = helper.make_graph(nodes, graph.name, inputs, outputs, weights.initializers)
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(MICROSOFT, 1)]
    return helper.make_model(
        proto, opset_imports=opsets, ir_version=IR_VERSION, producer_name="dflash-trt"
    )


def _rename_outputs(
    nodes: list[onnx.NodeProto], outputs: dict[str, Tensor]
) -> list[onnx.NodeProto]:
    """Fold the final Identity nodes away: an output is named where it is made.

    The caches must come straight from their update, or ONNX Runtime would copy them.
    """
    made = {name for node in nodes for name in node.output}  # not inputs, not weights
    rename: dict[str, str] = {}
    kept = []
    for node in nodes:
        is_final = node.op_type == "Identity" and node.output[0] in outputs
        if is_final and node.input[0] in made and node.input[0] not in rename:
            rename[node.input[0]] = node.output[0]
        else:
            kept.append(node)
    for node in kept:
        _rename_in(node, rename)
    return kept


def _rename_in(node: onnx.NodeProto, rename: dict[str, str]) -> None:
    for names in (node.input, node.output):
        for i, name in enumerate(names):
            names[i] = rename.get(name, name)
    for attribute in node.attribute:
        for inner in attribute.g.node:
            _rename_in(inner, rename)
