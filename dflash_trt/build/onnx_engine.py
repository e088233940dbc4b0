"""The CPU's step graph on disk: an ONNX model and its weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import onnxruntime

from dflash_trt import contract, engine_dir
from dflash_trt.build.reporting import Reporting
from dflash_trt.config import BuildChoices
from dflash_trt.graph import Graph
from dflash_trt.lower.onnx import lower_to_onnx
from dflash_trt.lower.onnx_weights import OnnxWeights
from dflash_trt.quantize.policy import bits_of


def onnx_versions() -> dict[str, str]:
    """Versions of the packages that make and run the model."""
    return {"onnx": onnx.__version__, "onnxruntime": onnxruntime.__version__}


def write_onnx(
    graph: Graph, choices: BuildChoices, reader: Reporting, folder: Path
) -> dict[str, Any]:
    """Write `step.onnx` and `weights.bin`; nothing is added to the manifest."""
    with (folder / engine_dir.WEIGHTS).open("wb") as data:
        weights = OnnxWeights(reader, data, engine_dir.WEIGHTS, bits_of(choices.precision))
        model = lower_to_onnx(graph, weights)
    built_for = contract.build_properties(choices.block, choices.max_seq_len)
    onnx.helper.set_model_props(model, built_for)
    (folder / engine_dir.MODEL).write_bytes(model.SerializeToString())
    return {}
