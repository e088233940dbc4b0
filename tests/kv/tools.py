"""Programs that tests of `plugins/` run: found in this environment or the system, else a skip."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PLUGINS = ROOT / "plugins"
BIN = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])


def find_tool(name: str) -> str:
    """A program of this environment or of the system."""
    path = shutil.which(name, path=BIN)
    if path is None:
        pytest.skip(f"{name} is not installed: make plugins, or pip install 'dflash-trt[cuda]'")
    return path


def run_tool(command: list[str], cwd: Path = PLUGINS, **env: str) -> str:
    """Standard output of a command that must succeed."""
    environment = {**os.environ, "PATH": BIN, **env}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout
