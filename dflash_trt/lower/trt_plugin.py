"""Emitter of `inject_kv` as a layer of our TensorRT plugin, in place of about eight native layers.

Inputs and attributes are those of `plugins/trt/kv_inject_plugin.h`. The flavour `tensorrt_rtx` has
no plugin layers.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dflash_trt.errors import BuildError
from dflash_trt.graph import Node
from dflash_trt.kv_plugin import NAME, NAMESPACE, VERSION
from dflash_trt.lower.trt_emitter import Emitter, TrtEmitter, TrtTensor

HEAD_DIMS = (64, 128, 256)
COMPUTE = ("bf16", "fp16")


def has_kernel(head_dim: int, compute: str) -> bool:
    """Whether the plugin can do the injection of a drafter; native layers can do all."""
    return head_dim in HEAD_DIMS and compute in COMPUTE


def injection_by(creator: Any) -> Emitter:
    """The emitter of `inject_kv` by the plugin of `creator`; natively where that has no kernel."""

    def emit(low: TrtEmitter, node: Node) -> list[TrtTensor]:
        head_dim = node.inputs[0].shape[3]
        if not (isinstance(head_dim, int) and has_kernel(head_dim, low.compute)):
            return low.expand(node)
        caches, context, block = (node.inputs[i : i + 2] for i in (0, 2, 4))
        start, committed, _, _, cos, sin, *weight = node.inputs[6:]
        order = [start, committed, cos, sin, *context, *block, *weight, *caches]
        inputs = [low.value(tensor, node) for tensor in order]
        eps = node.attrs["eps"]
        numbers = {"num_layers": 1, "block": 1, "norm": len(weight)}

        def make() -> Any:
            plugin = _plugin(low.trt, creator, 0.0 if eps is None else eps, numbers)
            layer = low.network.add_plugin_v3(inputs, [], plugin)
            if layer is not None:
                # TensorRT's Python does not tell the attributes of a plugin written in C++.
                layer.metadata = _description(eps, numbers)
            return layer

        return low.layer(node, "inject_kv", inputs, make, eps)

    return emit


def _description(eps: float | None, numbers: dict[str, int]) -> str:
    attributes = " ".join(f"{name}={number}" for name, number in numbers.items())
    return f"{NAMESPACE}::{NAME} {VERSION} eps={eps!r} {attributes}"


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
