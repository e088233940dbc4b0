"""Requests at once against the same requests one after another, on the real pair.

Both ways run in turn in one process, round by round, so a drift of the machine meets them alike;
ratios are taken round by round. Times include reading the prompts.

    python bench/many_requests.py --engine DIR -o results.json      # build it with --max-slots 8
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import script
from machine import machine

from dflash_trt.decode.adaptive import AdaptiveWidth
from dflash_trt.decode.costs import StepCosts
from dflash_trt.decode.engine import Engine
from dflash_trt.decode.request import SamplingParams
from dflash_trt.decode.width import AUTO, WidthPolicy
from dflash_trt.lossless.prompts import bundled_prompts, interleaved


def main() -> None:
    """Run both ways at every width and write the report."""
    args = _arguments()
    engine = Engine.load(args.engine)
    limits = engine.session.limits
    if limits.max_slots < args.requests:
        script.fail(f"{args.engine} has {limits.max_slots} slots: build it with more")
    texts = interleaved(bundled_prompts())[: args.requests]
    params = SamplingParams(max_tokens=args.tokens, ignore_eos=True)
    jobs = [
        (engine.tokenizer.encode_chat([{"role": "user", "content": text}]), params)
        for text in texts
    ]
    costs = engine.auto_width(args.requests, fresh=True).costs
    report: dict[str, Any] = {"machine": machine(), "requests": len(jobs), "tokens": args.tokens}
    for width in args.widths:
        # One policy for all rounds of a way, as in a server: it is cold in the first one only.
        ways = [_policy(engine, width, costs) for _ in range(2)]
        rounds = [_round(engine, jobs, *ways) for _ in range(args.rounds)]
        report[width] = {
            "rounds": rounds,
            "at_once_over_one_by_one": statistics.median(
                r["at_once"]["tokens_per_s"] / r["one_by_one"]["tokens_per_s"] for r in rounds
            ),
            "same_tokens": all(
                r["at_once"].pop("token_ids") == r["one_by_one"].pop("token_ids") for r in rounds
            ),
        }
        print(width, json.dumps(report[width]), flush=True)
    args.output.write_text(json.dumps(report, indent=1) + "\n")


def _policy(engine: Engine, width: str, costs: StepCosts) -> int | WidthPolicy:
    if width != AUTO:
        return int(width)
    return AdaptiveWidth(StepCosts.from_json(costs.to_json()), engine.session.limits.block)


def _round(
    engine: Engine, jobs: list[Any], one_by_one: int | WidthPolicy, at_once: int | WidthPolicy
) -> dict[str, Any]:
    start = time.perf_counter()
    alone = [engine.generate(*job, width=one_by_one) for job in jobs]
    middle = time.perf_counter()
    together = engine.generate_all(jobs, width=at_once)
    end = time.perf_counter()
    return {
        name: {
            "tokens_per_s": sum(len(g.token_ids) for g in made) / seconds,
            "seconds": seconds,
            "token_ids": [g.token_ids for g in made],
        }
        for name, made, seconds in (
            ("one_by_one", alone, middle - start),
            ("at_once", together, end - middle),
        )
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", type=script.engine_folder, required=True)
    parser.add_argument("--widths", type=script.width, nargs="+", default=["1", AUTO],
                        help="fixed ones, or auto")  # fmt: skip
    parser.add_argument("--requests", type=script.count, default=8)
    parser.add_argument("--rounds", type=script.count, default=3)
    parser.add_argument("--tokens", type=script.count, default=64)
    parser.add_argument("-o", "--output", type=script.output_file, required=True)
    return parser.parse_args()


if __name__ == "__main__":
    script.run(main)
