"""The kernel's CPU build under AddressSanitizer and UBSan, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "kv" / "sanitized.py"


def run_sanitized(library: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    runtimes = [
        subprocess.run(["c++", f"-print-file-name={name}"], capture_output=True, text=True).stdout
        for name in ("libasan.so", "libubsan.so", "libstdc++.so")
    ]
    # Python itself leaks by design, and probes memory with huge allocations.
    options = "detect_leaks=0:allocator_may_return_null=1"
    env = {
        **os.environ,
        "LD_PRELOAD": " ".join(path.strip() for path in runtimes),
        "ASAN_OPTIONS": options,
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
    command = [sys.executable, str(SCRIPT), str(library), *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True)


def test_no_finding(build: Callable[[str], Path]) -> None:
    done = run_sanitized(build("sanitize") / "libkv_inject_host.so")
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == "18 launches, no finding\n"


@pytest.mark.parametrize("buffer", ["context", "cos", "k_norm.1", "cache.3", "committed"])
def test_a_buffer_that_is_too_short_is_found(build: Callable[[str], Path], buffer: str) -> None:
    done = run_sanitized(build("sanitize") / "libkv_inject_host.so", buffer)
    assert done.returncode != 0
    assert "AddressSanitizer: heap-buffer-overflow" in done.stderr
    assert "kv_inject.cuh" in done.stderr
