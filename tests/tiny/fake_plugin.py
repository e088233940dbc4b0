"""Stand-ins for what `tensorrt` has and `tensorrt_rtx` lacks: plugin layers; and for its registry.

All else is the real `tensorrt_rtx`.
"""

from __future__ import annotations

import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorrt_rtx as trt

CONTENT = b"a library with the plugin"


class Creator:
    """TensorRT's view of the plugin's creator: keeps the attributes."""

    def __init__(self) -> None:
        self.given: list[dict[str, Any]] = []

    def create_plugin(self, name: str, fields: Any, phase: Any) -> Any:
        self.given.append({field.name: np.array(field.data).item() for field in fields})
        return self


class Registry:
    """Loads files that begin with `CONTENT`; as the real one, takes a plugin once and keeps it."""

    def __init__(self) -> None:
        self.loaded: list[str] = []
        self.creator: Creator | None = None

    def load_library(self, path: str) -> object:
        if self.creator is not None or not Path(path).read_bytes().startswith(CONTENT):
            return None
        self.loaded.append(path)
        self.creator = Creator()
        return object()

    def get_creator(self, name: str, version: str, namespace: str) -> Creator | None:
        assert (name, version, namespace) == ("DFlashKvInject", "1", "dflash")
        return self.creator


class Network:
    """A network of `tensorrt_rtx` with plugin layers, which come last; keeps what they are fed."""

    def __init__(self) -> None:
        self.builder = trt.Builder(trt.Logger(trt.Logger.ERROR))
        flags = 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
        self.real = self.builder.create_network(flags)
        self.layers: list[Plugin] = []
        self.kept: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    @property
    def num_layers(self) -> int:
        return int(self.real.num_layers) + len(self.layers)

    def get_layer(self, index: int) -> Any:
        behind = index - self.real.num_layers
        return self.layers[behind] if behind >= 0 else self.real.get_layer(index)

    def add_plugin_v3(self, inputs: list[Any], shape_inputs: list[Any], plugin: Any) -> Any:
        assert shape_inputs == []
        self.layers.append(Plugin(self.real, inputs, len(self.layers)))
        return self.layers[-1]


class Plugin:
    """Stands for the plugin's layer; its outputs are the caches as they came."""

    name, metadata, num_outputs = "", "", 2
    type = trt.LayerType.PLUGIN_V3

    def __init__(self, network: Any, inputs: Sequence[Any], index: int) -> None:
        self.fed = [f"fed{index}_{place}" for place in range(len(inputs))]
        self._inputs, self.num_inputs = inputs, len(inputs)
        for name, tensor in zip(self.fed, inputs, strict=True):
            copy = network.add_identity(tensor).get_output(0)
            copy.name = name
            network.mark_output(copy)
        self._outputs = [network.add_identity(t).get_output(0) for t in inputs[-2:]]
        self.plugin = trt.IPluginV3()  # its text is an address

    def get_input(self, index: int) -> Any:
        return self._inputs[index]

    def get_output(self, index: int) -> Any:
        return self._outputs[index]


def with_plugins(**changes: Any) -> Any:
    """The module `tensorrt`."""
    real = {name: getattr(trt, name) for name in dir(trt)}
    return types.SimpleNamespace(**{**real, "IPluginV3Layer": Plugin, **changes})
