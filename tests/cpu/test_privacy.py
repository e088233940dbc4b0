"""What the libraries below do beside their work: nothing that leaves a trace of the user."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tiny import TinyEngine

LOAD = """
import pathlib, sys
from dflash_trt.decode.engine import Engine
Engine.load(pathlib.Path(sys.argv[1]))
"""


def test_onnx_runtime_reports_nothing_to_its_maker(engine: TinyEngine, tmp_path: Path) -> None:
    """Its telemetry queues events under the home folder, where a new one stays empty here."""
    kept = {k: v for k, v in os.environ.items() if k not in ("ORT_DISABLE_TELEMETRY",)}
    environment = kept | {"HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    subprocess.run(
        [sys.executable, "-c", LOAD, str(engine.directory.path)], env=environment, check=True
    )
    assert [
        p for p in tmp_path.rglob("*") if "onnxruntime" in p.name or "Microsoft" in p.name
    ] == []
