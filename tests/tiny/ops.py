"""Runs a few traced ops through the ONNX lowering, inputs and outputs as arrays."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort
from onnx.reference.op_run import OpRun

from dflash_trt.graph import DType, Graph, Tensor, tracing
from dflash_trt.lower.onnx import lower_to_onnx
from dflash_trt.lower.onnx_weights import OnnxWeights
from dflash_trt.quantize.blocks import Blocks

Array = npt.NDArray[Any]
F32 = npt.NDArray[np.float32]

TYPES = {"float32": DType.F32, "int32": DType.I32, "int64": DType.I64, "bool": DType.BOOL}


class FusedMatMul(OpRun):  # type: ignore[misc]
    """The one operator of ONNX Runtime's own that these graphs use: a @ b.T."""

    op_domain = "com.microsoft"

    def _run(self, a: Array, b: Array, transB: int = 0) -> tuple[Array]:  # noqa: N803
        assert transB == 1
        return (a @ b.T,)


class GatherElements(OpRun):  # type: ignore[misc]
    """The reference evaluator's own cannot read from more than 64 elements."""

    op_domain = ""

    def _run(self, data: Array, indices: Array, axis: int = 0) -> tuple[Array]:
        return (np.take_along_axis(data, indices.astype(np.int64), axis),)


# What `ReferenceEvaluator` needs beside ONNX's own operators.
REFERENCE_OPS = [FusedMatMul, GatherElements]


class Arrays:
    """A weight reader over a dict of arrays; `stored` are weights that come in 4-bit blocks."""

    def __init__(
        self, arrays: Mapping[str, Array], stored: Mapping[str, Blocks] | None = None
    ) -> None:
        self._arrays = dict(arrays)
        self._stored = dict(stored or {})

    def canonical(self, name: str) -> str:
        return name

    def read(self, name: str) -> F32:
        return self._arrays[name]

    def read_rows(self, name: str, start: int, stop: int) -> F32:
        return self._arrays[name][start:stop]

    def q4_blocks(self, name: str) -> Blocks | None:
        return self._stored.get(name)


def lower(
    folder: Path,
    body: Callable[..., Any],
    shapes: Mapping[str, tuple[DType, tuple[int | str, ...]]],
    weights: Arrays | None = None,
    bits: int | None = None,
    decompose: Collection[str] = (),
) -> Path:
    """The model file of `body`, called with one tensor per entry of `shapes`."""
    graph = Graph("ops")
    with tracing(graph):
        inputs = {n: graph.add_input(n, shape, dtype) for n, (dtype, shape) in shapes.items()}
        made = body(**inputs)
    outputs = [made] if isinstance(made, Tensor) else list(made)
    for index, tensor in enumerate(outputs):
        graph.add_output(f"out{index}", tensor)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "weights.bin").open("wb") as data:
        streamed = OnnxWeights(weights or Arrays({}), data, "weights.bin", lambda name: bits)
        model = lower_to_onnx(graph, streamed, decompose)
    onnx.save(model, str(folder / "ops.onnx"))
    return folder / "ops.onnx"


def run_ops(
    folder: Path, body: Callable[..., Any], inputs: Mapping[str, Array],
    dims: Mapping[str, tuple[int | str, ...]] | None = None, **options: Any,
) -> list[Array]:  # fmt: skip
    """Trace, lower and run `body` on arrays; `dims` names axes where sizes must not be known."""
    shapes = {
        name: (TYPES[str(array.dtype)], (dims or {}).get(name, array.shape))
        for name, array in inputs.items()
    }
    path = lower(folder, body, shapes, **options)
    settings = ort.SessionOptions()
    settings.intra_op_num_threads = 1
    settings.log_severity_level = 3
    session = ort.InferenceSession(str(path), settings)
    return list(session.run(None, dict(inputs)))
