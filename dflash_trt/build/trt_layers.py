"""Reads the list of kernels that TensorRT logs at the end of a build, as `layers.json` keeps it.

It is the engine inspector's text. The inspector itself needs a loaded engine, and so a GPU.
"""

from __future__ import annotations

import re
from typing import Any

_LAYER = re.compile(
    r"^Name: (?P<name>.*?), LayerType: (?P<type>[^,]*), Inputs: \[(?P<inputs>.*?)\]"
    r"(?:, Constants: \[(?P<constants>.*?)\])?, Outputs: \[(?P<outputs>.*?)\]"
    r"(?:, (?:TacticName|StreamId): |$)"
)
_TENSOR = re.compile(
    r"^ ?Name: (?P<name>.*?), IOMode: (?P<mode>\w+), DataType: (?P<dtype>\w+), "
    r"Dimensions: (?P<dims>\[[^\]]*\]), Location: (?P<location>\w+), "
    r"IsShapeInferenceIO: (?P<shape>\w+)"
)
_DTYPE = re.compile(r"Datatype: (\w+)")


def read_layers(text: str, num_engines: int) -> dict[str, Any]:
    """The content of `layers.json`: kernels with their element types, and the engine's tensors."""
    layers, tensors = [], []
    for line in text.splitlines():
        if tensor := _TENSOR.match(line):
            tensors.append(
                {
                    "name": tensor["name"],
                    "mode": tensor["mode"].lower(),
                    "dtype": tensor["dtype"],
                    "dims": [int(d) for d in tensor["dims"].strip("[]").split(",") if d],
                    "location": tensor["location"].lower(),
                    "is_shape": tensor["shape"] == "true",
                }
            )
        elif layer := _LAYER.match(line):
            layers.append(
                {
                    "name": layer["name"],
                    "type": layer["type"],
                    "inputs": _dtypes(layer["inputs"]),
                    "constants": _dtypes(layer["constants"] or ""),
                    "outputs": _dtypes(layer["outputs"]),
                }
            )
    return {"engines": num_engines, "tensors": tensors, "layers": layers}


def _dtypes(tensors: str) -> list[str]:
    """Element types, each once, in order."""
    return list(dict.fromkeys(_DTYPE.findall(tensors)))
