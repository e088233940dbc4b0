"""Builds of `plugins/` by its presets; where a tool is missing a test skips, and says so."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kv import interface as kv
from kv.tools import PLUGINS, ROOT, find_tool, run_tool


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
            run_tool([cmake, "--preset", preset, f"-DPython3_EXECUTABLE={sys.executable}"])
            run_tool([cmake, "--build", "--preset", preset])
            done[preset] = ROOT / "build" / "plugins" / preset
        return done[preset]

    return build


@pytest.fixture(scope="session")
def kernel(build: Callable[[str], Path]) -> ctypes.CDLL:
    """The kernel's CPU build."""
    return kv.load(build("host") / "libkv_inject_host.so")
