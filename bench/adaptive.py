"""The adaptive verify width against every fixed one, on the real pair.

All ways run in turn on each prompt, in one process, so a drift of the machine meets them alike, and
their order is turned from prompt to prompt. Ratios are taken prompt by prompt. The adaptive policy
is one for a whole class of prompts, as in a server; what it measured at the start is told apart.

    python bench/adaptive.py --engine fp32=DIR --engine int4=DIR -o results.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from typing import Any

import script

from dflash_trt.decode.adaptive import AdaptiveWidth
from dflash_trt.decode.costs import StepCosts
from dflash_trt.decode.engine import Engine
from dflash_trt.decode.request import DecodeStats, SamplingParams
from dflash_trt.decode.width import AUTO, FixedWidth, WidthPolicy
from dflash_trt.lossless.prompts import bundled_prompts
from dflash_trt.runtime.threads import cpu_allowance


class Watched:
    """Passes a policy on and counts what it chose."""

    def __init__(self, policy: WidthPolicy) -> None:
        self._policy = policy
        self.steps: dict[int, int] = {}

    def width(self, stats: Sequence[DecodeStats]) -> int:
        """See `WidthPolicy.width`."""
        width = self._policy.width(stats)
        self.steps[width] = self.steps.get(width, 0) + 1
        return width

    def observe(self, width: int, num_slots: int, seconds: float, is_prefill: bool) -> None:
        """See `WidthPolicy.observe`."""
        self._policy.observe(width, num_slots, seconds, is_prefill)


def main() -> None:
    """Run every way on every prompt and write the report."""
    args = _arguments()
    report: dict[str, Any] = {"threads": cpu_allowance(), "tokens": args.tokens, "engines": {}}
    for name, path in args.engine:
        report["engines"][name] = _one_engine(name, Engine.load(path), args)
    args.output.write_text(json.dumps(report, indent=1) + "\n")


def _one_engine(name: str, engine: Engine, args: argparse.Namespace) -> dict[str, Any]:
    start = time.perf_counter()
    costs = engine.auto_width(1, fresh=True).costs
    measuring_s = time.perf_counter() - start
    block = engine.session.limits.block
    widths = sorted({w for w in args.widths if w < block} | {block})
    runs: list[dict[str, Any]] = []
    for kind, prompts in bundled_prompts().items():
        # Each class starts from what was measured, and learns from no other class.
        auto = AdaptiveWidth(StepCosts.from_json(costs.to_json()), block)
        for index, prompt in enumerate(prompts[: args.prompts]):
            ways: list[tuple[str, WidthPolicy]] = [(str(w), FixedWidth(w)) for w in widths]
            ways.append((AUTO, auto))
            turn = index % len(ways)
            for way, policy in ways[turn:] + ways[:turn]:
                run = _run(engine, prompt, policy, args.tokens)
                runs.append({"class": kind, "prompt": index, "way": way, **run})
    summary = _summary(runs)
    _print_table(name, summary)
    return {
        "step_costs": costs.to_json(),
        "measuring_s": measuring_s,
        "summary": summary,
        "runs": runs,
    }


def _run(engine: Engine, prompt: str, policy: WidthPolicy, tokens: int) -> dict[str, Any]:
    ids = engine.tokenizer.encode_chat([{"role": "user", "content": prompt}])
    watched = Watched(policy)
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    made = engine.generate(ids, params, width=watched)
    return {
        "tokens_per_s": (len(made.token_ids) - 1) / made.decode_s,
        "acceptance_length": made.stats.acceptance_length,
        "widths": watched.steps,
        "token_ids": made.token_ids,
    }


def _summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Per class and way: tokens/s, ratios to plain and to auto, whether all tokens are equal."""
    speeds = {(r["class"], r["prompt"], r["way"]): r["tokens_per_s"] for r in runs}
    texts = {(r["class"], r["prompt"]): r["token_ids"] for r in runs if r["way"] == "1"}
    summary: dict[str, Any] = {}
    for kind in dict.fromkeys(r["class"] for r in runs):
        for way in sorted({r["way"] for r in runs}, key=lambda way: (way == AUTO, way.zfill(3))):
            mine = [r for r in runs if r["class"] == kind and r["way"] == way]
            places = [(kind, r["prompt"]) for r in mine]
            chosen: dict[int, int] = {}
            for run in mine:
                for width, count in run["widths"].items():
                    chosen[width] = chosen.get(width, 0) + count
            summary.setdefault(kind, {})[way] = {
                "tokens_per_s": statistics.median(r["tokens_per_s"] for r in mine),
                "over_plain": _ratio(speeds, places, way, "1"),
                "auto_over_this": _ratio(speeds, places, AUTO, way),
                "acceptance_length": statistics.mean(r["acceptance_length"] for r in mine),
                "equal_to_plain": sum(
                    r["token_ids"] == texts[place] for r, place in zip(mine, places, strict=True)
                ),
                "prompts": len(mine),
                "steps_by_width": dict(sorted(chosen.items())),
            }
        best = min(
            (way for way in summary[kind] if way != AUTO),
            key=lambda way: summary[kind][way]["auto_over_this"],
        )
        summary[kind][AUTO]["best_fixed"] = best
        summary[kind][AUTO]["over_best_fixed"] = summary[kind][best]["auto_over_this"]
    return summary


def _ratio(
    speeds: dict[tuple[str, int, str], float], places: list[tuple[str, int]], way: str, other: str
) -> float:
    return statistics.median(speeds[*place, way] / speeds[*place, other] for place in places)


def _print_table(name: str, summary: dict[str, Any]) -> None:
    for kind, ways in summary.items():
        print(f"{name}, {kind}: way, tokens/s, over plain, auto over it, equal to plain")
        for way, row in ways.items():
            equal = f"{row['equal_to_plain']}/{row['prompts']}"
            print(
                f"  {way:>4} {row['tokens_per_s']:8.1f} {row['over_plain']:7.3f}"
                f" {row['auto_over_this']:7.3f} {equal:>7}"
            )
        print(f"  auto chose {ways[AUTO]['steps_by_width']}", flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", type=script.named_engine, action="append", required=True,
                        help="NAME=DIR, repeatable")  # fmt: skip
    parser.add_argument("--widths", type=script.count, nargs="+", default=[1, 2, 3, 4, 6, 8, 16])
    parser.add_argument("--prompts", type=script.count, default=4, help="prompts of each class")
    parser.add_argument("--tokens", type=script.count, default=96)
    parser.add_argument("-o", "--output", type=script.output_file, required=True)
    args = parser.parse_args()
    if 1 not in args.widths:
        parser.error("--widths must name 1, plain decoding, which all are compared with")
    return args


if __name__ == "__main__":
    script.run(main)
