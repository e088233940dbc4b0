"""Nothing that a drafter is judged on may be among what it was trained on."""

from __future__ import annotations

import pytest
import scripts
from evaluation import RUN, Overlap, code_prompts, prompt_sets

from dflash_trt.lossless.prompts import bundled_prompts

JUDGED = [*code_prompts()[::9], *(p for prompts in bundled_prompts().values() for p in prompts)]


@pytest.fixture(scope="module")
def overlap() -> Overlap:
    return Overlap.with_evaluation()


@pytest.mark.parametrize("prompt", JUDGED)
def test_every_prompt_is_found_in_any_frame(overlap: Overlap, prompt: str) -> None:
    assert overlap.found_in(prompt)
    assert overlap.found_in(f"Please answer.\n```\n{prompt.upper()}\n```\nThank you!")


def test_a_part_of_a_long_prompt_is_found(overlap: Overlap) -> None:
    words = code_prompts()[5].split()
    assert len(words) > 3 * RUN
    assert overlap.found_in(" ".join(words[RUN : 2 * RUN + 5]))


def test_other_texts_are_not_found(overlap: Overlap) -> None:
    for text in ("", "Why do dogs bark?", "Write a Python function that adds two numbers."):
        assert not overlap.found_in(text)


def test_few_functions_that_become_prompts_overlap(overlap: Overlap) -> None:
    """The check works on them one by one, so it must not turn most of them away."""
    files = scripts.sources(["toolz", "more_itertools", "boltons"], library=False)
    found = sorted(set(scripts.functions(files)))
    assert len(found) > 200
    assert sum(overlap.found_in(code) for _, code, _ in found) < 3


def test_sets_are_of_known_sizes_and_stay_the_same() -> None:
    sets = prompt_sets()
    assert {name: len(prompts) for name, prompts in sets.items()} == {
        "humaneval": 41, "chat": 22, "held_out": 22, "random_text": 8,
    }  # fmt: skip
    assert sets == prompt_sets()
