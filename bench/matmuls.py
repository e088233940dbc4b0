"""The matrix products of a step graph, alone: the floor under which no step can run.

Every product keeps its weight and its number of rows; all else is left out.
"""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper

PRODUCTS = ("FusedMatMul", "MatMulNBits")


class Products:
    """An ONNX Runtime session over the products of one engine's `step.onnx`."""

    def __init__(self, engine: Path, num_threads: int) -> None:
        model = onnx.load(engine / "step.onnx", load_external_data=False)
        self._weights = {t.name: t for t in model.graph.initializer}
        self._inputs: dict[str, int] = {}  # name -> inner size
        nodes = [self._alone(node) for node in model.graph.node if node.op_type in PRODUCTS]
        used = {name for node in nodes for name in node.input if name in self._weights}
        outputs = [
            helper.make_tensor_value_info(node.output[0], TensorProto.FLOAT, None) for node in nodes
        ]
        graph = helper.make_graph(
            nodes,
            "products",
            [
                helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, f"rows_{name}", inner])
                for name, inner in self._inputs.items()
            ],
            outputs,
            [self._weights[name] for name in used],
        )
        alone = helper.make_model(
            graph, opset_imports=model.opset_import, ir_version=model.ir_version
        )
        # External data is looked up beside the model file.
        file = engine / ".products.onnx"
        file.write_bytes(alone.SerializeToString())
        try:
            options = ort.SessionOptions()
            options.intra_op_num_threads = num_threads
            self._session = ort.InferenceSession(
                str(file), options, providers=["CPUExecutionProvider"]
            )
        finally:
            file.unlink()

    def _alone(self, node: onnx.NodeProto) -> onnx.NodeProto:
        """The node with its activation replaced by an input of the same kind of rows."""
        alone = onnx.NodeProto()
        alone.CopyFrom(node)
        inner = self._inner_size(node)
        name = f"{_rows_kind(node)}_{inner}"
        self._inputs[name] = inner
        alone.input[0] = name
        return alone

    def _inner_size(self, node: onnx.NodeProto) -> int:
        for attribute in node.attribute:
            if attribute.name == "K":
                return int(attribute.i)
        return int(self._weights[node.input[1]].dims[-1])

    def seconds(self, rows: dict[str, int]) -> float:
        """Time of all products, once; `rows` gives target, verify, block and draft rows."""
        feeds = {
            name: np.ones((1, rows[name.split("_")[0]], inner), np.float32)
            for name, inner in self._inputs.items()
        }
        start = time.perf_counter()
        self._session.run(None, feeds)
        return time.perf_counter() - start


def _rows_kind(node: onnx.NodeProto) -> str:
    """Which rows a product has, by the net it belongs to (node names follow parameter paths)."""
    name = node.name.removeprefix("/")
    if name.startswith("target.lm_head"):
        return "verify"
    if name.startswith(("drafter.lm_head", "drafter.selector")):
        return "draft"
    if name.startswith("drafter.layers"):
        return "block"
    return "target"  # target layers, and the context that is injected
