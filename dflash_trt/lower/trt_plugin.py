"""Emitter of `inject_kv` as a layer of our TensorRT plugin, in place of about eight native layers.

Inputs and attributes are those of `plugins/trt/kv_inject_plugin.h`. The flavour `tensorrt_rtx` has
no plugin layers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from dflash_trt.errors import BuildError
from dflash_trt.graph import Node
from dflash_trt.lower.trt_emitter import Emitter, TrtEmitter, TrtTensor

NAME, VERSION, NAMESPACE = "DFlashKvInject", "1", "dflash"
HEAD_DIMS = (64, 128, 256)
COMPUTE = ("bf16", "fp16")


def load_plugin(trt: Any, library: Path) -> Any:
    """The plugin's creator, from a library that `make plugins` built.

    Raises `BuildError` when the file is not there or TensorRT does not take it.
    """
    registry = trt.get_plugin_registry()
    is_loaded = library.is_file() and registry.load_library(str(library)) is not None
    creator = registry.get_creator(NAME, VERSION, NAMESPACE) if is_loaded else None
    if creator is None:
        raise BuildError(
            f"{library} is not a library with the TensorRT plugin {NAME} {VERSION}",
            hint="make plugins TENSORRT_ROOT=.. builds it; docs/plugin.md",
        )
    return creator


def injection_by(creator: Any) -> Emitter:
    """The emitter of `inject_kv` by the plugin of `creator`; natively where that has no kernel."""

    def emit(low: TrtEmitter, node: Node) -> list[TrtTensor]:
        if node.inputs[0].shape[3] not in HEAD_DIMS or low.compute not in COMPUTE:
            return low.expand(node)
        caches, context, block = (node.inputs[i : i + 2] for i in (0, 2, 4))
        start, committed, _, _, cos, sin, *weight = node.inputs[6:]
        order = [start, committed, cos, sin, *context, *block, *weight, *caches]
        inputs = [low.value(tensor, node) for tensor in order]
        eps = node.attrs["eps"]
        numbers = {"num_layers": 1, "block": 1, "norm": len(weight)}

        def make() -> Any:
            plugin = _plugin(low.trt, creator, 0.0 if eps is None else eps, numbers)
            return low.network.add_plugin_v3(inputs, [], plugin)

        return low.layer(node, "inject_kv", inputs, make, eps)

    return emit


def _plugin(trt: Any, creator: Any, eps: float, numbers: dict[str, int]) -> Any:
    kinds = trt.PluginFieldType
    fields = [trt.PluginField("eps", np.array([eps], np.float32), kinds.FLOAT32)]
    for name, number in numbers.items():
        fields.append(trt.PluginField(name, np.array([number], np.int32), kinds.INT32))
    collection = trt.PluginFieldCollection(fields)
    plugin = creator.create_plugin("inject_kv", collection, trt.TensorRTPhase.BUILD)
    if plugin is None:
        raise BuildError(f"TensorRT's plugin {NAME} refused {numbers}, eps {eps}")
    return plugin
