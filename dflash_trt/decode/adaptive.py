"""The verify width with the best expected tokens per second, chosen anew at every decode step.

Expected tokens come from `acceptance`, seconds from `costs`. A step that drafts shows by itself
how well drafting goes. Plain decoding shows nothing, so once in a while a few steps draft on trial;
what trials may cost is a small share of the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dflash_trt.decode.acceptance import AcceptanceModel
from dflash_trt.decode.costs import StepCosts
from dflash_trt.decode.request import DecodeStats

F64 = npt.NDArray[np.float64]

MARGIN = 1.01  # a new width must be that much better: at a tie, noise would switch all the time
START_MARGIN = 1.02  # to begin drafting: its first step drafts and has nothing to verify
STOP_MARGIN = 1.03  # to end it: plain decoding shows no more what drafting would bring
TRIAL_SHARE = 0.015  # of all time spent decoding
TRIAL_STEPS = 6  # verified before a trial may end
SAVED_TRIALS = 4  # as much unspent time as so many cost is kept, no more
PROVEN_STEPS = 16  # verified at a profit: no trial any more
TRIAL_WIDTH = 4  # at least: one draft alone would show little
TRIAL_FADE = 0.5  # what was seen before the plain stretch is old
FIRST_PAUSE, LONGEST_PAUSE = 8, 512  # plain steps of a request before a trial; each doubles them
LONGEST_FIRST_PAUSE = 32  # of a new request, which may be of another kind than those before


class AdaptiveWidth:
    """A `WidthPolicy`. Not thread-safe: it belongs to one scheduler."""

    def __init__(self, costs: StepCosts, block: int) -> None:
        self.costs = costs
        # Only widths of the table: no others were measured, and each is one more shape to run.
        self._widths = [width for width in costs.widths if width <= block]
        self._indices = np.array(self._widths) - 1
        self._model = AcceptanceModel(block)
        self._trials = _Trials()
        self._width = self._widths[-1]

    def width(self, stats: Sequence[DecodeStats]) -> int:
        """See `WidthPolicy.width`."""
        accepted = self._model.update(stats)
        if not stats:
            return self._width
        seconds = self.costs.at_slots(len(stats))[: len(self._widths)]
        tokens = self._model.expected_tokens()[self._indices] / len(stats)
        rates = tokens / seconds
        plain = float(seconds[0])
        if accepted is not None:
            self._trials.verified(accepted * plain)
        chosen = self._best(rates)
        if self._trials.must_go_on(stats, chosen):
            chosen = self._width
        elif chosen == 1:
            trial = self._trial_index(rates)
            first = float(seconds[trial]) - plain  # drafts, and has nothing to verify
            others = max(0.0, float(seconds[trial] - tokens[trial] * plain))
            if self._trials.begin(stats, first, TRIAL_STEPS * others):
                self._model.fade(TRIAL_FADE)
                chosen = self._widths[trial]
        self._width = chosen
        return chosen

    def observe(self, width: int, num_slots: int, seconds: float, is_prefill: bool) -> None:
        """See `WidthPolicy.observe`."""
        if is_prefill:
            return
        self._trials.account(seconds, self.costs.seconds(1, num_slots))
        if width == self._width:  # else it was cut short at a request's end
            self.costs.observe(width, num_slots, seconds)

    def _best(self, rates: F64) -> int:
        best = int(rates.argmax())
        current = self._widths.index(self._width)
        margin = START_MARGIN if current == 0 else MARGIN if best else STOP_MARGIN
        return self._widths[best if rates[best] > margin * rates[current] else current]

    def _trial_index(self, rates: F64) -> int:
        """The drafting width that promises most, if it is wide enough to show something."""
        enough = next((i for i, w in enumerate(self._widths) if w >= TRIAL_WIDTH), len(rates) - 1)
        return max(1 + int(rates[1:].argmax()), enough)


@dataclass
class _Pause:
    """Since when a request decodes plainly, in its own steps, and for how long it shall."""

    stats: DecodeStats
    verified: int = 0
    since: int = 0
    length: int = FIRST_PAUSE


class _Trials:
    """When plain decoding tries to draft, and what that may cost."""

    def __init__(self) -> None:
        self._verified: int | None = None  # steps with drafts in the trial that runs
        self._credit = 0.0  # seconds
        self._pause = FIRST_PAUSE  # of a new request
        self._pauses: dict[int, _Pause] = {}  # by id of the stats, which the pause keeps alive

    def verified(self, gain: float) -> None:
        """A step verified drafts, which saved so many seconds of plain decoding."""
        if self._verified is not None:
            self._verified += 1
            self._credit += gain

    def must_go_on(self, stats: Sequence[DecodeStats], chosen: int) -> bool:
        """Whether a trial has not shown enough; else, `chosen` ends it if that is 1."""
        if self._verified is None:
            return False
        if self._verified < TRIAL_STEPS:
            return True
        if chosen == 1:
            for pause in self._of(stats):
                pause.length = min(2 * pause.length, LONGEST_PAUSE)
            self._pause = min(2 * self._pause, LONGEST_FIRST_PAUSE)
            self._verified = None
        elif self._verified >= PROVEN_STEPS:
            self._pauses.clear()
            self._pause = FIRST_PAUSE
            self._verified = None
        return False

    def begin(self, stats: Sequence[DecodeStats], first: float, others: float) -> bool:
        """Begin a trial if one is due and there is credit for its first step and the others."""
        cost = first + others
        pauses = self._of(stats)
        is_due = any(pause.stats.steps - pause.since >= pause.length for pause in pauses)
        self._credit = min(self._credit, SAVED_TRIALS * cost)
        if not is_due or cost > self._credit:
            return False
        self._verified = 0
        self._credit -= first  # a step that changes the width is not observed
        return True

    def account(self, seconds: float, plain: float) -> None:
        """A decode step took `seconds`, and a plain one would have taken `plain`."""
        self._credit += TRIAL_SHARE * seconds
        if self._verified is not None:
            self._credit -= seconds - plain

    def _of(self, stats: Sequence[DecodeStats]) -> list[_Pause]:
        """The pauses of these requests, up to date; those of others are forgotten."""
        known = self._pauses
        self._pauses = {
            id(one): known.get(id(one)) or _Pause(one, length=self._pause) for one in stats
        }
        for pause in self._pauses.values():
            if pause.stats.offered[0] != pause.verified:
                pause.verified, pause.since = pause.stats.offered[0], pause.stats.steps
        return list(self._pauses.values())
