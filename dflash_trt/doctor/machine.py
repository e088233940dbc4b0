"""What this machine has: libraries, GPUs, tools, extras. Survives whatever is broken here."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any, Literal

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion

from dflash_trt.doctor.probes import PROBES

TIMEOUT_S = 30.0  # a driver that hangs must not hang us; importing a library takes a second
DISTRIBUTION = "dflash-trt"
DEVELOPER_EXTRAS = ("demo", "lint", "test")
#: Programs that some path needs, and how they tell their version.
TOOLS = {
    "nvcc": "--version",
    "cmake": "--version",
    "c++": "--version",
    "helm": "version",
}
_NUMBER = re.compile(r"\d+(?:\.\d+)+")  # 13.0, 3.25.1

State = Literal["ok", "missing", "broken"]


@dataclass(frozen=True)
class Found:
    """One thing: whether it is here and works, its version, else the reason."""

    state: State
    version: str = ""
    reason: str = ""
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def is_ok(self) -> bool:
        """Whether it is here and works."""
        return self.state == "ok"


@dataclass(frozen=True)
class Gpu:
    """One NVIDIA GPU that CUDA sees."""

    name: str
    capability: tuple[int, int]
    memory_bytes: int


@dataclass(frozen=True)
class Machine:
    """Everything that was looked for. `libraries` and `tools` have an entry for each."""

    libraries: dict[str, Found]
    tools: dict[str, Found]
    extras: dict[str, tuple[str, ...]]  # extra -> distributions of it that are not installed
    driver: str | None
    cuda: str | None  # what the driver can run at most
    gpus: tuple[Gpu, ...]
    gpu_reason: str  # why there are none


def examine(python: str = sys.executable, timeout_s: float = TIMEOUT_S) -> Machine:
    """Look at this machine. Raises nothing that a broken library or driver could cause."""
    with ThreadPoolExecutor() as pool:
        asked = {name: pool.submit(probe, name, python, timeout_s) for name in PROBES}
        programs = {name: pool.submit(_tool, name, flag) for name, flag in TOOLS.items()}
        found = {name: answer.result() for name, answer in asked.items()}
        tools = {name: answer.result() for name, answer in programs.items()}
    gpus = found.pop("gpus")
    return Machine(
        libraries=found,
        tools=tools,
        extras=_extras(),
        driver=gpus.facts.get("driver"),
        cuda=gpus.facts.get("cuda"),
        gpus=_gpus(gpus),
        gpu_reason=gpus.reason,
    )


def probe(name: str, python: str = sys.executable, timeout_s: float = TIMEOUT_S) -> Found:
    """Ask for one thing of `PROBES`, in a process of its own."""
    command = [python, "-m", "dflash_trt.doctor.probes", name]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=timeout_s,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return Found("broken", reason=f"gave no answer within {timeout_s:g} s")
    except OSError as error:
        return Found("broken", reason=f"no process could be started: {error}")
    answer = _last_object(done.stdout)
    if answer is None:
        code = done.returncode
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        return Found("broken", reason=f"importing it ended the process with {how}")
    state: State = answer.pop("state") if answer.get("state") in ("ok", "missing") else "broken"
    version, reason = str(answer.pop("version", "")), str(answer.pop("reason", ""))
    return Found(state, version, reason, answer)


def _last_object(output: str) -> dict[str, Any] | None:
    """The answer of a probe: libraries may print whatever they like before it."""
    for line in reversed(output.splitlines()):
        try:
            answer = json.loads(line)
        except ValueError:
            continue
        if isinstance(answer, dict):
            return answer
    return None


def _gpus(found: Found) -> tuple[Gpu, ...]:
    return tuple(
        Gpu(gpu["name"], (gpu["capability"][0], gpu["capability"][1]), gpu["memory_bytes"])
        for gpu in found.facts.get("gpus", ())
    )


def _tool(name: str, flag: str) -> Found:
    path = _nvcc() if name == "nvcc" else shutil.which(name)
    if path is None:
        return Found("missing", reason="it is not on PATH")
    try:
        done = subprocess.run(
            [path, flag], capture_output=True, text=True, errors="replace", timeout=TIMEOUT_S,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return Found("broken", reason=str(error), facts={"path": path})
    if done.returncode != 0:
        reason = f"{path} {flag} ends with exit code {done.returncode}"
        return Found("broken", reason=reason, facts={"path": path})
    numbers = _NUMBER.findall(done.stdout)
    version = max(numbers, key=lambda number: number.count("."), default="")  # nvcc's last is whole
    return Found("ok", version, facts={"path": path})


def _nvcc() -> str | None:
    """The compiler on PATH, else that of the wheels from a package index."""
    path = shutil.which("nvcc")
    if path is not None:
        return path
    try:
        import cuda.pathfinder

        found: str | None = cuda.pathfinder.find_nvidia_binary_utility("nvcc")
    except Exception:  # not installed, or of another version: then it finds nothing
        return None
    return found


def _extras() -> dict[str, tuple[str, ...]]:
    """What is not installed of each optional extra, as the package's own metadata lists them."""
    try:
        own = metadata.distribution(DISTRIBUTION)
        names = own.metadata.get_all("Provides-Extra") or []
    except Exception:  # not installed as a distribution, or with metadata that cannot be read
        return {}
    return {
        name: tuple(str(r.name) for r in _requirements(name) if not _is_met(r))
        for name in names
        if name not in DEVELOPER_EXTRAS
    }


def _requirements(extra: str = "") -> list[Requirement]:
    """What the package asks for: always, or for one of its extras."""
    try:
        parsed = [Requirement(text) for text in metadata.requires(DISTRIBUTION) or []]
    except Exception:  # as above, or a requirement that cannot be read
        return []
    if not extra:
        return [r for r in parsed if r.marker is None]
    return [
        r
        for r in parsed
        if r.marker is not None
        and r.marker.evaluate({"extra": extra})
        and not r.marker.evaluate({"extra": ""})
    ]


def _is_met(requirement: Requirement) -> bool:
    try:
        return requirement.specifier.contains(metadata.version(requirement.name), prereleases=True)
    except Exception:  # not there, or of a version that is none
        return False


def too_old(distribution: str, version: str) -> str:
    """What the package asks of a distribution, if this version is not that; else nothing."""
    for requirement in _requirements():
        if canonicalize_name(requirement.name) == distribution:
            try:
                fits = requirement.specifier.contains(version, prereleases=True)
            except InvalidVersion:
                fits = False
            return "" if fits else str(requirement.specifier)
    return ""
