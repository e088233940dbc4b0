"""A stable SHA-256 of a network definition: same inputs, same network, in any process."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import numpy.typing as npt

from dflash_trt import contract

_NOT_OF_THE_LAYER = {
    "name", "metadata", "type", "num_inputs", "num_outputs", "num_ranks",
}  # fmt: skip
MAX_HASHED = 1 << 20  # larger constants are weights: their bytes are the checkpoints'
_PLAIN = (bool, int, float, str, tuple, list)


def hash_network(
    trt: Any,
    network: Any,
    constants: Sequence[npt.NDArray[Any]],
    profiles: Sequence[contract.Profile],
) -> str:
    """Hex SHA-256 over inputs, layers in order, wiring, attributes, outputs and profiles.

    `constants` are the arrays that the network's constants point at. Large ones are weights and
    count by type and shape: their bytes are the checkpoints' (and the engine file's).
    """
    digest = hashlib.sha256()
    numbers: dict[str, int] = {}  # TensorRT makes one wrapper per call: tensors are told by name

    def put(*values: Any) -> None:
        digest.update(json.dumps(values, sort_keys=True).encode() + b"\n")

    for index in range(network.num_inputs):
        tensor = network.get_input(index)
        numbers[tensor.name] = len(numbers)
        dims = [tensor.get_dimension_name(axis) for axis in range(len(tensor.shape))]
        put("input", tensor.name, str(tensor.dtype), list(tensor.shape), dims)
    for index in range(network.num_layers):
        layer = network.get_layer(index)
        inputs = [layer.get_input(i) for i in range(layer.num_inputs)]
        outputs = [layer.get_output(i) for i in range(layer.num_outputs)]
        for tensor in outputs:
            numbers[tensor.name] = len(numbers)
        put(
            str(layer.type),
            [None if tensor is None else numbers[tensor.name] for tensor in inputs],
            [[str(tensor.dtype), str(_readable(tensor, "shape"))] for tensor in outputs],
            _attributes(trt, layer),
        )
    for index in range(network.num_outputs):
        tensor = network.get_output(index)
        put("output", tensor.name, numbers[tensor.name])
    for array in constants:
        is_small = array.nbytes <= MAX_HASHED
        content = hashlib.sha256(array.tobytes()).hexdigest() if is_small else None
        put("constant", array.dtype.name, array.shape, content)
    for profile in profiles:
        put("profile", profile.name, profile.dims)
    return digest.hexdigest()


def _readable(thing: Any, name: str) -> Any:
    """An attribute; None where TensorRT refuses to tell, as of an invalid or unset one."""
    try:
        return getattr(thing, name)
    except RuntimeError:
        return None


def _attributes(trt: Any, layer: Any) -> dict[str, Any]:
    """Plain attributes of a layer's own class, and of the attention that a boundary belongs to."""
    kind = layer.type.name.replace("_", "").lower()
    for name in dir(trt):
        if name.lower() == f"i{kind}layer":
            layer.__class__ = getattr(trt, name)  # TensorRT's own way: get_layer gives an ILayer
    found = _plain(trt, layer)
    if layer.type == trt.LayerType.PLUGIN_V3:
        # In place of an object's address: its attributes, which lower/trt_plugin.py writes there.
        found["plugin"] = layer.metadata
    return found


def _plain(trt: Any, thing: Any) -> dict[str, Any]:
    """Numbers, shapes and enums; tensors are part of the wiring."""
    found: dict[str, Any] = {}
    for name in sorted(set(dir(thing)) - _NOT_OF_THE_LAYER):
        if name.startswith("_"):
            continue
        value = _readable(thing, name)
        if isinstance(value, trt.Weights):
            found[name] = [str(value.dtype), value.size]
        elif isinstance(value, trt.IAttention):
            found[name] = _plain(trt, value)
        elif isinstance(value, trt.ITensor):
            continue
        elif isinstance(value, _PLAIN) or type(value).__module__ == trt.Dims.__module__:
            found[name] = str(value)
    return found
