"""The losslessness check: speculative output must equal plain output, token for token.

Both run in one engine. Plain decoding reads one token a step, a block several; on hardware whose
sums depend on the shape, a near tie may fall either way. The margin tells a tie from a bug, and
`exact` runs plain decoding in the shape of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from dflash_trt.decode.engine import Engine
from dflash_trt.decode.generation import Generation
from dflash_trt.decode.request import SamplingParams
from dflash_trt.runtime.session import StepRows


@dataclass(frozen=True)
class Mismatch:
    """The first token at which a prompt's two outputs differ."""

    prompt: int
    position: int  # index in the output
    plain_token: int | None  # None: the output had ended
    draft_token: int | None
    logit_margin: float | None  # plain token's logit minus the other's, from a fresh pass


@dataclass
class Report:
    """What `verify` found; `to_json` is its `--json`."""

    width: int
    exact: bool
    prompts: int = 0
    tokens: int = 0
    steps: int = 0
    decoded: int = 0
    mismatches: list[Mismatch] = field(default_factory=list)

    @property
    def lossless(self) -> bool:
        """Whether every prompt gave the same tokens both ways."""
        return not self.mismatches

    @property
    def acceptance_length(self) -> float | None:
        """Tokens per decode step over all prompts, bonus counted."""
        return self.decoded / self.steps if self.steps else None

    def to_json(self) -> dict[str, Any]:
        """Plain types."""
        return {
            "lossless": self.lossless,
            "prompts": self.prompts,
            "tokens": self.tokens,
            "mismatches": [asdict(mismatch) for mismatch in self.mismatches],
            "acceptance_length": self.acceptance_length,
            "width": self.width,
            "exact": self.exact,
        }


def verify(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    *,
    width: int,
    exact: bool = False,
    on_prompt: Callable[[Report], None] = lambda report: None,
) -> Report:
    """Generate every prompt (token ids) with and without the drafter and compare."""
    report = Report(width, exact)
    for prompt in prompts:
        plain = engine.generate(prompt, params, width=1, padded_width=width if exact else None)
        drafted = engine.generate(prompt, params, width=width)
        _add(report, engine, prompt, plain.token_ids, drafted)
        on_prompt(report)
    return report


def plain_outputs(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    padded_width: int | None,
) -> list[list[int]]:
    """The tokens of every prompt without the drafter, alone."""
    made = (engine.generate(p, params, width=1, padded_width=padded_width) for p in prompts)
    return [generation.token_ids for generation in made]


def compare(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    plain: Sequence[Sequence[int]],
    *,
    width: int,
    exact: bool,
    together: bool,
) -> Report:
    """Generate every prompt with the drafter, alone or side by side, and compare with `plain`."""
    report = Report(width, exact)
    if together:
        drafted = engine.generate_all([(prompt, params) for prompt in prompts], width=width)
    else:
        drafted = [engine.generate(prompt, params, width=width) for prompt in prompts]
    for prompt, tokens, made in zip(prompts, plain, drafted, strict=True):
        _add(report, engine, prompt, tokens, made)
    return report


def _add(
    report: Report,
    engine: Engine,
    prompt: Sequence[int],
    plain: Sequence[int],
    drafted: Generation,
) -> None:
    """Count one prompt, and note where its two outputs part."""
    index = report.prompts
    report.prompts += 1
    report.tokens += len(drafted.token_ids)
    report.steps += drafted.stats.steps
    report.decoded += drafted.stats.tokens
    position = _first_difference(plain, drafted.token_ids)
    if position is not None:
        tokens = (_at(plain, position), _at(drafted.token_ids, position))
        margin = _margin(engine, [*prompt, *plain[:position]], tokens)
        report.mismatches.append(Mismatch(index, position, *tokens, margin))


def _first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    pairs = zip(a, b, strict=False)
    different = next((i for i, (x, y) in enumerate(pairs) if x != y), None)
    if different is None and len(a) != len(b):
        return min(len(a), len(b))
    return different


def _at(tokens: Sequence[int], position: int) -> int | None:
    return tokens[position] if position < len(tokens) else None


def _margin(
    engine: Engine, context: Sequence[int], tokens: tuple[int | None, int | None]
) -> float | None:
    """How far apart the two tokens' logits are after `context`, read in prompt chunks.

    None where an output had ended, or the engine does not return logits.
    """
    if tokens[0] is None or tokens[1] is None or not engine.session.limits.has_logits:
        return None
    chunk = engine.session.limits.prefill_chunk
    logits: np.ndarray[Any, np.dtype[np.float32]] | None = None
    for start in range(0, len(context), chunk):
        part = context[start : start + chunk]
        size = np.full(1, len(part), np.int32)
        rows = StepRows.greedy(
            np.array([part], np.int32), np.full(1, start, np.int32), count=size, known=size
        )
        logits = engine.session.step(0, rows, 0, want_logits=True).logits
    assert logits is not None
    row = logits[0, 0]  # the first verified row is that of the last known token
    return float(row[tokens[0]] - row[tokens[1]])
