"""What sampling adds to a step: the same step greedy and with each kind of filter, in turn.

python bench/sampling_cost.py --engine DIR -o results.json
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from typing import Any

import numpy as np
import script
from machine import machine

from dflash_trt.decode.engine import Engine
from dflash_trt.lossless.prompts import bundled_prompts
from dflash_trt.runtime.session import StepRows

CASES: dict[str, dict[str, float]] = {
    "greedy": {},
    "temperature 1": {"temperature": 1.0},
    "min_p 0.05": {"temperature": 1.0, "min_p": 0.05},
    "top_k 50": {"temperature": 1.0, "top_k": 50},
    "top_k 50, top_p 0.95": {"temperature": 1.0, "top_k": 50, "top_p": 0.95},
    "top_p 0.95": {"temperature": 1.0, "top_p": 0.95},
    "top_k 500, top_p 0.95": {"temperature": 1.0, "top_k": 500, "top_p": 0.95},
}
WIDTHS = (1, 4, 8, 16)


def main() -> None:
    """Time every case at every width and write the report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", type=script.engine_folder, required=True)
    parser.add_argument("--rounds", type=script.count, default=20)
    parser.add_argument("-o", "--output", type=script.output_file, required=True)
    args = parser.parse_args()
    engine = Engine.load(args.engine)
    text = next(iter(bundled_prompts().values()))[0]
    ids = engine.tokenizer.encode_chat([{"role": "user", "content": text}])
    report: dict[str, Any] = {"machine": machine(), "widths": {}}
    for width in (w for w in WIDTHS if w <= engine.session.limits.block):
        report["widths"][width] = made = _one_width(engine, ids, width, args.rounds)
        print(width, {case: f"{row['over_greedy']:.2f}" for case, row in made.items()}, flush=True)
    args.output.write_text(json.dumps(report, indent=1) + "\n")


def _one_width(engine: Engine, ids: list[int], width: int, rounds: int) -> dict[str, Any]:
    """Per case: median milliseconds, and the median ratio to the greedy step beside it."""
    session, one, at = engine.session, np.ones(1, np.int32), len(ids) - width
    prompt = np.array([ids[:at]], np.int32)
    session.step(0, StepRows.greedy(prompt, one * 0, one * at, one * at), 0)
    greedy = StepRows.greedy(np.array([ids[at:]], np.int32), one * at, one * width, one)
    times: dict[str, list[float]] = {case: [] for case in CASES}
    for _ in range(rounds):
        for case, settings in CASES.items():
            changed = {n: np.full(1, v, getattr(greedy, n).dtype) for n, v in settings.items()}
            rows = dataclasses.replace(greedy, **changed)
            start = time.perf_counter()
            session.step(0, rows, width - 1)
            times[case].append(time.perf_counter() - start)
    return {
        case: {
            "ms": statistics.median(taken) * 1e3,
            "over_greedy": statistics.median(
                t / g for t, g in zip(taken, times["greedy"], strict=True)
            ),
        }
        for case, taken in times.items()
    }


if __name__ == "__main__":
    script.run(main)
