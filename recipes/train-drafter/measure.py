"""Acceptance and speed of drafters, through engines, on prompts that none was trained on.

    python measure.py previous=DIR new=DIR -o measured.json

Engines of one target. Each prompt is answered greedily by every engine in turn, by plain decoding
and at every verify width, in one process, so that a drift of the machine meets all alike. Ratios to
the same engine's plain decoding (the same step is some percent faster in one of two loaded engines
than in the other) are taken prompt by prompt and their medians reported, with how many answers
equal plain decoding's.
"""

from __future__ import annotations

import argparse
import json
import statistics
from itertools import zip_longest
from typing import Any

import command
from evaluation import prompt_sets
from rich.progress import track

from dflash_trt.decode.engine import Engine
from dflash_trt.decode.request import SamplingParams


def main() -> None:
    """Run all and print the tables."""
    args = arguments()
    engines = {name: Engine.load(path) for name, path in args.engines}
    params = SamplingParams(max_tokens=args.tokens)
    report: dict[str, Any] = {}
    sets = prompt_sets()
    for kind in args.sets or sets:
        prompts = sets[kind]
        rows: list[dict[str, Any]] = []
        for prompt in track(prompts[: args.prompts], kind):
            rows.append(_one_prompt(engines, args.widths, prompt, params))
        report[kind] = _summary(rows)
        print(kind, json.dumps(report[kind], indent=1), flush=True)
    args.output.write_text(json.dumps(report, indent=1) + "\n")


def _one_prompt(
    engines: dict[str, Engine], widths: list[int], prompt: str, params: SamplingParams
) -> dict[str, Any]:
    first = next(iter(engines.values()))
    ids = first.tokenizer.encode_chat([{"role": "user", "content": prompt}])
    runs: dict[str, Any] = {}
    for name, engine in engines.items():
        plain = engine.generate(ids, params, width=1)
        for width in (w for w in widths if w <= engine.session.limits.block):
            made = engine.generate(ids, params, width=width)
            runs[f"{name} {width}"] = {
                "same": made.token_ids == plain.token_ids,
                "steps": made.stats.steps,
                "tokens": len(made.token_ids) - 1,
                "accepted": list(made.stats.accepted),
                "offered": list(made.stats.offered),
                "ratio": plain.decode_s / made.decode_s if made.decode_s else 1.0,
                "rate": (len(made.token_ids) - 1) / made.decode_s if made.decode_s else 0.0,
            }
    return runs


def _summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    summary: dict[str, Any] = {"prompts": len(rows)}
    for way in rows[0]:
        runs = [row[way] for row in rows]
        steps = max(1, sum(run["steps"] for run in runs))
        accepted, offered = (_added(runs, name) for name in ("accepted", "offered"))
        summary[way] = {
            "acceptance_length": round(sum(run["tokens"] for run in runs) / steps, 3),
            "accepted_per_position": [
                round(a / o, 3) for a, o in zip(accepted, offered, strict=True) if o
            ],
            "over_plain": round(statistics.median(run["ratio"] for run in runs), 3),
            "tokens_per_s": round(statistics.median(run["rate"] for run in runs), 1),
            "same_tokens": sum(run["same"] for run in runs),
        }
    return summary


def _added(runs: list[dict[str, Any]], name: str) -> list[int]:
    return [sum(column) for column in zip_longest(*(run[name] for run in runs), fillvalue=0)]


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("engines", nargs="+", metavar="NAME=DIR", type=command.named_engine)
    parser.add_argument("-o", "--output", type=command.output_file, required=True)
    parser.add_argument("--widths", type=command.positive, nargs="+", default=[2, 3, 4, 5, 6, 8])
    parser.add_argument("--sets", nargs="+", choices=list(prompt_sets()), help="default: all")
    parser.add_argument(
        "--prompts", type=command.positive, default=1000, help="of each set, at most"
    )
    parser.add_argument("--tokens", type=command.positive, default=128)
    return parser.parse_args()


if __name__ == "__main__":
    command.run(main)
