"""The GPU's step graph on disk: TensorRT's serialized engine and the list of its kernels."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy.typing as npt

from dflash_trt import contract, engine_dir
from dflash_trt.build.reporting import Reporting
from dflash_trt.build.tensorrt import build_engine
from dflash_trt.config import BuildChoices
from dflash_trt.flavor import PRECISION_TABLE, device_of, load_flavor
from dflash_trt.graph import Graph
from dflash_trt.kv_plugin import LIBRARY, load_plugin
from dflash_trt.lower.trt import lower_to_trt, step_fixed
from dflash_trt.lower.trt_weights import TrtWeights
from dflash_trt.quantize.policy import format_of


def write_tensorrt(
    graph: Graph,
    choices: BuildChoices,
    reader: Reporting,
    folder: Path,
    *,
    vocab_size: int,
    plugin: Path | None = None,
) -> dict[str, Any]:
    """Write `rank0.engine` and `layers.json`, beside them a copy of the plugin's library.

    Returns what the manifest says of them. `plugin`: the library, None for native layers.
    """
    device = device_of(choices.device)
    trt = load_flavor(device.backend)
    weights = TrtWeights(reader, format_of(choices.precision))
    compute = PRECISION_TABLE[choices.precision].compute
    profiles = contract.profiles(choices, vocab_size)

    capacity = contract.cache_rows(choices.max_seq_len, choices.block)
    fixed = step_fixed(choices.block, capacity)
    if not choices.logits:
        del graph.outputs[contract.LOGITS]

    creator = None
    if plugin is not None:
        shutil.copyfile(plugin, folder / LIBRARY)
        creator = load_plugin(trt, folder / LIBRARY)  # refused if it changed since the plan

    def define(network: Any) -> Sequence[npt.NDArray[Any]]:
        lower_to_trt(graph, network, trt, weights, compute, fixed, plugin=creator)
        return weights.kept

    def report(phase: str, fraction: float) -> None:
        reader.stage(f"TensorRT: {phase[:32].lower()}", fraction)

    built = build_engine(trt, device, define, profiles, folder / engine_dir.ENGINE, report)
    layers = json.dumps(built.layers, separators=(",", ":"))
    (folder / engine_dir.LAYERS).write_text(layers + "\n", encoding="utf-8")
    return {
        "network": {
            "sha256": built.network_sha256,
            "layers": built.num_layers,
            "tensors": built.tensors,
            "profiles": [{"name": p.name, "dims": p.dims} for p in profiles],
        },
        "warnings": list(built.warnings),
    }
