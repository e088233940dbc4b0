"""What the compiler made for GPUs, read from the library's machine code. No GPU is needed."""

from __future__ import annotations

import csv
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kv.tools import PLUGINS, find_tool, run_tool

ARCHITECTURES = {"sm_90a", "sm_100a", "sm_103a", "sm_120a"}
# Of 65536 registers: 8 blocks of 128 threads in a multiprocessor, 32 KB of its loads in flight.
MOST_REGISTERS = 64
Row = dict[str, str]


@pytest.fixture(scope="session")
def library(build: Callable[[str], Path]) -> Path:
    return build("cuda") / "libkv_inject.so"


@pytest.fixture(scope="session")
def table(library: Path) -> str:
    return run_tool([sys.executable, "resources.py", str(library)])


@pytest.fixture(scope="session")
def rows(table: str) -> list[Row]:
    return list(csv.DictReader(table.splitlines()[1:]))


@pytest.fixture(scope="session")
def kernels(rows: list[Row]) -> list[Row]:
    """Those that have a body: SM90 has no NVFP4."""
    return [row for row in rows if (row["arch"], row["quant"]) != ("sm_90a", "nvfp4")]


def count(row: Row, column: str) -> int:
    return int(row[column])


def test_every_kernel_is_there_for_every_architecture(rows: list[Row]) -> None:
    assert {row["arch"] for row in rows} == ARCHITECTURES
    kinds = {(row["type"], row["head_dim"], row["quant"]) for row in rows}
    assert len(kinds) == 2 * 3 * 3
    assert len(rows) == len(ARCHITECTURES) * len(kinds)


def test_no_register_is_spilled(rows: list[Row]) -> None:
    assert {(row["stack"], row["local"]) for row in rows} == {("0", "0")}


def test_registers_are_within_the_budget(kernels: list[Row]) -> None:
    assert max(count(row, "registers") for row in kernels) <= MOST_REGISTERS


def test_bulk_accesses_have_sixteen_bytes(kernels: list[Row]) -> None:
    for row in kernels:
        # Two of the projection; cos, sin and both halves of the norm's weight are two each.
        assert count(row, "load128") == 2 + 8
        # length and committed, and the scale.
        assert count(row, "load_other") == 2 + (row["quant"] != "none")
        stores = tuple(count(row, f"store{size}") for size in (128, 64, 8))
        assert stores == {"none": (2, 0, 0), "fp8": (1, 0, 0), "nvfp4": (0, 1, 1)}[row["quant"]]


def test_conversions_are_done_in_hardware(kernels: list[Row]) -> None:
    for row in kernels:
        assert count(row, "double") == 0
        if row["quant"] == "none":
            assert count(row, row["type"]) == 8
        if row["quant"] == "fp8":
            assert count(row, "e4m3") >= 8
        if row["quant"] == "nvfp4":
            assert count(row, "e2m1") == 8
            assert count(row, "e4m3") >= 2


def test_table_is_up_to_date(table: str) -> None:
    golden = (PLUGINS / "resources.csv").read_text()
    if table.splitlines()[0] != golden.splitlines()[0]:
        pytest.skip(f"the table is of another compiler: {golden.splitlines()[0]}")
    assert table == golden, "plugins/resources.py says how to write plugins/resources.csv anew"


def test_library_exports_its_two_functions_and_needs_no_cuda_library(library: Path) -> None:
    symbols = run_tool([find_tool("nm"), "-D", "--defined-only", str(library)])
    assert re.findall(r" T (\S+)", symbols) == ["dflash_kv_inject", "dflash_kv_inject_check"]
    needed = run_tool([find_tool("readelf"), "-d", str(library)])
    assert "libcuda" not in needed


def test_without_a_compiler_there_is_one_clear_line(tmp_path: Path) -> None:
    """A Python without the wheels, no nvcc on PATH, no toolkit in the usual place."""
    script = PLUGINS.joinpath("find_cuda.py").read_text().replace("/usr/local/cuda/", "/nowhere/")
    (tmp_path / "find_cuda.py").write_text(script)
    command = [sys.executable, "-I", "-S", str(tmp_path / "find_cuda.py")]
    done = subprocess.run(command, env={"PATH": ""}, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert "no CUDA compiler: pip install 'dflash-trt[cuda]'" in done.stderr
    assert "native layers" in done.stderr


def test_a_named_compiler_comes_first(tmp_path: Path) -> None:
    root = tmp_path / "toolkit"
    for folder in ("bin", "include", "lib64"):
        (root / folder).mkdir(parents=True)
    (root / "bin" / "nvcc").touch()
    (root / "include" / "cuda_runtime.h").touch()
    told = run_tool([sys.executable, "find_cuda.py"], CUDACXX=str(root / "bin" / "nvcc"))
    assert told.splitlines() == [str(root / part) for part in ("bin/nvcc", "include", "lib64")]


def test_cmake_without_a_compiler_configures_and_says_so(tmp_path: Path) -> None:
    for name in ("CMakeLists.txt", "CMakePresets.json"):
        (tmp_path / name).write_text((PLUGINS / name).read_text())
    message = "import sys; sys.exit('no CUDA compiler: native layers')\n"
    (tmp_path / "find_cuda.py").write_text(message)
    command = [find_tool("cmake"), "-S", str(tmp_path), "-B", str(tmp_path / "b"), "-G", "Ninja"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "no CUDA compiler: native layers" in done.stderr
    assert "-- Generating done" in done.stdout
