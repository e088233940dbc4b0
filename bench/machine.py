"""What every report says of the machine and the code it was made with."""

from __future__ import annotations

import os
import platform
import subprocess
from typing import Any

import numpy as np
import onnxruntime

from dflash_trt.runtime.threads import cpu_allowance


def machine() -> dict[str, Any]:
    """Processor, threads, load, versions, commit."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return {
        "cpu": platform.processor() or platform.machine(),
        "threads": cpu_allowance(),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "numpy": np.__version__,
        "onnxruntime": onnxruntime.__version__,
        "commit": commit.stdout.strip(),
    }
