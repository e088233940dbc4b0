"""Which paths of dflash-trt work on a machine, and what to do about those that do not.

A pure function of what `examine` found.
"""

from __future__ import annotations

from dataclasses import dataclass

from dflash_trt.doctor.machine import Found, Machine, too_old
from dflash_trt.flavor import DEVICE_TABLE, EXTRAS, TENSORRT, Device
from dflash_trt.kv_plugin import HOW_TO

BASE_FIX = "pip install --force-reinstall dflash-trt"
APART = {"triton": "into an environment of its own, as it needs NumPy 1"}
GPU_BINDINGS = "cuda.bindings"
DRIVER_FIX = "install NVIDIA's driver; in a container, run it with the NVIDIA runtime (--gpus all)"


@dataclass(frozen=True)
class Road:
    """One path: whether it works here; if not, why, and how to mend it."""

    name: str
    works: bool
    detail: str
    fix: str = ""


def roads(machine: Machine) -> list[Road]:
    """Every path of dflash-trt, in the order of the README's support table."""
    builds = [_build(machine, device) for device in DEVICE_TABLE.values() if device.is_gpu]
    return [
        _cpu(machine, "build cpu", ("onnx", "onnxruntime")),
        _cpu(machine, "run cpu", ("onnxruntime",)),
        *builds,
        _run_gpu(machine),
        _plugin(machine),
        _kv_plugin(machine),
        _serve(machine),
        _triton(machine),
        _chart(machine),
    ]


def _cpu(machine: Machine, name: str, libraries: tuple[str, ...]) -> Road:
    for library in libraries:
        found = machine.libraries[library]
        if not found.is_ok:
            return Road(name, False, _why(library, found), BASE_FIX)
        wanted = too_old(library, found.version)
        if wanted:
            detail = f"{library} {found.version} is not the version that is needed: {wanted}"
            return Road(name, False, detail, f"pip install '{library}{wanted}'")
    return Road(name, True, ", ".join(_label(machine, library) for library in libraries))


def _build(machine: Machine, device: Device) -> Road:
    name, found = f"build {device.name}", machine.libraries[device.backend]
    if not found.is_ok:
        return Road(name, False, _why(device.backend, found), extra_fix(EXTRAS[device.backend]))
    # The data-center flavour tries its kernels on the GPU; the RTX one leaves that to the run.
    if device.backend == TENSORRT and device.capability not in _capabilities(machine):
        detail = f"{device.backend} builds on the GPU that it builds for, and there is none here"
        return Road(name, False, detail, f"build on a machine with an {device.name} GPU")
    return Road(name, True, _label(machine, device.backend))


def _run_gpu(machine: Machine) -> Road:
    name, bindings = "run gpu", machine.libraries[GPU_BINDINGS]
    if not machine.gpus:
        reason = machine.gpu_reason or "the driver sees no GPU"
        return Road(name, False, f"no NVIDIA GPU: {reason}", DRIVER_FIX)
    known = [
        d for d in DEVICE_TABLE.values() if d.is_gpu and d.capability in _capabilities(machine)
    ]
    if not known:
        detail = "no GPU of a kind that engines are built for"
        kinds = ", ".join(d.name for d in DEVICE_TABLE.values() if d.is_gpu)
        return Road(name, False, detail, f"engines can be built for {kinds}")
    if not bindings.is_ok:
        fix = extra_fix(EXTRAS[known[0].backend])
        return Road(name, False, _why(GPU_BINDINGS, bindings), fix)
    ready = [device for device in known if machine.libraries[device.backend].is_ok]
    if not ready:
        backend = known[0].backend
        return Road(
            name, False, _why(backend, machine.libraries[backend]), extra_fix(EXTRAS[backend])
        )
    kinds = ", ".join(device.name for device in ready)
    return Road(name, True, f"engines for {kinds}, {_label(machine, ready[0].backend)}")


def _plugin(machine: Machine) -> Road:
    fixes = {
        "nvcc": f"{extra_fix('cuda')}, or install a CUDA toolkit",
        "cmake": extra_fix("cuda"),
        "c++": "install g++ or clang",
    }
    return _tools(machine, "build plugin", fixes)


def _kv_plugin(machine: Machine) -> Road:
    """Only engines for data-center GPUs take it, and they do without it as well."""
    name, found = "kv plugin", machine.libraries["kv plugin"]
    if found.is_ok:
        parts = (str(found.facts.get("path", "")), found.reason)
        return Road(name, True, ", ".join(part for part in parts if part))
    without = "engines are built with native layers"
    return Road(name, False, f"{found.reason}; {without}", HOW_TO)


def _serve(machine: Machine) -> Road:
    absent = machine.extras.get("serve", ())
    if absent:
        return Road("serve", False, f"{', '.join(absent)}: not installed", extra_fix("serve"))
    return Road("serve", True, "OpenAI's API; with --no-triton, nothing else is needed")


def _triton(machine: Machine) -> Road:
    server = machine.libraries["tritonserver"]
    if not server.is_ok:
        fix = server.facts.get("hint") or extra_fix("triton")
        return Road("serve triton", False, server.reason, str(fix))
    return Road("serve triton", True, str(server.facts["path"]))


def _chart(machine: Machine) -> Road:
    library, tool = machine.libraries["helm_python"], machine.tools["helm"]
    if library.is_ok:
        return Road("chart", True, f"helm_python {library.version}")
    if tool.is_ok:
        return Road("chart", True, f"helm {tool.version}")
    detail = "no helm on PATH, " + _why("helm_python", library)
    return Road("chart", False, detail, f"{extra_fix('deploy')}, or install helm")


def _tools(machine: Machine, name: str, fixes: dict[str, str]) -> Road:
    for tool, fix in fixes.items():
        if not machine.tools[tool].is_ok:
            return Road(name, False, _why(tool, machine.tools[tool]), fix)
    found = (f"{tool} {machine.tools[tool].version}".strip() for tool in fixes)
    return Road(name, True, ", ".join(found))


def _capabilities(machine: Machine) -> set[tuple[int, int]]:
    return {gpu.capability for gpu in machine.gpus}


def _label(machine: Machine, library: str) -> str:
    return f"{library} {machine.libraries[library].version}"


def _why(name: str, found: Found) -> str:
    if found.state == "missing":
        return f"{name} is not installed"
    return f"{name} is broken: {found.reason}"


def extra_fix(extra: str) -> str:
    """How to install an extra; some do not go into the environment of the others."""
    command = f"pip install 'dflash-trt[{extra}]'"
    return f"{command} {APART[extra]}" if extra in APART else command
