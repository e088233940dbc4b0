"""Print what each compiled kernel uses, as CSV: registers, stack, instructions by kind.

    python plugins/resources.py build/plugins/cuda/libkv_inject.so > plugins/resources.csv

That file is compared in tests: a change of the kernel shows there what it costs. Needs the
disassembler wheels (extra `cuda`) or cuobjdump on PATH.
"""

from __future__ import annotations

import csv
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from find_cuda import find_nvcc

# Column -> what its instructions look like in SASS.
INSTRUCTIONS = {
    "load128": r"LDG\.E[.\w]*\.128",
    "load_other": r"LDG\.E(?![.\w]*\.128)",
    "store128": r"STG\.E\.128",
    "store64": r"STG\.E\.64",
    "store8": r"STG\.E\.U8",
    "local": r"(?:LDL|STL)\b",
    "double": r"(?:D(?:ADD|MUL|FMA)|F2F\.F64)",
    "shuffle": r"SHFL",
    "e4m3": r"F2FP\.SATFINITE\.E4M3",
    "e2m1": r"F2FP\.SATFINITE\.E2M1",
    "bf16": r"F2FP\.BF16\.F32",
    "fp16": r"F2FP\.F16\.F32",
}
QUANTS = ("none", "fp8", "nvfp4")
NAME = re.compile(r"kv_injectI(?:13__nv_(bfloat16)|6__(half))Li(\d+)EL13DflashKvQuant(\d)E")
FIELDS = ["arch", "type", "head_dim", "quant", "registers", "stack", "instructions", *INSTRUCTIONS]


def find_cuobjdump() -> str:
    """The disassembler: beside this Python's other CUDA wheels, or on PATH."""
    try:
        from cuda.pathfinder import find_nvidia_binary_utility
    except ImportError:
        found = None
    else:
        found = find_nvidia_binary_utility("cuobjdump")
    found = found or shutil.which("cuobjdump")
    if found is None:
        sys.exit("cuobjdump is not installed: pip install 'dflash-trt[cuda]'")
    return found


def identity(function: str) -> tuple[str, str, str]:
    """type, head_dim, quant of a mangled kernel name."""
    match = NAME.search(function)
    if match is None:
        raise ValueError(f"unknown kernel {function}")
    bfloat16, _, head_dim, quant = match.groups()
    return ("bf16" if bfloat16 else "fp16"), head_dim, QUANTS[int(quant)]


def sections(text: str) -> Iterator[tuple[str, str, str]]:
    """(arch, function, text) of each kernel in cuobjdump's output."""
    for of_arch in re.split(r"^arch = ", text, flags=re.MULTILINE)[1:]:
        arch = of_arch.split(maxsplit=1)[0]
        for of_function in re.split(r"^\s+Function\s*:?\s*", of_arch, flags=re.MULTILINE)[1:]:
            function = of_function.split(maxsplit=1)[0].rstrip(":")
            if "kv_inject" in function:
                yield arch, function, of_function


def resources(library: Path) -> list[dict[str, str]]:
    """One row for each architecture and kernel."""
    tool = find_cuobjdump()

    def dump(flag: str) -> str:
        command = [tool, flag, str(library)]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    used = {}
    for arch, function, text in sections(dump("--dump-resource-usage")):
        registers, stack = (re.search(rf"{word}:(\d+)", text) for word in ("REG", "STACK"))
        used[arch, function] = {"registers": registers[1], "stack": stack[1]}
    rows = []
    for arch, function, text in sections(dump("-sass")):
        code = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(.*?);", text, re.MULTILINE)
        rows.append(
            {
                "arch": arch,
                **dict(zip(("type", "head_dim", "quant"), identity(function), strict=True)),
                **used[arch, function],
                "instructions": str(sum(not line.startswith("NOP") for line in code)),
                **{
                    k: str(sum(bool(re.search(p, c)) for c in code))
                    for k, p in INSTRUCTIONS.items()
                },
            }
        )
    return sorted(rows, key=lambda r: (r["arch"], r["type"], int(r["head_dim"]), r["quant"]))


def compiler() -> str:
    """Version of the compiler, as in `13.0.88`."""
    nvcc = find_nvcc()
    if nvcc is None:
        sys.exit("no CUDA compiler")
    told = subprocess.run([nvcc, "--version"], check=True, capture_output=True, text=True).stdout
    return re.search(r"V(\d+\.\d+\.\d+)", told)[1]


def main() -> None:
    """Print the table."""
    sys.stdout.write(f"# nvcc {compiler()}; written by plugins/resources.py\n")
    writer = csv.DictWriter(sys.stdout, FIELDS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(resources(Path(sys.argv[1])))


if __name__ == "__main__":
    main()
