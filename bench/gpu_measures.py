"""What is measured on a GPU: equality with the CPU, step times, tokens per second.

Every function takes loaded engines, so that all of it also runs where there is no GPU
(`tests/cpu/test_gpu_bench.py` does that, on a stand-in).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from dflash_trt.decode.engine import Engine
from dflash_trt.decode.request import SamplingParams
from dflash_trt.runtime.session import Session, StepRows

Prompts = Sequence[Sequence[int]]
LIVE_TOKENS = 128  # in the caches while a step is timed
WARM = 3  # steps before one is timed: the first ones allocate, compile and capture


def equality(cpu: Engine, gpu: Engine, prompts: Prompts, max_tokens: int) -> dict[str, Any]:
    """Greedy text of both engines; where it parts, by how much the CPU preferred its own token.

    The GPU rounds to 16 bits, so a near tie may fall either way; a wide margin is a bug.
    """
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    same, margins = 0, []
    for prompt in prompts:
        wanted, made = (e.generate(prompt, params, width=1).token_ids for e in (cpu, gpu))
        different = [i for i, (a, b) in enumerate(zip(wanted, made, strict=True)) if a != b]
        if not different:
            same += 1
            continue
        at = different[0]
        logits = last_logits(cpu.session, [*prompt, *wanted[:at]])
        margins.append(float(logits[wanted[at]] - logits[made[at]]))
    return {
        "prompts": len(prompts),
        "tokens_each": max_tokens,
        "same": same,
        "largest_margin_at_difference": max(margins, default=0.0),
    }


def generate(engine: Engine, prompt: Sequence[int], max_tokens: int) -> list[int]:
    """Greedy tokens with the drafter."""
    return engine.generate(prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True)).token_ids


def lossless(engine: Engine, prompts: Prompts, max_tokens: int) -> dict[str, Any]:
    """Prompts whose text is the same with and without the drafter, and the acceptance length."""
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    same, steps, tokens = 0, 0, 0
    for prompt in prompts:
        plain = engine.generate(prompt, params, width=1)
        drafted = engine.generate(prompt, params)
        same += plain.token_ids == drafted.token_ids
        steps += drafted.stats.steps
        tokens += drafted.stats.tokens
    return {
        "prompts": len(prompts),
        "same": same,
        "acceptance_length": tokens / steps if steps else None,
    }


def last_logits(session: Session, tokens: Sequence[int]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """The target's logits [V] after some tokens, read in prompt chunks into slot 0."""
    chunk = session.limits.prefill_chunk
    for start in range(0, len(tokens), chunk):
        part = tokens[start : start + chunk]
        size = np.full(1, len(part), np.int32)
        rows = StepRows.greedy(
            np.array([part], np.int32), np.full(1, start, np.int32), count=size, known=size
        )
        last = session.step(0, rows, 0, want_logits=start + len(part) == len(tokens)).logits
    session.release(0)
    assert last is not None
    return last[0, 0]


def step_times(
    session: Session, widths: Sequence[int], slots: Sequence[int], rounds: int
) -> list[dict[str, Any]]:
    """Median milliseconds of a decode step by verify width and number of slots."""
    made = []
    live = min(LIVE_TOKENS, session.limits.max_seq_len - session.limits.block)
    for num_slots in slots:
        for width in widths:
            one = np.ones(num_slots, np.int32)
            rows = StepRows.greedy(
                np.zeros((num_slots, width), np.int32), one * live, one * width, one
            )
            times = []
            for index in range(WARM + rounds):
                start = time.perf_counter()
                session.step(0, rows, width - 1)
                if index >= WARM:
                    times.append(time.perf_counter() - start)
            made.append({"slots": num_slots, "width": width, "ms": 1e3 * statistics.median(times)})
    return made


def speeds(
    engine: Engine, prompts: Prompts, max_tokens: int, widths: Sequence[int]
) -> list[dict[str, Any]]:
    """Decode tokens per second of single requests, by verify width (1: without the drafter)."""
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    made = []
    for width in widths:
        engine.generate(prompts[0], params, width=width)  # allocates, compiles and captures
        runs = [engine.generate(prompt, params, width=width) for prompt in prompts]
        rates = [rate for run in runs if (rate := run.to_json()["decode_tokens_per_s"])]
        lengths = [run.stats.acceptance_length for run in runs if run.stats.acceptance_length]
        made.append(
            {
                "width": width,
                "tokens_per_s": statistics.median(rates) if rates else None,
                "acceptance_length": statistics.fmean(lengths) if lengths else None,
            }
        )
    return made


def throughput(engine: Engine, prompts: Prompts, max_tokens: int) -> dict[str, Any]:
    """Tokens per second of all slots together."""
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    jobs = [(prompts[i % len(prompts)], params) for i in range(engine.session.limits.max_slots)]
    engine.generate_all(jobs)
    start = time.perf_counter()
    made = engine.generate_all(jobs)
    seconds = time.perf_counter() - start
    return {
        "requests": len(jobs),
        "tokens_per_s": sum(len(g.token_ids) for g in made) / seconds,
    }
