"""Decoding on the CPU: transformers, plain decoding, and DFlash at several verify widths.

All ways run in turn on each prompt, in one process on one machine, so a drift of the machine
meets them alike; ratios are taken prompt by prompt and their median is reported.

    python bench/decode_cpu.py --engine fp32=DIR --engine int4=DIR --recipe NAME -o FILE
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import script
from machine import machine
from matmuls import Products

import dflash_trt.runtime.ort
from dflash_trt.build.recipe import find_recipe, recipe_names
from dflash_trt.checkpoint.locate import locate
from dflash_trt.decode.engine import Engine
from dflash_trt.decode.request import SamplingParams
from dflash_trt.errors import ConfigError
from dflash_trt.lossless.prompts import bundled_prompts
from dflash_trt.runtime.threads import cpu_allowance

WIDTHS = (1, 2, 4, 8, 16)
BURSTS = 8


def main() -> None:
    """Run every way on every prompt and write the report."""
    args = _arguments()
    engines = {name: Engine.load(path) for name, path in args.engine}
    reference = _Transformers(_target_of(args.recipe)) if args.recipe else None
    runs: list[dict[str, Any]] = []
    for kind, prompts in bundled_prompts().items():
        for index, prompt in enumerate(prompts[: args.prompts]):
            runs += _one_prompt(engines, reference, kind, index, prompt, args.tokens)
            print(kind, index, flush=True)
    report = {
        "machine": machine(),
        "tokens": args.tokens,
        "runs": runs,
        "summary": _summary(runs),
        "step_over_products": {
            name: _step_over_products(engines[name], path) for name, path in args.engine
        },
    }
    args.output.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps({k: report[k] for k in ("summary", "step_over_products")}, indent=1))


def _target_of(recipe: str) -> Path:
    found = find_recipe(recipe)
    if found is None:
        raise ConfigError(
            f"there is no recipe {recipe}", f"recipes are {', '.join(recipe_names())}"
        )
    return locate(found.target, found.base)


def _one_prompt(
    engines: dict[str, Engine],
    reference: _Transformers | None,
    kind: str,
    index: int,
    prompt: str,
    tokens: int,
) -> list[dict[str, Any]]:
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    chat = [{"role": "user", "content": prompt}]
    ids = next(iter(engines.values())).tokenizer.encode_chat(chat)
    base = {"class": kind, "prompt": index}
    runs = []
    if reference is not None:
        speed, output = reference.tokens_per_s(ids, tokens)
        runs.append({**base, "way": "transformers", "tokens_per_s": speed})
    for name, engine in engines.items():
        plain: list[int] = []
        for width in (w for w in WIDTHS if w <= engine.session.limits.block):
            result = engine.generate(ids, params, width=width)
            plain = plain or result.token_ids
            run = {
                **base,
                "way": f"{name}/{width}",
                "tokens_per_s": (tokens - 1) / result.decode_s,
                "acceptance_length": result.stats.acceptance_length,
                "equals_plain": result.token_ids == plain,
            }
            if reference is not None:
                run["equals_transformers"] = result.token_ids == output
            runs.append(run)
    return runs


class _Transformers:
    """Hugging Face generate on the same weights, FP32, same threads."""

    def __init__(self, gguf: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(cpu_allowance())
        self._torch = torch
        self._model = AutoModelForCausalLM.from_pretrained(
            str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32
        ).eval()

    def tokens_per_s(self, ids: list[int], tokens: int) -> tuple[float, list[int]]:
        """Decode speed after the first token, and the tokens."""
        inputs = self._torch.tensor([ids])
        times = []
        outputs = None
        for count in (1, tokens):  # the prompt's time is that of one token
            start = time.perf_counter()
            outputs = self._model.generate(
                inputs, max_new_tokens=count, min_new_tokens=count, do_sample=False
            )
            times.append(time.perf_counter() - start)
        assert outputs is not None
        return (tokens - 1) / (times[1] - times[0]), outputs[0, len(ids) :].tolist()


def _summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Per class and way: median tokens/s, median ratio to the engine's own plain decoding."""
    speeds = {(r["class"], r["prompt"], r["way"]): r["tokens_per_s"] for r in runs}
    summary: dict[str, Any] = {}
    for kind in dict.fromkeys(r["class"] for r in runs):
        for way in dict.fromkeys(r["way"] for r in runs):
            mine = [r for r in runs if r["class"] == kind and r["way"] == way]
            entry = {"tokens_per_s": statistics.median(r["tokens_per_s"] for r in mine)}
            plain = way.split("/")[0] + "/1" if "/" in way else None
            for label, other in (("over_plain", plain), ("over_transformers", "transformers")):
                ratios = [
                    r["tokens_per_s"] / speeds[kind, r["prompt"], other]
                    for r in mine
                    if (kind, r["prompt"], other) in speeds
                ]
                if ratios:
                    entry[label] = statistics.median(ratios)
            if "/" in way:
                entry["acceptance_length"] = statistics.mean(r["acceptance_length"] for r in mine)
                entry["equal_to_plain"] = sum(r["equals_plain"] for r in mine)
                entry["prompts"] = len(mine)
            summary.setdefault(kind, {})[way] = entry
    return summary


def _step_over_products(engine: Engine, path: Path) -> dict[str, Any]:
    """Median step time against that of its matrix products alone, at ~200 live tokens."""
    import numpy as np

    from dflash_trt.runtime.session import StepRows

    products = Products(path, cpu_allowance())
    block = engine.session.limits.block
    prompt = np.arange(200, dtype=np.int32)[None] + 100

    def rows(width: int, length: int, known: int) -> StepRows:
        one = np.ones(1, np.int32)
        return StepRows.greedy(prompt[:, :width], one * length, one * width, one * known)

    engine.session.step(0, rows(200, 0, 200), 0)
    result = {}
    for width in (1, 4, block):
        drafts = width - 1
        columns = max(width, dflash_trt.runtime.ort.MIN_WIDTH)
        counts = {"target": columns, "verify": columns, "block": block if drafts else 0}

        def step(width: int = width, drafts: int = drafts) -> float:
            start = time.perf_counter()
            engine.session.step(0, rows(width, 200, 1), drafts)
            return time.perf_counter() - start

        def alone(counts: dict[str, int] = {**counts, "draft": drafts}) -> float:  # noqa: B006
            return products.seconds(counts)

        pairs = [(_burst(step), _burst(alone)) for _ in range(BURSTS)]
        result[str(width)] = {
            "step_ms": statistics.median(step for step, _ in pairs) * 1e3,
            "products_ms": statistics.median(floor for _, floor in pairs) * 1e3,
            "ratio": statistics.median(step / floor for step, floor in pairs),
        }
        if width == 1:
            result["1"]["over_one_column"] = _price_of_bit_equality(step)
    return result


def _price_of_bit_equality(step: Callable[[], float]) -> float:
    """Plain decoding's step against the same step run on a single column."""
    ratios = []
    for _ in range(BURSTS):
        with_two = _burst(step)
        with mock.patch.object(dflash_trt.runtime.ort, "MIN_WIDTH", 1):
            ratios.append(with_two / _burst(step))
    return statistics.median(ratios)


def _burst(run: Callable[[], float]) -> float:
    """Median of a few runs in a row; not of the first ones, in which the other session's
    threads still spin for work on our cores.
    """
    return statistics.median([run() for _ in range(9)][3:])


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", type=script.named_engine, action="append", required=True,
                        help="NAME=DIR, repeatable")  # fmt: skip
    parser.add_argument("--recipe", help="whose GGUF target is the transformers baseline")
    parser.add_argument("--prompts", type=script.count, default=8, help="prompts of each class")
    parser.add_argument("--tokens", type=script.count, default=96)
    parser.add_argument("-o", "--output", type=script.output_file, required=True)
    return parser.parse_args()


if __name__ == "__main__":
    script.run(main)
