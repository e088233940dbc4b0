"""What `doctor` finds on machines of all kinds: the broken ones are made of fake packages."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dflash_trt.doctor.machine import Found, Gpu, Machine, examine, probe
from dflash_trt.doctor.paths import extra_fix, roads
from dflash_trt.flavor import DEVICE_TABLE

OK = Found("ok", "1.99.0")
MISSING = Found("missing")
RTX_5090 = Gpu("NVIDIA GeForce RTX 5090", (12, 0), 32 << 30)
CUDA_DRIVER = """
import enum
class Status(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_NO_DEVICE = 100
class CUdevice_attribute(enum.Enum):
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 0
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 1
GPUS = [("NVIDIA RTX [5090] \\u2122", (12, 0), 32 << 30), ("NVIDIA L4", (8, 9), 24 << 30)]
def cuInit(flags): return (Status(INIT),)
def cuDriverGetVersion(): return Status(0), 13020
def cuDeviceGetCount(): return Status(0), len(GPUS)
def cuDeviceGet(index): return Status(0), index
def cuDeviceGetName(size, device): return Status(0), GPUS[device][0].encode().ljust(size, b"\\0")
def cuDeviceGetAttribute(kind, device): return Status(0), GPUS[device][1][kind.value]
def cuDeviceTotalMem(device): return Status(0), GPUS[device][2]
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Puts a module in front of the installed one, in processes that start from now on."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def put(name: str, code: str) -> None:
        file = tmp_path.joinpath(*name.split(".")) / "__init__.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        for folder in file.parents:
            if folder == tmp_path:
                break
            (folder / "__init__.py").touch()
        file.write_text(code)

    return put


def machine(**changes: Any) -> Machine:
    """One that has everything, with an RTX GPU."""
    names = ("onnx", "onnxruntime", "tensorrt", "tensorrt_rtx", "cuda.bindings", "helm_python")
    server = Found("ok", facts={"path": "/opt/tritonserver/bin/tritonserver"})
    plugin = Found("ok", facts={"path": "/plugins/lib.so"})
    whole = Machine(
        libraries=dict.fromkeys(names, OK) | {"tritonserver": server, "kv plugin": plugin},
        tools=dict.fromkeys(("nvcc", "cmake", "c++", "helm"), OK),
        extras={}, driver="590.1", cuda="13.2", gpus=(RTX_5090,), gpu_reason="",
    )  # fmt: skip
    return replace(whole, **changes)


def without(*names: str, how: Found = MISSING) -> Machine:
    whole = machine()
    changed = {name: how for name in names if name in whole.libraries}
    tools = {name: how for name in names if name in whole.tools}
    return replace(whole, libraries=whole.libraries | changed, tools=whole.tools | tools)


def working(found: Machine) -> set[str]:
    made = roads(found)
    assert all(road.detail for road in made)
    assert all(bool(road.fix) != road.works for road in made), "a fix where one is needed"
    return {road.name for road in made if road.works}


def test_this_machine() -> None:
    found = examine()
    assert {"build cpu", "run cpu"} <= working(found)
    assert {name for name, library in found.libraries.items() if library.state == "broken"} == set()


ALL = {road.name for road in roads(machine())}
RTX_BUILDS = {f"build {d.name}" for d in DEVICE_TABLE.values() if d.backend == "tensorrt_rtx"}
DATA_CENTER = {f"build {d.name}" for d in DEVICE_TABLE.values() if d.backend == "tensorrt"}
NO_SERVER = Found("missing", reason="there is no tritonserver", facts={"hint": "install one"})
BROKEN = Found("broken", reason="importing it ended the process with signal 6")


@pytest.mark.parametrize(
    ("found", "lost"),
    [
        (machine(), DATA_CENTER),  # the flavour is there, its GPU is not
        (machine(gpus=(Gpu("H200", (9, 0), 1),)), DATA_CENTER - {"build sm90"}),
        (machine(gpus=(), gpu_reason="there is no NVIDIA driver"), DATA_CENTER | {"run gpu"}),
        (machine(gpus=(Gpu("GTX 1080", (6, 1), 1),)), DATA_CENTER | {"run gpu"}),
        (without("onnxruntime"), DATA_CENTER | {"build cpu", "run cpu"}),
        (without("onnx", how=BROKEN), DATA_CENTER | {"build cpu"}),
        (without("tensorrt_rtx"), DATA_CENTER | RTX_BUILDS | {"run gpu"}),
        (without("cuda.bindings", how=BROKEN), DATA_CENTER | {"run gpu"}),
        (without("cmake"), DATA_CENTER | {"build plugin"}),
        (without("kv plugin", how=Found("missing", reason="there is none")),
         DATA_CENTER | {"kv plugin"}),
        (without("tritonserver", how=NO_SERVER), DATA_CENTER | {"serve triton"}),
        (without("tritonserver", how=BROKEN), DATA_CENTER | {"serve triton"}),
        (machine(extras={"serve": ("uvicorn",)}), DATA_CENTER | {"serve"}),
        (without("helm_python"), DATA_CENTER),
        (without("helm", "helm_python", how=BROKEN), DATA_CENTER | {"chart"}),
        (without("onnxruntime", how=Found("ok", "1.9.1")), DATA_CENTER | {"build cpu", "run cpu"}),
        (without("onnxruntime", how=Found("ok", "banana")), DATA_CENTER | {"build cpu", "run cpu"}),
        (without("onnxruntime", how=Found("ok", "1.99.0.dev3+cu13")), DATA_CENTER),
    ],
)  # fmt: skip
def test_paths_that_do_not_work(found: Machine, lost: set[str]) -> None:
    assert ALL - working(found) == lost


def test_triton_goes_into_an_environment_of_its_own() -> None:
    """It needs NumPy 1: installed beside the rest it would break that."""
    road = next(r for r in roads(without("tritonserver", how=BROKEN)) if r.name == "serve triton")
    assert road.fix == extra_fix("triton")
    assert "environment of its own" in road.fix
    assert "environment" not in extra_fix("serve")


def test_a_broken_library_says_why() -> None:
    road = next(r for r in roads(without("tensorrt_rtx", how=BROKEN)) if r.name == "build sm120")
    assert "signal 6" in road.detail
    assert road.fix == "pip install 'dflash-trt[tensorrt-rtx]'"


@pytest.mark.parametrize(
    ("code", "state", "words"),
    [
        ("raise RuntimeError('numpy is\\n too new')", "broken", "RuntimeError: numpy is too new"),
        ("import nowhere_to_be_found", "broken", "nowhere_to_be_found"),
        ("raise ImportError", "broken", "ImportError"),
        ("import os; os.abort()", "broken", "signal 6"),
        ("import sys; sys.exit(3)", "broken", "SystemExit"),
        ("import os; os._exit(0)", "broken", "exit code 0"),
        ("Builder = 0; print('noise'); print([1])", "broken", "__version__"),
        ("__version__ = '1.0'", "broken", "no Builder"),
        ("Builder = 0; __version__ = (10, 'x'); print('{\"state\": \"no\"}')", "ok", ""),
    ],
)
def test_a_library_that_is_broken(fake: Any, code: str, state: str, words: str) -> None:
    fake("tensorrt_rtx", code)
    found = probe("tensorrt_rtx")
    assert found.state == state
    assert words in found.reason
    assert "\n" not in found.reason


def test_a_library_that_never_returns(fake: Any) -> None:
    fake("tensorrt", "import time; time.sleep(600)")
    assert probe("tensorrt", timeout_s=1.0).reason == "gave no answer within 1 s"


def test_a_python_that_cannot_start(tmp_path: Path) -> None:
    assert probe("onnx", python=str(tmp_path / "python")).state == "broken"


def test_gpus_of_cuda(fake: Any) -> None:
    fake("cuda.bindings", "")
    fake("cuda.bindings.driver", CUDA_DRIVER.replace("INIT", "0"))
    found = examine()
    assert [gpu.capability for gpu in found.gpus] == [(12, 0), (8, 9)]
    assert found.gpus[0].name == "NVIDIA RTX [5090] \u2122"
    assert found.gpus[1].memory_bytes == 24 << 30
    assert found.cuda == "13.2"
    assert "run gpu" in working(found)


def test_a_driver_that_does_not_work(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fake("cuda.bindings", "")
    fake("cuda.bindings.driver", CUDA_DRIVER.replace("INIT", "100"))
    _nvidia_smi(Path(os.environ["PYTHONPATH"]), "exit 9", monkeypatch)
    found = examine()
    assert found.gpus == ()
    assert "CUDA_ERROR_NO_DEVICE" in found.gpu_reason
    assert "run gpu" not in working(found)


def test_gpus_of_nvidia_smi(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fake("cuda", "raise RuntimeError('built for another Python')")
    row = "echo 'NVIDIA H200, 9.0, 143771, 570.86.15'"
    _nvidia_smi(Path(os.environ["PYTHONPATH"]), row, monkeypatch)
    found = examine()
    assert found.gpus == (Gpu("NVIDIA H200", (9, 0), 143771 << 20),)
    assert found.driver == "570.86.15"
    assert found.libraries["cuda.bindings"].state == "broken"
    assert "run gpu" not in working(found)


def _nvidia_smi(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = folder / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_the_server_is_the_one_that_serve_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "tritonserver"
    tool.touch(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert probe("tritonserver") == Found("ok", facts={"path": str(tool)})


TENSORRT_WITH_A_REGISTRY = """
class Builder: pass
class Registry:
    def __init__(self): self.names = []
    def load_library(self, path): self.names += [path]; return HANDLE
    def get_creator(self, *_): return CREATOR if self.names else None
registry = Registry()
def get_plugin_registry(): return registry
"""


def test_the_plugin_is_the_one_that_a_build_takes(
    fake: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "lib.so"
    monkeypatch.setenv("DFLASH_TRT_PLUGIN", str(library))
    fake("tensorrt", "raise ImportError")
    found = probe("kv plugin")
    assert (found.state, str(library) in found.reason) == ("missing", True)
    library.write_bytes(b"\x7fELF")
    found = probe("kv plugin")
    assert (found.state, found.facts) == ("ok", {"path": str(library)})
    assert "there is no tensorrt" in found.reason
    values = {"HANDLE": "1", "CREATOR": "2"}
    for changed, state in (
        ({}, "ok"),
        ({"CREATOR": "None"}, "broken"),
        ({"HANDLE": "None"}, "broken"),
    ):
        code = TENSORRT_WITH_A_REGISTRY
        for name, value in (values | changed).items():
            code = code.replace(name, value)
        fake("tensorrt", code)
        found = probe("kv plugin")
        assert (found.state, str(library) in found.reason) == (state, state == "broken")
    monkeypatch.delenv("DFLASH_TRT_PLUGIN")
    found = probe("kv plugin")
    assert found.state in ("missing", "broken")  # broken: the stand-in refuses what is built here
    road = next(r for r in roads(without("kv plugin", how=found)) if r.name == "kv plugin")
    assert (road.works, "make plugins" in road.fix) == (False, True)
    if found.state == "missing":
        assert "build/plugins/cuda" in road.detail


def test_tools_that_are_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, script in {
        "cmake": "echo no number here", "nvcc": "exit 1", "helm": "printf '\\377 v4.2.3'",
        "c++": None,
    }.items():  # fmt: skip
        tool = tmp_path / name
        tool.write_text(f"#!/bin/sh\n{script}\n" if script else "#!/no/such/shell\n")
        tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    tools = examine().tools
    assert tools["cmake"] == Found("ok", facts={"path": str(tmp_path / "cmake")})
    assert (tools["nvcc"].state, tools["c++"].state) == ("broken", "broken")
    assert tools["helm"].version == "4.2.3"


def _command(*arguments: str) -> subprocess.CompletedProcess[str]:
    code = "from dflash_trt.cli import main; main()"
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)


def test_the_command_where_everything_is_broken(fake: Any) -> None:
    for name in [
        "numpy",
        "onnx",
        "onnxruntime",
        "tokenizers",
        "jinja2",
        "yaml",
        "tensorrt",
        "tensorrt_rtx",
        "cuda",
    ]:
        fake(name, "raise RuntimeError('[bold]broken[/] here')")
    done = _command("doctor")
    assert (done.returncode, done.stderr) == (0, "")
    assert "[bold]broken[/] here" in done.stdout
    figures = json.loads(_command("doctor", "--json").stdout)
    assert figures["libraries"]["onnx"]["reason"] == "RuntimeError: [bold]broken[/] here"
    working = {path["name"] for path in figures["paths"] if path["works"]}
    assert not working & {"build cpu", "run cpu", "build sm120", "run gpu"}
    other = _command("inspect", "engine")
    assert other.returncode == 2
    assert other.stderr.startswith("error: dflash-trt cannot be loaded: RuntimeError: [bold]")
    assert "Traceback" not in other.stderr


def test_the_command_refuses_options_that_it_does_not_have() -> None:
    done = _command("doctor", "--jsn")
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
