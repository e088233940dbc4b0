"""`plugins/host/cuda_on_host.h` itself: warps, blocks of threads, clear failures."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kv.tools import PLUGINS, run_tool

PROGRAM = """
#include "cuda_on_host.h"
using cuda_on_host::launch;

__global__ void kernel(int* out) { BODY }

int main() {
    int out[256] = {};
    launch(dim3(GRID), dim3(THREADS), [&] { kernel(out); });
    for (int i = 0; i < 256; ++i) std::printf("%d ", out[i]);
}
"""


@pytest.fixture(scope="session")
def execute(
    build: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., subprocess.CompletedProcess[str]]:
    build("host")  # skips where there is no compiler
    includes = run_tool([sys.executable, "find_cuda.py"]).splitlines()[1].split(";")

    def execute(body: str, threads: int, grid: str = "1") -> subprocess.CompletedProcess[str]:
        folder = tmp_path_factory.mktemp("program")
        program = PROGRAM.replace("BODY", body)
        program = program.replace("THREADS", str(threads)).replace("GRID", grid)
        (folder / "main.cpp").write_text(program)
        flags = [f"-I{PLUGINS}/host", *(f"-isystem{path}" for path in includes)]
        run_tool(["c++", "-std=c++17", "-O0", *flags, "-o", "main", "main.cpp"], cwd=folder)
        return subprocess.run([folder / "main"], capture_output=True, text=True)

    return execute


Execute = Callable[..., subprocess.CompletedProcess[str]]


def numbers(done: subprocess.CompletedProcess[str]) -> list[int]:
    assert done.returncode == 0, done.stderr
    return [int(word) for word in done.stdout.split()]


def test_shuffles(execute: Execute) -> None:
    body = """
        const int i = threadIdx.x;
        const unsigned half = 0xffffu << (i % 32 / 16 * 16);
        int sum = i;
        for (int step = 1; step < 16; step *= 2) sum += __shfl_xor_sync(half, sum, step);
        out[i] = sum * 1000 + __shfl_sync(0xffffffffu, i, 5);
    """
    sums = [sum(range(i // 16 * 16, i // 16 * 16 + 16)) for i in range(64)]
    expected = [1000 * total + i // 32 * 32 + 5 for i, total in enumerate(sums)]
    assert numbers(execute(body, 64))[:64] == expected


def test_shared_memory_and_barriers(execute: Execute) -> None:
    body = """
        __shared__ int line[96];
        for (int round = 0; round < 3; ++round) {
            line[threadIdx.x] = round * 100 + threadIdx.x;
            __syncthreads();
            out[threadIdx.x] += line[95 - threadIdx.x];
            __syncthreads();
        }
    """
    assert numbers(execute(body, 96))[:96] == [300 + 3 * (95 - i) for i in range(96)]


def test_threads_that_returned_do_not_block_a_barrier(execute: Execute) -> None:
    body = "if (threadIdx.x > 40) return; __syncthreads(); out[threadIdx.x] = 1;"
    assert sum(numbers(execute(body, 64))) == 41


def test_indices(execute: Execute) -> None:
    body = """
        const int block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
        out[block * blockDim.x + threadIdx.x] += 1 + block;
    """
    assert numbers(execute(body, 8, "2, 3, 4"))[:192] == [1 + i // 8 for i in range(192)]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("if (threadIdx.x != 3) __syncwarp();", "a collective is not reached by all its threads"),
        ("__shfl_sync(1u << (threadIdx.x % 32), 1, 0);", "a shuffle reads a lane outside its mask"),
        ("__syncwarp(0xfffffffeu);", "a lane calls a collective whose mask leaves it out"),
        ("if (threadIdx.x) __syncwarp(); else __shfl_sync(~0u, 1, 0);", "different collectives"),
    ],
)  # fmt: skip
def test_wrong_collectives_end_the_program(execute: Execute, body: str, message: str) -> None:
    done = execute(body, 32)
    assert done.returncode != 0
    assert message in done.stderr
    assert "in block (0, 0, 0), thread (" in done.stderr
