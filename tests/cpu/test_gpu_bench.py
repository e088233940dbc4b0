"""`bench/gpu.py` where there is no GPU: its measures on the stand-in, and what it says without."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from dflash_trt.decode.engine import Engine
from dflash_trt.runtime.trt import TrtSession
from tiny import TinyEngine
from tiny.fake_gpu import FakeCuda, FakeEngine, OnnxStep, engine_tensors

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture
def gpu_bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCH))
    import gpu

    return gpu


def test_all_measures(
    gpu_bench: Any, trained_engine: TinyEngine, prompts: list[list[int]],
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    def open_engine(max_graphs: int) -> Engine:
        limits, cuda = trained_engine.limits(), FakeCuda()
        engine = FakeEngine(
            cuda, engine_tensors(trained_engine.facts, limits),
            OnnxStep(trained_engine.directory.model, limits.block),
        )  # fmt: skip
        session = TrtSession(engine, cuda, trained_engine.facts, limits, max_graphs)
        return trained_engine.engine(session)

    found = gpu_bench.measure(
        trained_engine.engine(), open_engine, prompts[:3], time.perf_counter() + 60,
        widths=(1, 6), tokens=12,
    )  # fmt: skip
    assert found["not_run"] == []
    assert found["equality"] == {
        "prompts": 3, "tokens_each": 12, "same": 3, "largest_margin_at_difference": 0.0
    }  # fmt: skip
    assert found["graphs_change_nothing"] == {"prompts": 3, "same": 3}
    assert found["lossless"]["same"] == 3
    assert found["lossless"]["acceptance_length"] > 1.2
    for name in ("steps_with_graphs", "steps_without"):
        assert [(row["slots"], row["width"]) for row in found[name]] == [(1, 1), (1, 6)]
        assert all(0 < row["ms"] < math.inf for row in found[name])
    assert [row["width"] for row in found["speed_with_graphs"]] == [1, 6]
    assert found["throughput"]["tokens_per_s"] > 0
    assert found["graphs"] > 0
    gpu_bench.show("fp32", found)
    assert "largest_margin_at_difference" in capsys.readouterr().out.replace("\n", "")


def test_a_difference_is_judged_by_the_cpus_margin(
    gpu_bench: Any, trained_engine: TinyEngine, engine: TinyEngine, prompts: list[list[int]]
) -> None:
    cpu, other = trained_engine.engine(), engine.engine()  # another pair: another text
    found = gpu_bench.measures.equality(cpu, other, prompts[:2], 8)
    assert found["same"] == 0
    assert found["largest_margin_at_difference"] > 0


def test_parts_without_time_are_named(
    gpu_bench: Any, trained_engine: TinyEngine, prompts: list[list[int]]
) -> None:
    made = trained_engine.engine()
    found = gpu_bench.measure(made, lambda graphs: made, prompts[:1], time.perf_counter() - 1)
    assert len(found["not_run"]) == 8


@pytest.mark.slow
def test_the_tests_that_need_a_gpu_run_on_the_stand_in() -> None:
    """In a process of their own."""
    tests = BENCH.parent / "tests" / "gpu"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", str(tests)], capture_output=True, text=True,
        env={**os.environ, "DFLASH_TRT_STAND_IN": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert "skipped" not in done.stdout


def test_without_a_gpu_it_says_so() -> None:
    script = str(BENCH / "gpu.py")
    code = f"import sys, runpy; sys.modules['cuda'] = None; sys.path.insert(0, {str(BENCH)!r});"
    code += f"sys.argv = ['gpu.py']; runpy.run_path({script!r}, run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("error: engines for GPUs need the package cuda-bindings")
    assert "Traceback" not in done.stderr
