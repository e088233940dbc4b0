"""tests/gpu/kv_inject.py as far as it goes without a GPU."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kv.case import make_arrays
from kv.tools import ROOT

SCRIPT = ROOT / "tests" / "gpu" / "kv_inject.py"
sys.path.insert(0, str(SCRIPT.parent))

import kv_inject  # noqa: E402


def run_script(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def test_its_checks_pass_on_the_cpu_build(build: Callable[[str], Path]) -> None:
    done = run_script("--host", str(build("host") / "libkv_inject_host.so"))
    assert done.returncode == 0, done.stderr
    assert done.stdout == "bits: 144 of 144 launches equal the reference, guard bands too\n"


def test_without_a_gpu_it_says_so(build: Callable[[str], Path]) -> None:
    build("cuda")
    pytest.importorskip("cuda.bindings", exc_type=ImportError)
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        done = run_script()
        assert done.returncode == 2
        assert done.stderr == "there is no GPU here (--host LIBRARY checks the CPU build)\n"
    else:
        pytest.skip("there is a CUDA driver: run the script itself")


@pytest.mark.parametrize("quant", list(kv_inject.QUANTS))
def test_bytes_that_a_launch_must_move(quant: int) -> None:
    case = kv_inject.timed_case(16, quant)
    arrays = make_arrays(case)
    line = sum(a.nbytes for n, a in arrays.items() if n.startswith("cache")) // case.capacity
    read = arrays["context"].nbytes + 16 * 2 * arrays["cos"][0].nbytes
    norm = sum(a.nbytes for n, a in arrays.items() if n.startswith("k_norm"))
    assert kv_inject.minimum_bytes(case) == read + norm + 16 * line
