"""Builds of `plugins/` by its own presets; a test skips, with the reason, where a tool is missing."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kv import interface as kv

ROOT = Path(__file__).parents[2]
PLUGINS = ROOT / "plugins"
BIN = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])


def find_tool(name: str) -> str:
    """A program of this environment or of the system."""
    path = shutil.which(name, path=BIN)
    if path is None:
        pytest.skip(f"{name} is not installed: make plugins, or pip install 'dflash-trt[cuda]'")
    return path


def run(command: list[str], cwd: Path = PLUGINS, **env: str) -> str:
    """Standard output of a command that must succeed."""
    environment = {**os.environ, "PATH": BIN, **env}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="session")
def build() -> Callable[[str], Path]:
    """Configure and build a preset; the folder it was built in."""
    done: dict[str, Path] = {}

    def build(preset: str) -> Path:
        if preset not in done:
            cmake = find_tool("cmake")
            find_tool("ninja")
            find_tool("c++")
            found = subprocess.run(
                [sys.executable, "find_cuda.py"], cwd=PLUGINS, capture_output=True, text=True
            )
            if found.returncode:
                pytest.skip(found.stderr.strip())
            run([cmake, "--preset", preset, f"-DPython3_EXECUTABLE={sys.executable}"])
            run([cmake, "--build", "--preset", preset])
            done[preset] = ROOT / "build" / "plugins" / preset
        return done[preset]

    return build


@pytest.fixture(scope="session")
def kernel(build: Callable[[str], Path]) -> ctypes.CDLL:
    """The kernel's CPU build."""
    return kv.load(build("host") / "libkv_inject_host.so")
