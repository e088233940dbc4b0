"""What is asked of one library or driver, in a process of its own: `python -m .. NAME` prints JSON.

A native library that is broken can end its process or never return. What a probe asks is imported
when it is asked, so that it is as quick as what it probes.
"""

from __future__ import annotations

import contextlib
import csv
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

NVIDIA_SMI = ("name", "compute_cap", "memory.total", "driver_version")
DRIVER_FILE = Path("/proc/driver/nvidia/version")
MIB = 1 << 20

Facts = dict[str, Any]


def onnxruntime() -> Facts:
    """ONNX Runtime and what it can run on."""
    module = importlib.import_module("onnxruntime")
    providers = list(module.get_available_providers())
    if "CPUExecutionProvider" not in providers:
        raise RuntimeError(f"it has no CPUExecutionProvider, only {', '.join(providers)}")
    return {"version": str(module.__version__), "providers": providers}


def tensorrt(name: str) -> Facts:
    """A TensorRT flavour: whether its libraries load."""
    module = importlib.import_module(name)
    if not hasattr(module, "Builder"):
        raise RuntimeError("it is not TensorRT: it has no Builder")
    return {"version": str(module.__version__)}


def plain(name: str) -> Facts:
    """A Python package of which only the import matters."""
    module = importlib.import_module(name)
    return {"version": str(getattr(module, "__version__", "") or _distribution_version(name))}


def tritonserver() -> Facts:
    """The server that `serve` would start."""
    from dflash_trt.errors import DFlashError
    from dflash_trt.serve.tritonserver import find_tritonserver

    try:
        found = find_tritonserver()
    except DFlashError as error:
        return {"state": "missing", "reason": error.message, "hint": error.hint}
    return {"path": str(found.binary)}


def kv_plugin() -> Facts:
    """The KV-injection plugin's library that `build` would take; loaded where TensorRT is."""
    from dflash_trt.errors import MissingPackage
    from dflash_trt.flavor import TENSORRT, load_flavor
    from dflash_trt.kv_plugin import VARIABLE, built_library, find_library, load_plugin

    library = find_library()
    if library is None or not library.is_file():
        named = os.environ.get(VARIABLE)
        unset = f"${VARIABLE} is not set, and there is no {built_library()}"
        reason = f"${VARIABLE} names {named}, which is no file" if named else unset
        return {"state": "missing", "reason": reason}
    try:
        load_plugin(load_flavor(TENSORRT), library)
    except MissingPackage:
        return {"path": str(library), "reason": f"not tried: there is no {TENSORRT}"}
    return {"path": str(library)}


def gpus() -> Facts:
    """The NVIDIA driver and the GPUs that CUDA sees; from nvidia-smi where cuda-bindings is not."""
    try:
        return _gpus_of_cuda()
    except Exception as error:  # whatever a broken installation raises
        try:
            return _gpus_of_nvidia_smi()
        except Exception as second:
            if isinstance(second, FileNotFoundError) and not DRIVER_FILE.exists():
                return {"driver": None, "gpus": [], "reason": "there is no NVIDIA driver"}
            raise RuntimeError(f"the driver does not work: {_line(error)}") from second


def _gpus_of_cuda() -> Facts:
    driver: Any = importlib.import_module("cuda.bindings.driver")

    def call(function: Callable[..., Any], *arguments: Any) -> Any:
        status, *values = function(*arguments)
        if int(status) != 0:
            raise RuntimeError(f"{function.__name__} answers {getattr(status, 'name', status)}")
        return values[0] if values else None

    call(driver.cuInit, 0)
    kinds = driver.CUdevice_attribute
    major = kinds.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
    minor = kinds.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR
    found = []
    for index in range(call(driver.cuDeviceGetCount)):
        device = call(driver.cuDeviceGet, index)
        name = call(driver.cuDeviceGetName, 128, device)
        text = name.decode(errors="replace") if isinstance(name, bytes) else str(name)
        found.append(
            {
                "name": text.rstrip("\0"),
                "capability": [
                    int(call(driver.cuDeviceGetAttribute, kind, device)) for kind in (major, minor)
                ],
                "memory_bytes": int(call(driver.cuDeviceTotalMem, device)),
            }
        )
    cuda = int(call(driver.cuDriverGetVersion))
    return {
        "driver": _driver_version(),
        "cuda": f"{cuda // 1000}.{cuda % 1000 // 10}",
        "gpus": found,
    }


def _driver_version() -> str | None:
    """The driver's own number, from its library or the kernel module."""
    with contextlib.suppress(Exception):
        nvml: Any = importlib.import_module("cuda.bindings.nvml")
        nvml.init_v2()
        return str(nvml.system_get_driver_version())
    with contextlib.suppress(Exception):
        words = DRIVER_FILE.read_text().split()
        return next(word for word in words if word[0].isdigit() and word.count(".") in (1, 2))
    return None


def _gpus_of_nvidia_smi() -> Facts:
    command = ["nvidia-smi", f"--query-gpu={','.join(NVIDIA_SMI)}", "--format=csv,noheader,nounits"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    rows = [[cell.strip() for cell in row] for row in csv.reader(done.stdout.splitlines()) if row]
    found = [
        {
            "name": name,
            "capability": [int(part) for part in capability.split(".")],
            "memory_bytes": int(mib) * MIB,
        }
        for name, capability, mib, _ in rows
    ]
    return {"driver": rows[0][3] if rows else None, "cuda": None, "gpus": found}


def _distribution_version(name: str) -> str:
    for distribution in metadata.packages_distributions().get(name.split(".")[0], ()):
        return metadata.version(distribution)
    return "of unknown version"


def _line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


PROBES: dict[str, Callable[[], Facts]] = {
    "gpus": gpus,
    "onnx": lambda: plain("onnx"),
    "onnxruntime": onnxruntime,
    "tensorrt": lambda: tensorrt("tensorrt"),
    "tensorrt_rtx": lambda: tensorrt("tensorrt_rtx"),
    "cuda.bindings": lambda: plain("cuda.bindings"),
    "tritonserver": tritonserver,
    "kv plugin": kv_plugin,
    "helm_python": lambda: plain("helm_python"),
}


def main() -> None:
    """Run the probe that the command line names; one JSON object on the last line."""
    name = sys.argv[1]
    try:
        answer: Facts = {"state": "ok", **PROBES[name]()}
    except ModuleNotFoundError as error:
        # Another module that this one needs may be what is missing: then it is broken.
        is_absent = f"{name}.".startswith(f"{error.name}.")
        answer = {"state": "missing" if is_absent else "broken", "reason": _line(error)}
    except BaseException as error:  # also SystemExit: a module may raise anything at import
        answer = {"state": "broken", "reason": _line(error)}
    sys.stdout.write(f"\n{json.dumps(answer)}\n")


if __name__ == "__main__":
    main()
