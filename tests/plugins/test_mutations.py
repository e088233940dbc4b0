"""Wrong kernels: each must differ from the reference, or the other tests prove little."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest

from kv import interface as kv
from kv import reference
from kv.case import Case, arena_of, make_arrays, run
from kv.tools import PLUGINS, run_tool

pytestmark = pytest.mark.slow

MUTATIONS = {
    "rotation turns the other way": (
        "__fsub_rn(__fmul_rn(low, c[i]), __fmul_rn(high, s[i]))",
        "__fadd_rn(__fmul_rn(low, c[i]), __fmul_rn(high, s[i]))",
    ),
    "a rejected row is written": ("in_context = row < committed", "in_context = row <= committed"),
    "square root in double precision": (
        "__fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(mean, eps)))",
        "float(1.0 / std::sqrt(double(mean) + double(eps)))",
    ),
    "contracted to FMA": (
        "__fadd_rn(__fmul_rn(high, c[i]), __fmul_rn(low, s[i]))",
        "std::fma(high, c[i], __fmul_rn(low, s[i]))",
    ),
    "sum over half of the lanes": ("step < D / 16; step *= 2", "step < D / 32; step *= 2"),
    "position without the row": ("int64_t(p.length[slot]) + row", "int64_t(p.length[slot])"),
    "fp8 neighbours not in order": (
        "make_uint4(a.x, b.x, a.y, b.y)",
        "make_uint4(a.x, a.y, b.x, b.y)",
    ),
    "block scale of one lane": ("__shfl_xor_sync(kAllLanes, result, 1)", "result"),
    "values are normed too": ("is_key = pair % 2 == 0", "is_key = true"),
    "keys without norm": ("if (weight) rms_norm", "if (false) rms_norm"),
    "the last line is not guarded": ("live = wanted <= last", "live = wanted < last"),
}


def wrong_bytes(library: Path) -> int:
    loaded = kv.load(library)
    cases = [
        Case(quant=quant, head_dim=head_dim, heads=3)
        for quant, head_dim in product((kv.NONE, kv.FP8, kv.NVFP4), (64, 128))
    ]
    # Differences in the last bit of float32 show in few elements of a 16-bit type.
    cases.append(Case(type=kv.FP16, layers=6, heads=8, context_rows=20, committed=(20, 20)))
    for case in cases:
        computed, expected = arena_of(make_arrays(case)), arena_of(make_arrays(case))
        assert run(loaded, case, computed.address) == kv.SUCCESS
        reference.inject(case, expected.views)
        if wrong := int((computed.memory != expected.memory).sum()):
            return wrong
    return 0


def compile_copy(folder: Path, source: str, tmp_path: Path) -> Path:
    """A library of a changed kernel, compiled quickly, as the preset `host` compiles it."""
    commands = json.loads((folder / "compile_commands.json").read_text())
    entry = next(e for e in commands if e["file"].endswith("kv_inject_host.cpp"))
    words = shlex.split(entry["command"])
    kept = words[: words.index("-o")]
    flags = [w.replace("-O3", "-O0") for w in kept if not w.startswith(f"-I{PLUGINS}/src")]
    (tmp_path / "kv_inject.cuh").write_text(source)
    for name in ("kv_inject.cu", "kv_inject.h"):
        (tmp_path / name).write_text((PLUGINS / "src" / name).read_text())
    library = tmp_path / "mutant.so"
    run_tool([*flags, f"-I{tmp_path}", "-shared", "-x", "c++", "-o", str(library),
                 str(tmp_path / "kv_inject.cu")], cwd=folder)  # fmt: skip
    return library


@pytest.mark.parametrize("name", [None, *MUTATIONS])
def test_mutation(name: str | None, build: Callable[[str], Path], tmp_path: Path) -> None:
    source = (PLUGINS / "src" / "kv_inject.cuh").read_text()
    if name is not None:
        right, wrong = MUTATIONS[name]
        assert source.count(right) == 1
        source = source.replace(right, wrong)
    library = compile_copy(build("host"), source, tmp_path)
    assert (wrong_bytes(library) > 0) == (name is not None)
