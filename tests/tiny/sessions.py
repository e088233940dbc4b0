"""Sessions that watch, script or guard a real one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dflash_trt.runtime.ort import OrtSession
from dflash_trt.runtime.session import Session, SessionLimits, StepResult, StepRows

GUARD = np.float32(-123456.75)


@dataclass(frozen=True)
class Step:
    """One recorded step."""

    first_slot: int
    rows: StepRows
    num_drafts: int
    result: StepResult

    @property
    def is_prompt(self) -> bool:
        """Whether it read a prompt chunk (an anchor alone also has known = count)."""
        return bool((self.rows.known > 1).any())


class Recording:
    """Passes steps on and keeps them."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.steps: list[Step] = []

    @property
    def limits(self) -> SessionLimits:
        return self._session.limits

    def step(
        self, first_slot: int, rows: StepRows, num_drafts: int, *, want_logits: bool = False
    ) -> StepResult:
        result = self._session.step(first_slot, rows, num_drafts, want_logits=want_logits)
        self.steps.append(Step(first_slot, rows, num_drafts, result))
        return result

    def release(self, slot: int) -> None:
        self._session.release(slot)

    def blocks(self, prompt_length: int) -> list[tuple[list[int], int]]:
        """(drafts verified, tokens committed) of every decode step of a request run alone."""
        return [
            (step.rows.tokens[0, 1 : step.rows.count[0]].tolist(), int(step.result.committed[0]))
            for step in self.steps
            if step.rows.length[0] >= prompt_length
        ]


class Scripted(Recording):
    """Replaces the drafts of every result: `script(slot, position, count)` gives the new ones.

    `position` is the position of the bonus token, so the drafts are for position + 1 and on.
    """

    def __init__(self, session: Session, script: Callable[[int, int, int], Sequence[int]]) -> None:
        super().__init__(session)
        self._script = script

    def step(
        self, first_slot: int, rows: StepRows, num_drafts: int, *, want_logits: bool = False
    ) -> StepResult:
        result = super().step(first_slot, rows, num_drafts, want_logits=want_logits)
        tokens = result.next_tokens.copy()
        for row, (length, committed) in enumerate(zip(rows.length, result.committed, strict=True)):
            if rows.count[row] and num_drafts:
                drafts = self._script(first_slot + row, int(length + committed), num_drafts)
                tokens[row, 1:] = list(drafts)[:num_drafts]
        return dataclasses.replace(result, next_tokens=tokens)


class Guarded(OrtSession):
    """A session whose caches lie between guard values, and start as garbage, not as zeros."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._buffers: list[tuple[npt.NDArray[np.float32], int]] = []
        super().__init__(*args, **kwargs)
        self.poison()

    def _allocate(self, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
        margin = shape[2] * shape[3]
        buffer = np.full(int(np.prod(shape)) + 2 * margin, GUARD, np.float32)
        self._buffers.append((buffer, margin))
        cache = buffer[margin:-margin].reshape(shape)
        _poison(cache)
        return cache

    def poison(self, value: float = 1e30) -> None:
        """Fill every cache with huge values of both signs: nothing may read them."""
        for cache in self.caches.values():
            _poison(cache, value)

    def check_guards(self) -> None:
        """Fail when a step wrote outside of the caches."""
        for buffer, margin in self._buffers:
            np.testing.assert_array_equal(buffer[:margin], GUARD)
            np.testing.assert_array_equal(buffer[-margin:], GUARD)

    def snapshot(self, slot: int) -> dict[str, bytes]:
        """The bytes of one slot in every cache."""
        return {name: cache[slot].tobytes() for name, cache in self.caches.items()}


def _poison(cache: npt.NDArray[np.float32], value: float = 1e30) -> None:
    cache[...] = value
    cache[..., ::2] = -value
