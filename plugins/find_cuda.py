"""Find a CUDA compiler and print, one a line: nvcc, include folders (with ;), library folder.

Order: $CUDACXX, then what cuda-pathfinder finds (wheels of this Python, conda, $CUDA_HOME), then
nvcc on PATH, then /usr/local/cuda. Exits 1 with one line when there is none.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

HEADER = "include/cuda_runtime.h"
MISSING = (
    "no CUDA compiler: pip install 'dflash-trt[cuda]', or put nvcc on PATH, or set CUDACXX. "
    "Without it the plugin is left out and TensorRT engines use native layers"
)


def candidates() -> Iterator[str | None]:
    """Possible paths of nvcc, best first."""
    yield os.environ.get("CUDACXX")
    try:
        from cuda.pathfinder import find_nvidia_binary_utility
    except ImportError:
        pass
    else:
        yield find_nvidia_binary_utility("nvcc")
    yield shutil.which("nvcc")
    yield "/usr/local/cuda/bin/nvcc"


def find_nvcc() -> Path | None:
    """The first candidate with its headers beside it, links followed: a wrapper has none."""
    found = (Path(path).resolve() for path in candidates() if path and Path(path).is_file())
    return next((nvcc for nvcc in found if (_root(nvcc) / HEADER).is_file()), None)


def _root(nvcc: Path) -> Path:
    return nvcc.parent.parent


def main() -> int:
    """Print where things are."""
    nvcc = find_nvcc()
    if nvcc is None:
        sys.stderr.write(MISSING + "\n")
        return 1
    root = _root(nvcc)
    # Wheels keep CCCL beside the other headers and libraries in lib; toolkits use lib64.
    includes = [str(p) for p in (root / "include", root / "include/cccl") if p.is_dir()]
    libraries = next((p for p in (root / "lib64", root / "lib") if p.is_dir()), root)
    sys.stdout.write("\n".join([str(nvcc), ";".join(includes), str(libraries)]) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
