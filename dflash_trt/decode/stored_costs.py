"""Measured step costs, kept in the engine directory: the next start needs no measuring.

A convenience and nothing more: a file that is missing, damaged, of another machine, or cannot be
written changes how long a start takes, never what it does.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import dflash_trt
from dflash_trt import swap
from dflash_trt.decode.costs import StepCosts
from dflash_trt.engine_dir import EngineDir, read_extra
from dflash_trt.errors import ConfigError

STORED_AS = "step_costs.json"  # not in the manifest: readers ignore what it does not list
CPU_INFO = Path("/proc/cpuinfo")
BACKENDS = ("onnxruntime", "tensorrt", "tensorrt-rtx")
GPU_INFO = Path("/proc/driver/nvidia/gpus")


@dataclass(frozen=True)
class StoredCosts:
    """A file with one table, and what must not have changed since it was measured."""

    file: Path
    key: Mapping[str, object]

    @classmethod
    def of(cls, engine: EngineDir, threads: int) -> StoredCosts:
        """The file of an engine directory, for this machine and so many threads."""
        return cls(engine.path / STORED_AS, {
            "processors": _processors(),
            "threads": threads,
            "dflash_trt": dflash_trt.__version__,
            "backends": {name: _version(name) for name in BACKENDS},
            "engine": {name: entry["sha256"] for name, entry in engine.manifest["files"].items()},
        })  # fmt: skip

    def read(self, widths: tuple[int, ...], num_slots: int) -> StepCosts | None:
        """The table, if it has these widths and at least so many slots, measured here."""
        data = read_extra(self.file)
        if data is None or data.get("key") != self.key:
            return None
        try:
            costs = StepCosts.from_json(data.get("costs"))
        except ConfigError:
            return None
        return costs if costs.widths == widths and costs.slots[-1] >= num_slots else None

    def write(self, costs: StepCosts) -> None:
        """Keep a table in place of what is there, whole or not at all."""
        content = json.dumps({"key": dict(self.key), "costs": costs.to_json()}, indent=1) + "\n"
        with contextlib.suppress(OSError):  # a folder that is read-only or full
            swap.write_file(self.file, content.encode())


def _processors() -> list[str]:
    """Names of the CPU and of the GPUs, as the kernel and the driver tell them."""
    names = set()
    for file, field in ((CPU_INFO, "model name"), *((f, "Model") for f in _gpu_files())):
        with contextlib.suppress(OSError):
            lines = [line.partition(":") for line in file.read_text().splitlines()]
            names |= {value.strip() for name, _, value in lines if name.strip() == field}
    return sorted(names)


def _gpu_files() -> list[Path]:
    return sorted(GPU_INFO.glob("*/information"))


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
