"""The KV-injection kernel on a GPU: bits, sanitizers, bandwidth, and speed against separate ops.

    make plugins && .venv/bin/python tests/gpu/kv_inject.py      # a GPU; under 5 minutes
    .venv/bin/python tests/gpu/kv_inject.py --host LIBRARY       # the same checks on the CPU build

Prints tables; exits 1 if a byte differs or a sanitizer finds something, 2 without a GPU. PyTorch
with CUDA is used for the separate ops if it is installed, compute-sanitizer if it is on PATH.
"""

from __future__ import annotations

import argparse
import ctypes
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from kv import interface as kv
from kv import reference
from kv.case import Arena, Case, arena_of, make_arrays, make_launch

LIBRARY = Path(__file__).parents[2] / "build" / "plugins" / "cuda" / "libkv_inject.so"
QUANTS = {kv.NONE: "none", kv.FP8: "fp8", kv.NVFP4: "nvfp4"}
SHAPE = Case(layers=5, heads=8, head_dim=128, block_rows=0)  # the drafter of Qwen3-8B
COLD_BYTES = 1 << 30  # launches rotate over so much memory that no cache holds it
REPEATS = 40


class Host:
    """Runs launches on the CPU build: device memory is the host's."""

    has_nvfp4 = True

    def __init__(self, library: Path) -> None:
        self.kernels = kv.load(library)

    def launch(self, case: Case, arena: Arena) -> None:
        """Launch in place on the arena."""
        launch = make_launch(case, arena.address)
        assert self.kernels.dflash_kv_inject(ctypes.byref(launch), None) == kv.SUCCESS


class Gpu:
    """Runs launches on the current GPU, through cuda-bindings."""

    def __init__(self, library: Path) -> None:
        try:
            from cuda.bindings import runtime
        except ImportError:
            sys.exit("cuda-bindings is not installed: pip install 'dflash-trt[tensorrt]'")
        self.rt: Any = runtime
        status, count = runtime.cudaGetDeviceCount()
        if status != runtime.cudaError_t.cudaSuccess or not count:
            sys.stderr.write("there is no GPU here (--host LIBRARY checks the CPU build)\n")
            sys.exit(2)
        self.kernels = kv.load(library)
        properties = self.call(runtime.cudaGetDeviceProperties(0))
        self.name = properties.name.decode()
        self.capability = (properties.major, properties.minor)
        self.has_nvfp4 = properties.major >= 10
        self.held: list[int] = []

    def call(self, result: tuple[Any, ...]) -> Any:
        """The value of a runtime call that must succeed."""
        status, *values = result
        if status != self.rt.cudaError_t.cudaSuccess:
            raise SystemExit(f"CUDA: {status.name}")
        return values[0] if values else None

    def allocate(self, num_bytes: int) -> int:
        """Device memory, until `free_all`."""
        self.held.append(int(self.call(self.rt.cudaMalloc(num_bytes))))
        return self.held[-1]

    def free_all(self) -> None:
        """Give all device memory back."""
        while self.held:
            self.call(self.rt.cudaFree(self.held.pop()))

    def upload(self, memory: np.ndarray, address: int) -> None:
        """Host bytes to the device."""
        kind = self.rt.cudaMemcpyKind.cudaMemcpyHostToDevice
        self.call(self.rt.cudaMemcpy(address, memory.ctypes.data, memory.nbytes, kind))

    def launch(self, case: Case, arena: Arena) -> None:
        """Launch on a copy of the whole arena, guard bands too, and bring it back."""
        device = self.allocate(arena.memory.nbytes)
        self.upload(arena.memory, device)
        moved = {name: device + at - arena.memory.ctypes.data for name, at in arena.address.items()}
        launch = make_launch(case, moved)
        assert self.kernels.dflash_kv_inject(ctypes.byref(launch), None) == kv.SUCCESS
        self.call(self.rt.cudaDeviceSynchronize())
        kind = self.rt.cudaMemcpyKind.cudaMemcpyDeviceToHost
        size = arena.memory.nbytes
        self.call(self.rt.cudaMemcpy(arena.memory.ctypes.data, device, size, kind))
        self.free_all()

    def seconds(self, launches: Sequence[Callable[[], None]]) -> float:
        """Best of three: mean time of one of `launches`, which run in turn, after a warm-up."""
        start, end = (self.call(self.rt.cudaEventCreate()) for _ in range(2))
        best = float("inf")
        for _ in range(4):
            self.call(self.rt.cudaEventRecord(start, 0))
            for i in range(REPEATS):
                launches[i % len(launches)]()
            self.call(self.rt.cudaEventRecord(end, 0))
            self.call(self.rt.cudaEventSynchronize(end))
            elapsed = self.call(self.rt.cudaEventElapsedTime(start, end))
            best = min(best, elapsed / 1e3 / REPEATS)
        self.free_all()
        return best


def check_bits(device: Host | Gpu) -> int:
    """Launches whose memory differs from the reference; prints a line for each and a summary."""
    kinds = product((kv.BF16, kv.FP16), (64, 128, 256), QUANTS, (False, True))
    wrong, total = 0, 0
    for type_, head_dim, quant, ring in kinds:
        if quant == kv.NVFP4 and not device.has_nvfp4:
            continue
        for values in ("normal", "large", "tiny", "special"):
            case = Case(
                type=type_, head_dim=head_dim, quant=quant, ring=ring, values=values, heads=3,
                capacity=12 if ring else 24, length=(0, 5, 17), committed=(6, 2, 0),
            )  # fmt: skip
            computed, expected = arena_of(make_arrays(case)), arena_of(make_arrays(case))
            device.launch(case, computed)
            reference.inject(case, expected.views)
            differing = int((computed.memory != expected.memory).sum())
            total += 1
            if differing:
                wrong += 1
                print(f"  {differing} bytes differ: {case}")
    print(f"bits: {total - wrong} of {total} launches equal the reference, guard bands too")
    return wrong


def minimum_bytes(case: Case) -> int:
    """What a launch must move: each committed input once, each output once, tables once."""
    elements = sum(case.committed) * 2 * case.layers * case.heads * case.head_dim
    written = {kv.NONE: 2.0, kv.FP8: 1.0, kv.NVFP4: 0.5 + 1 / 16}[case.quant]
    tables = sum(case.committed) * case.head_dim * 4 + case.layers * case.head_dim * 4
    return int(elements * (2 + written)) + tables


def timed_case(tokens: int, quant: int) -> Case:
    """`tokens` tokens in slots of 16, as a decode step has them, all committed."""
    rows = min(tokens, 16)
    slots = tokens // rows
    return replace(SHAPE, quant=quant, context_rows=rows, length=(64,) * slots,
                   committed=(rows,) * slots, capacity=128, positions=128)  # fmt: skip


def time_case(gpu: Gpu, case: Case) -> float:
    """Seconds of one launch on memory that is in no cache."""
    arrays = make_arrays(replace(case, length=case.length[:1], committed=case.committed[:1]))
    for name in ("length", "committed"):
        arrays[name] = np.array(getattr(case, name), np.int32)
    scaled = {"context", "block"} | {name for name in arrays if name.startswith("cache")}
    sizes = {n: a.nbytes * (case.slots if n in scaled else 1) for n, a in arrays.items()}
    padded = {name: -(-max(size, 1) // 256) * 256 for name, size in sizes.items()}
    copies = max(2, min(64, COLD_BYTES // sum(padded.values())))

    def one_launch() -> Callable[[], None]:
        address = {}
        for name, array in arrays.items():
            address[name] = gpu.allocate(padded[name])
            for i in range(case.slots if name in scaled else 1):
                if array.nbytes:
                    gpu.upload(np.ascontiguousarray(array), address[name] + i * array.nbytes)
        launch = make_launch(case, address)
        return lambda: check(gpu.kernels.dflash_kv_inject(ctypes.byref(launch), None))

    return gpu.seconds([one_launch() for _ in range(copies)])


def check(status: int) -> None:
    """A launch must succeed."""
    if status != kv.SUCCESS:
        raise SystemExit(f"launch failed with CUDA error {status}")


def copy_seconds(gpu: Gpu, num_bytes: int) -> float:
    """Seconds of a device copy that moves (reads and writes) `num_bytes` in all."""
    half = num_bytes // 2
    copies = max(2, min(64, COLD_BYTES // num_bytes))
    pairs = [(gpu.allocate(half), gpu.allocate(half)) for _ in range(copies)]
    kind = gpu.rt.cudaMemcpyKind.cudaMemcpyDeviceToDevice

    def copy(to: int, source: int) -> Callable[[], None]:
        return lambda: gpu.call(gpu.rt.cudaMemcpyAsync(to, source, half, kind, 0))

    return gpu.seconds([copy(*pair) for pair in pairs])


def separate_seconds(gpu: Gpu, case: Case) -> float | None:
    """The same work op by op in PyTorch: gather, norm, rotate, write, for each layer."""
    try:
        import torch
    except ImportError:
        return None
    if not torch.cuda.is_available() or case.quant != kv.NONE:
        return None
    slots, rows, heads, dim = case.slots, case.context_rows, case.heads, case.head_dim
    kind = {"device": "cuda", "dtype": torch.bfloat16}
    pairs = range(2 * case.layers)
    flat = [torch.randn(slots, rows, heads * dim, **kind) for _ in pairs]
    caches = [torch.zeros(slots, heads, case.capacity, dim, **kind) for _ in pairs]
    source = torch.arange(rows, device="cuda").expand(slots, rows)[..., None]
    places = torch.arange(64, 64 + rows, device="cuda")
    cos, sin = (torch.randn(1, 1, rows, dim // 2, **kind) for _ in range(2))
    weight = torch.randn(dim, **kind)

    def step() -> None:
        for pair in pairs:
            x = torch.gather(flat[pair], 1, source.expand(-1, -1, heads * dim))
            x = x.view(slots, rows, heads, dim)
            if pair % 2 == 0:
                x = torch.nn.functional.rms_norm(x, (dim,), weight, case.eps)
            x = x.transpose(1, 2)
            if pair % 2 == 0:
                low, high = x.chunk(2, -1)
                x = torch.cat([low * cos - high * sin, high * cos + low * sin], -1)
            caches[pair].index_copy_(2, places, x)

    stream = torch.cuda.ExternalStream(0)
    with torch.cuda.stream(stream):
        return gpu.seconds([step])


def time_all(gpu: Gpu) -> None:
    """Print achieved bandwidth against a device copy of as many bytes."""
    print("\ntokens  cache    MB moved   us     GB/s   copy GB/s   share   op by op, us")
    for tokens, quant in product((16, 64, 512, 2048, 8192), QUANTS):
        if quant == kv.NVFP4 and not gpu.has_nvfp4:
            continue
        case = timed_case(tokens, quant)
        moved = minimum_bytes(case)
        ours, copy = time_case(gpu, case), copy_seconds(gpu, moved)
        other = separate_seconds(gpu, case)
        print(
            f"{tokens:6}  {QUANTS[quant]:7}{moved / 1e6:9.2f} {ours * 1e6:7.1f} "
            f"{moved / ours / 1e9:8.0f} {moved / copy / 1e9:10.0f} {copy / ours:8.0%}   "
            + ("-" if other is None else f"{other * 1e6:.1f}")
        )


def sanitize() -> int:
    """Tools of compute-sanitizer that find something in the checks of bits."""
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        print("compute-sanitizer: not on PATH, left out")
        return 0
    wrong = 0
    for name in ("memcheck", "racecheck", "initcheck", "synccheck"):
        command = [tool, "--tool", name, "--error-exitcode", "3", sys.executable, __file__]
        try:
            done = subprocess.run([*command, "--bits"], capture_output=True, text=True, timeout=100)
        except subprocess.TimeoutExpired:
            print(f"compute-sanitizer {name}: not done in 100 s, left out")
            continue
        wrong += done.returncode != 0
        print(
            f"compute-sanitizer {name}: {'clean' if done.returncode == 0 else done.stdout[-500:]}"
        )
    return wrong


def main() -> int:
    """Run all parts, or those asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--host", type=Path, help="a CPU build: compare its bits alone")
    parser.add_argument("--bits", action="store_true", help="compare bits alone")
    options = parser.parse_args()
    if options.host:
        return min(1, check_bits(Host(options.host)))
    if not LIBRARY.is_file():
        sys.exit(f"{LIBRARY} is not built: make plugins")
    gpu = Gpu(LIBRARY)
    print(f"{gpu.name}, compute capability {gpu.capability[0]}.{gpu.capability[1]}")
    wrong = check_bits(gpu)
    if not options.bits:
        time_all(gpu)
        wrong += sanitize()
    return min(1, wrong)


if __name__ == "__main__":
    sys.exit(main())
