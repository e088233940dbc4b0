"""Host time per step: everything but the session, at 1 and at many slots.

The session returns at once what it made beforehand, so what is left is the host's own work: packing
rows, accounting, stop rules, text, telemetry. `step` is `Scheduler.step` alone, on the wall clock
and in CPU time of its thread, which a busy machine does not stretch; `loop` is the engine loop with
one thread that reads each stream, per step.

    python bench/host_overhead.py -o host_overhead.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import numpy as np
import script
import tokenizers
from machine import machine
from tokenizers import decoders, models

from dflash_trt.decode.loop import EngineLoop
from dflash_trt.decode.prometheus import PrometheusTelemetry
from dflash_trt.decode.request import SamplingParams
from dflash_trt.decode.scheduler import Scheduler
from dflash_trt.decode.telemetry import NoTelemetry, Telemetry
from dflash_trt.decode.width import FixedWidth
from dflash_trt.runtime.session import SessionLimits, StepResult, StepRows
from dflash_trt.text import Tokenizer

VOCAB = 4096
GOALS_MS = {1: 0.3, 64: 2.0}


class InstantSession:
    """Accepts as many drafts as told; tokens that no stop rule knows."""

    def __init__(self, limits: SessionLimits, num_accepted: int) -> None:
        self.limits = limits
        self._num_accepted = num_accepted
        rng = np.random.default_rng(0)
        shape = (limits.max_slots, limits.block)
        self._next = rng.integers(100, VOCAB, shape).astype(np.int32)
        self.num_steps = 0
        self.seconds = 0.0

    def step(
        self, first_slot: int, rows: StepRows, num_drafts: int, *, want_logits: bool = False
    ) -> StepResult:
        """See `Session.step`; times itself."""
        start = time.perf_counter()
        self.num_steps += 1
        num_slots = len(rows.tokens)
        committed = np.minimum(rows.known + self._num_accepted, rows.count)
        result = StepResult(committed, self._next[:num_slots, : 1 + num_drafts].copy())
        self.seconds += time.perf_counter() - start
        return result

    def release(self, slot: int) -> None:
        """Nothing is kept."""


def main() -> None:
    """Measure every case and print, and write, the report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=script.count, default=300)
    parser.add_argument("--bursts", type=script.count, default=5)
    parser.add_argument("-o", "--output", type=script.output_file)
    args = parser.parse_args()
    tokenizer = _tokenizer()
    cases = []
    for num_slots, goal in GOALS_MS.items():
        for width, num_accepted, kind in (
            (1, 0, "greedy"), (16, 3, "greedy"), (16, 15, "greedy"), (16, 3, "full"),
        ):  # fmt: skip
            runs = [
                _step_ms(tokenizer, num_slots, width, num_accepted, kind, args.steps)
                for _ in range(args.bursts)
            ]
            loops = [
                _loop_ms(tokenizer, num_slots, width, num_accepted, kind, args.steps)
                for _ in range(args.bursts)
            ]
            cases.append(
                {
                    "slots": num_slots, "width": width, "accepted": num_accepted, "kind": kind,
                    "step_ms": statistics.median(wall for wall, _ in runs),
                    "step_cpu_ms": statistics.median(cpu for _, cpu in runs),
                    "loop_ms": statistics.median(loops),
                    "goal_ms": goal,
                }
            )  # fmt: skip
            print(json.dumps(cases[-1]), flush=True)
    report = {"machine": machine(), "steps": args.steps, "cases": cases}
    if args.output:
        args.output.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report["machine"]))


def _params(kind: str, index: int, num_tokens: int) -> SamplingParams:
    """`full` samples, with a stop string that is looked for in every character."""
    if kind == "greedy":
        return SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    return SamplingParams(
        max_tokens=num_tokens, temperature=0.8, top_k=40, top_p=0.9, seed=index, ignore_eos=True,
        stop=["\n\n\n", "never"],
    )  # fmt: skip


def _scheduler(
    tokenizer: Tokenizer, num_slots: int, width: int, num_accepted: int, telemetry: Telemetry
) -> tuple[InstantSession, Scheduler]:
    limits = SessionLimits(
        block=16, max_seq_len=1 << 20, max_slots=num_slots, prefill_chunk=64, vocab_size=VOCAB
    )
    session = InstantSession(limits, num_accepted)
    return session, Scheduler(session, tokenizer, (), FixedWidth(width), telemetry=telemetry)


def _step_ms(
    tokenizer: Tokenizer, num_slots: int, width: int, num_accepted: int, kind: str, steps: int
) -> tuple[float, float]:
    """Milliseconds of host time in one decode step with all slots in use, and of CPU time."""
    telemetry = PrometheusTelemetry(16) if kind == "full" else NoTelemetry()
    session, scheduler = _scheduler(tokenizer, num_slots, width, num_accepted, telemetry)
    for index in range(num_slots):
        scheduler.submit([1, 2, 3], _params(kind, index, 1 << 19))
    for _ in range(2 * num_slots + 20):
        scheduler.step()
    session.seconds = 0.0
    start, cpu = time.perf_counter(), time.thread_time()
    for _ in range(steps):
        scheduler.step()
    cpu = time.thread_time() - cpu
    return (time.perf_counter() - start - session.seconds) / steps * 1e3, cpu / steps * 1e3


def _loop_ms(
    tokenizer: Tokenizer, num_slots: int, width: int, num_accepted: int, kind: str, steps: int
) -> float:
    """The same in an engine loop, its requests from arrival to end; the readers' time counts."""
    telemetry = PrometheusTelemetry(16) if kind == "full" else NoTelemetry()
    session, scheduler = _scheduler(tokenizer, num_slots, width, num_accepted, telemetry)
    num_tokens = steps * (num_accepted + 1)
    start = time.perf_counter()
    with EngineLoop(scheduler) as loop:
        handles = [loop.submit([1, 2, 3], _params(kind, i, num_tokens)) for i in range(num_slots)]
        for handle in handles:
            for _ in handle:
                pass
    return (time.perf_counter() - start - session.seconds) / session.num_steps * 1e3


def _tokenizer() -> Tokenizer:
    """Words of one to five letters."""
    rng = np.random.default_rng(1)
    letters = [chr(code) for code in range(0x21, 0x7F)]
    words = dict.fromkeys(letters)
    while len(words) < VOCAB:
        words["".join(rng.choice(letters, rng.integers(2, 6)))] = None
    backend = tokenizers.Tokenizer(
        models.BPE(vocab={word: index for index, word in enumerate(words)}, merges=[])
    )
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend, special_tokens={}, templates={}, source="bench")


if __name__ == "__main__":
    script.run(main)
