"""The TensorRT plugin library; skips where TensorRT's headers, part of its SDK, are not."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kv.tools import find_tool, run_tool

# In a process of its own: TensorRT's registry keeps what it has loaded.
REGISTRY = """
import sys
import numpy as np
import tensorrt_rtx as trt

from pathlib import Path
from dflash_trt.errors import PluginError
from dflash_trt.kv_plugin import load_plugin

library = Path(sys.argv[1])
creator = load_plugin(trt, library)
copy, other = (Path(sys.argv[2]) / name for name in ("copy.so", "other.so"))
copy.write_bytes(library.read_bytes())
assert load_plugin(trt, copy) is not None
other.write_bytes(library.read_bytes() + b"x")
try:
    load_plugin(trt, other)
except PluginError as error:
    print(error.message.partition(": ")[2])

def create(**values):
    fields = []
    for name, value in values.items():
        is_float = isinstance(value, float)
        kind = trt.PluginFieldType.FLOAT32 if is_float else trt.PluginFieldType.INT32
        fields.append(trt.PluginField(name, np.array([value], "f4" if is_float else "i4"), kind))
    return creator.create_plugin("x", trt.PluginFieldCollection(fields), trt.TensorRTPhase.BUILD)

plugin = create(num_layers=5, eps=1e-6, block=1)
kinds = trt.PluginCapabilityType
for kind in (kinds.CORE, kinds.BUILD, kinds.RUNTIME):
    print(type(plugin.get_capability_interface(kind)).__name__)
print([field.name for field in creator.field_names])
print(create(num_layers=50, eps=1e-6))
"""


@pytest.fixture(params=["host", "cuda"])
def library(request: pytest.FixtureRequest, build: Callable[[str], Path]) -> Path:
    folder = build(request.param)
    suffix = "_host" if request.param == "host" else ""
    name = f"libdflash_trt_plugin{suffix}.so"
    if name not in (folder / "build.ninja").read_text():
        pytest.skip("TensorRT's headers are not here: set TENSORRT_ROOT to an SDK")
    return folder / name


def test_every_method(library: Path, build: Callable[[str], Path]) -> None:
    host = build("host")
    kernel = [str(host / "libkv_inject_host.so")] if "_host" in library.name else []
    told = run_tool([str(host / "adapter_test"), str(library), *kernel])
    assert told.startswith("adapter: 7 kinds of launches, ")
    assert ("enqueue too" in told) == bool(kernel)


def test_library_needs_no_tensorrt_library(library: Path) -> None:
    nm = find_tool("nm")
    defined = run_tool([nm, "-D", "--defined-only", str(library)])
    assert {"getCreators", "setLoggerFinder"} <= set(re.findall(r" T (\S+)", defined))
    undefined = run_tool([nm, "-DC", "--undefined-only", str(library)])
    assert "nvinfer" not in undefined
    needed = re.findall(r"NEEDED.*\[(.*)\]", run_tool([find_tool("readelf"), "-d", str(library)]))
    assert [name for name in needed if "nv" in name or "cuda" in name] == []


def test_tensorrt_registry_loads_it(library: Path, tmp_path: Path) -> None:
    """TensorRT-RTX has no plugin layers, but the plugin registry of TensorRT itself."""
    pytest.importorskip("tensorrt_rtx", exc_type=ImportError)
    command = [sys.executable, "-c", REGISTRY, str(library), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "this process has the plugin DFlashKvInject 1 of another library",
        "IPluginV3OneCore",
        "IPluginV3OneBuildV2",
        "IPluginV3OneRuntime",
        "['num_layers', 'eps', 'quant', 'stacked', 'block', 'norm', 'ring', 'bytes', 'aliased']",
        "None",
    ]
