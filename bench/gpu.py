"""Everything that needs a GPU, in one command of at most eight minutes: tests, then a table.

    python bench/gpu.py [-o FILE] [--precision bf16 --precision nvfp4] [--skip-tests]

It runs tests/gpu, builds the SmolLM2 pair for this GPU and for the CPU, and compares and times
them. Parts for which no time is left are named, not run.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gpu_measures as measures
import script
from machine import machine
from rich.console import Console
from rich.table import Table

from dflash_trt.build.pipeline import build, plan
from dflash_trt.build.recipe import find_recipe
from dflash_trt.decode.engine import Engine
from dflash_trt.engine_dir import EngineDir, open_engine
from dflash_trt.errors import DFlashError
from dflash_trt.flavor import DEVICE_TABLE, PRECISIONS, load_flavor
from dflash_trt.lossless.prompts import bundled_prompts, interleaved
from dflash_trt.runtime.cuda import CudaDevice
from dflash_trt.runtime.open import open_session
from dflash_trt.text import Tokenizer

RECIPE = "smollm2-135m"
BUDGET_S = 450.0
TESTS_S = 180  # of it, at most
WIDTHS = (1, 2, 4, 8, 16)
SLOTS = (1, 4)
CHOICES = {"max_seq_len": 1024, "max_slots": 4, "prefill_chunk": 256}

Opener = Callable[[int], Engine]  # an engine with at most so many CUDA graphs
Parts = dict[str, Any]


def main() -> int:
    """Run it all; 1 when a test failed, 2 without a usable GPU."""
    args = _arguments()
    start = time.perf_counter()
    try:
        cuda = CudaDevice()
        device = next(
            d for d in DEVICE_TABLE.values() if d.is_gpu and d.capability == cuda.capability
        )
        trt = load_flavor(device.backend)
    except DFlashError as error:
        script.fail(error.message, error.hint)
    except StopIteration:
        script.fail(f"no engine can be built for {cuda.name}")
    report: dict[str, Any] = {
        "machine": machine(),
        "gpu": cuda.name,
        "device": device.name,
        device.backend: trt.__version__,
    }
    print(f"{cuda.name}, {device.name}, {device.backend} {trt.__version__}", flush=True)
    failed = 0
    if not args.skip_tests:
        report["tests"] = failed = _run_tests()
    wanted = args.precision or [p for p in ("bf16", "nvfp4") if p in device.precisions]
    with tempfile.TemporaryDirectory() as scratch:
        cpu_dir, _ = _build(Path(scratch) / "cpu", {})
        cpu = Engine.from_dir(cpu_dir)
        for precision in wanted:
            choices = {"device": device.name, "precision": precision, "logits": True}
            try:
                gpu_dir, seconds = _build(Path(scratch) / precision, choices)
                opener = functools.partial(_open, gpu_dir)
                report[precision] = measure(cpu, opener, prompts_of(cpu), start + BUDGET_S)
                report[precision]["build_s"] = seconds
            except DFlashError as error:  # the other precisions still say something
                report[precision] = {"error": error.message}
            show(precision, report[precision])
    if args.output:
        args.output.write_text(json.dumps(report, indent=1) + "\n")
    print(f"{time.perf_counter() - start:.0f} s in all", flush=True)
    return int(failed != 0)


def measure(
    cpu: Engine, opener: Opener, prompts: Sequence[Sequence[int]], deadline: float,
    widths: Sequence[int] = WIDTHS, tokens: int = 64,
) -> Parts:  # fmt: skip
    """All parts on one engine, as far as the time allows."""
    plain = opener(0)
    graphed = opener(64)
    few = prompts[:4]
    limits = graphed.session.limits
    slots = [n for n in SLOTS if n <= limits.max_slots]
    widths = [w for w in widths if w <= limits.block]
    parts: list[tuple[str, Callable[[], Any]]] = [
        ("equality", lambda: measures.equality(cpu, graphed, prompts, tokens)),
        ("graphs_change_nothing", lambda: _same_tokens(plain, graphed, few, tokens)),
        ("lossless", lambda: measures.lossless(graphed, prompts, tokens)),
        ("steps_with_graphs", lambda: measures.step_times(graphed.session, widths, slots, 20)),
        ("steps_without", lambda: measures.step_times(plain.session, widths, slots, 20)),
        ("speed_with_graphs", lambda: measures.speeds(graphed, few, 2 * tokens, widths)),
        ("speed_without", lambda: measures.speeds(plain, few, 2 * tokens, widths[:1])),
        ("throughput", lambda: measures.throughput(graphed, prompts, 2 * tokens)),
    ]
    done: Parts = {"not_run": []}
    for name, part in parts:
        if time.perf_counter() > deadline:
            done["not_run"].append(name)
            continue
        done[name] = part()
    done["graphs"] = getattr(graphed.session, "num_graphs", None)
    return done


def prompts_of(engine: Engine) -> list[list[int]]:
    """Token ids of some bundled prompts of all classes."""
    texts = interleaved(bundled_prompts())[:9]
    return [engine.tokenizer.encode_chat([{"role": "user", "content": text}]) for text in texts]


def _same_tokens(
    a: Engine, b: Engine, prompts: Sequence[Sequence[int]], tokens: int
) -> dict[str, int]:
    made = [[measures.generate(engine, prompt, tokens) for prompt in prompts] for engine in (a, b)]
    return {
        "prompts": len(prompts),
        "same": sum(x == y for x, y in zip(*made, strict=True)),
    }


def _run_tests() -> int:
    """Exit code of pytest on tests/gpu."""
    tests = Path(__file__).parents[1] / "tests" / "gpu"
    command = [sys.executable, "-m", "pytest", "-q", "-rs", str(tests)]
    try:
        done = subprocess.run(
            command, timeout=TESTS_S, check=False, env={**os.environ, "DFLASH_TRT_NEEDS_GPU": "1"}
        )
    except subprocess.TimeoutExpired:
        print(f"tests/gpu did not end within {TESTS_S} s", flush=True)
        return 1
    return done.returncode


def _build(folder: Path, choices: dict[str, Any]) -> tuple[EngineDir, float]:
    recipe = find_recipe(RECIPE)
    assert recipe is not None
    start = time.perf_counter()
    made = plan(
        recipe.target, recipe.drafter, {**recipe.choices, **CHOICES, **choices},
        target_base=recipe.base, drafter_base=recipe.base,
    )  # fmt: skip
    build(made, folder, force=False, progress=lambda stage, done, total: None)
    return open_engine(folder), time.perf_counter() - start


def _open(directory: EngineDir, max_graphs: int) -> Engine:
    session = open_session(directory, max_graphs=max_graphs)
    eos = directory.config.pair.target.eos_token_ids
    return Engine(session, Tokenizer.load(directory.path), eos)


def show(precision: str, found: Parts) -> None:
    """Print one engine's table."""
    table = Table("what", "result", title=f"{RECIPE}, {precision}", title_justify="left")
    for name, value in found.items():
        if name.startswith("steps"):
            cells = ", ".join(f"{r['slots']}x{r['width']}: {r['ms']:.2f} ms" for r in value)
        elif name.startswith("speed"):
            cells = ", ".join(
                f"width {r['width']}: {r['tokens_per_s']:.0f} tokens/s" for r in value
            )
        elif isinstance(value, dict):
            cells = ", ".join(f"{key} {_number(each)}" for key, each in value.items())
        else:
            cells = _number(value)
        table.add_row(name.replace("_", " "), cells)
    Console(markup=False, emoji=False).print(table)


def _number(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=script.output_file, help="JSON file to write")
    parser.add_argument("--precision", action="append", choices=PRECISIONS,
                        help="default: bf16, and nvfp4 if it can")  # fmt: skip
    parser.add_argument("--skip-tests", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    script.run(main)
