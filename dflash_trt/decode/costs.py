"""What a decode step costs: seconds by verify width and number of slots, measured and kept fresh.

The table is measured on the loaded session before the first request, in a bounded time, and follows
the machine from then on. Live length raises the cost of every width alike, so it is not a column:
only the ratio of widths matters to whoever chooses one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from dflash_trt.errors import ConfigError
from dflash_trt.runtime.session import Session, StepRows

F64 = npt.NDArray[np.float64]

WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # what is worth telling apart
SLOTS_FACTOR = 4  # between two measured numbers of slots
BUDGET_S = 2.0
MAX_ROUNDS = 7
LEAST_S, MOST_S = 1e-9, 1e6  # what a step may take
LIVE_TOKENS = 64  # in the caches while measuring
FOLLOW = 0.03  # share of a step's surprise that the table takes over
ALIKE = 0.75  # share of that which other widths take over too: mostly the whole machine drifts
MAX_SURPRISE = math.log(2)  # a step that was interrupted says nothing about its width


class StepCosts:
    """Seconds of a step at `widths` x `slots`; what lies between is interpolated.

    No entry is below that of a smaller width or fewer slots: where measuring said so, the two meet.
    """

    def __init__(
        self, widths: Sequence[int], slots: Sequence[int], seconds: Sequence[Sequence[float]]
    ) -> None:
        """`seconds[i][j]` is for `widths[i]` and `slots[j]`; both ascend from 1.

        Raises `ConfigError` for another table.
        """
        table = np.array(seconds, np.float64)
        ascending = all(
            axis
            and axis[0] == 1
            and all(type(at) is int for at in axis)
            and all(a < b for a, b in pairwise(axis))
            for axis in (list(widths), list(slots))
        )
        if not ascending or table.shape != (len(widths), len(slots)):
            raise ConfigError("a table of step costs has widths and slots that ascend from 1")
        if not ((table >= LEAST_S) & (table <= MOST_S)).all():
            raise ConfigError(f"a table of step costs has {LEAST_S:g} to {MOST_S:g} seconds")
        self.widths, self.slots = tuple(widths), tuple(slots)
        self._logs = np.log(table)
        self._smooth = _monotone(table)

    def at_slots(self, num_slots: int) -> F64:
        """Seconds at each of `widths`."""
        low, share = _place(self.slots, num_slots)
        left = self._smooth[:, low]
        if not share:
            return left
        return left + share * (self._smooth[:, low + 1] - left)

    def seconds(self, width: int, num_slots: int) -> float:
        """Seconds of a step."""
        column = self.at_slots(num_slots)
        low, share = _place(self.widths, width)
        left = float(column[low])
        return left + share * (float(column[low + 1]) - left) if share else left

    def observe(self, width: int, num_slots: int, seconds: float) -> None:
        """A step of this width on so many slots took this long."""
        if seconds <= 0:
            return
        surprise = math.log(seconds / self.seconds(width, num_slots))
        step = FOLLOW * max(-MAX_SURPRISE, min(surprise, MAX_SURPRISE))
        across, along = _weights(self.widths, width), _weights(self.slots, num_slots)
        own = np.outer(across, along)
        self._logs += step * (ALIKE + (1 - ALIKE) * own / (own * own).sum())
        self._smooth = _monotone(np.exp(self._logs))

    def to_json(self) -> dict[str, Any]:
        """Plain types, as `from_json` reads them."""
        return {
            "widths": list(self.widths),
            "slots": list(self.slots),
            "seconds": np.exp(self._logs).tolist(),
        }

    @classmethod
    def from_json(cls, data: Any) -> StepCosts:
        """A stored table. Raises `ConfigError` when it is none."""
        try:
            return cls(data["widths"], data["slots"], data["seconds"])
        except (KeyError, OverflowError, TypeError, ValueError) as error:
            raise ConfigError(f"this is no table of step costs: {error!r}") from error


def widths_of(block: int) -> tuple[int, ...]:
    """The verify widths of a table for this block."""
    return (*(width for width in WIDTHS if width < block), block)


def measure_costs(
    session: Session,
    num_slots: int | None = None,
    budget_s: float = BUDGET_S,
    clock: Callable[[], float] = time.perf_counter,
) -> StepCosts:
    """Measure a session that serves no request yet, on 1 to `num_slots` (default: all) slots.

    The widths that matter most come first. A slow model leaves no time for the others: they are
    interpolated, and more slots are reckoned by the token.
    """
    limits = session.limits
    widths = widths_of(limits.block)
    slots = _slot_axis(num_slots or limits.max_slots)
    start, taken = clock(), dict[tuple[int, int], list[float]]()
    for point in _by_importance(widths, slots):
        # Twice: the first run of a shape also allocates.
        if len(taken) > 2 and clock() - start + 2 * _guess(taken, point) > budget_s / 2:
            continue
        _time_step(session, *point, clock)
        taken[point] = [_time_step(session, *point, clock)]
    for _ in range(1, MAX_ROUNDS):  # round by round, so that a busy moment meets all points alike
        if clock() - start + sum(times[0] for times in taken.values()) > budget_s:
            break
        for point, times in taken.items():
            times.append(_time_step(session, *point, clock))
    for slot in range(slots[-1]):
        session.release(slot)
    medians = {point: float(np.median(times)) for point, times in taken.items()}
    return StepCosts(widths, slots, _filled(widths, slots, medians))


def _time_step(session: Session, width: int, num_slots: int, clock: Callable[[], float]) -> float:
    limits = session.limits
    one = np.ones(num_slots, np.int32)
    live = max(0, min(LIVE_TOKENS, limits.max_seq_len - limits.block))
    tokens = np.zeros((num_slots, width), np.int32)
    rows = StepRows.greedy(tokens, length=one * live, count=one * width, known=one)
    start = clock()
    session.step(0, rows, width - 1)
    return max(clock() - start, LEAST_S)


def _slot_axis(num_slots: int) -> list[int]:
    """1, 4, 16, .. and the last."""
    axis = [1]
    while axis[-1] * SLOTS_FACTOR < num_slots:
        axis.append(axis[-1] * SLOTS_FACTOR)
    return axis + [num_slots] * (axis[-1] != num_slots)


def _by_importance(widths: Sequence[int], slots: Sequence[int]) -> list[tuple[int, int]]:
    """One slot before many; plain decoding, the block, then powers of two, then what is between."""
    first = [1, widths[-1]]
    powers = [w for w in (4, 2, 8, 16, 32, 64) if w in widths and w not in first]
    others = [w for w in widths if w not in first and w not in powers]
    columns = [1, *sorted(slots[1:], reverse=True)]
    return [(width, count) for count in columns for width in (*first, *powers, *others)]


def _guess(taken: dict[tuple[int, int], list[float]], point: tuple[int, int]) -> float:
    """At most about what a step will take: that of a dearer point, or of the tokens in it."""
    width, num_slots = point
    dearer = [t[0] for (w, n), t in taken.items() if w >= width and n >= num_slots]
    most = max(max(t) for t in taken.values())
    return min(dearer) if dearer else most * num_slots


def _filled(
    widths: Sequence[int], slots: Sequence[int], medians: dict[tuple[int, int], float]
) -> list[list[float]]:
    """The whole table from the points that were measured; those of one slot include 1 and K."""
    table = np.zeros((len(widths), len(slots)))
    for column, count in enumerate(slots):
        # A line from plain decoding to drafting would be too low: the drafter comes in at once.
        drafting = [width for width in widths[1:] if (width, count) in medians]
        if {(1, count), (widths[-1], count)} <= medians.keys():
            times = [medians[width, count] for width in drafting]
            table[:, column] = np.interp(widths, drafting, times)
            table[0, column] = medians[1, count]
            continue
        # Each slot more costs what its tokens cost a single one.
        per_token = max(0.0, table[-1, 0] - table[1, 0]) / max(1, widths[-1] - widths[1])
        table[:, column] = table[:, 0] + per_token * (count - 1) * np.array(widths)
    made: list[list[float]] = table.tolist()
    return made


def _monotone(table: F64) -> F64:
    """The middle of the nearest ascending tables above and below; an ascending one stays."""
    above = np.maximum.accumulate(np.maximum.accumulate(table, axis=0), axis=1)
    turned = table[::-1, ::-1]
    below = np.minimum.accumulate(np.minimum.accumulate(turned, axis=0), axis=1)[::-1, ::-1]
    return (above + below) / 2


def _place(axis: Sequence[int], value: int) -> tuple[int, float]:
    """Index of the interval that `value` lies in and how far; beyond the end counts as the end."""
    if value >= axis[-1]:
        return len(axis) - 1, 0.0
    low = max(i for i, at in enumerate(axis) if at <= max(value, 1))
    return low, (value - axis[low]) / (axis[low + 1] - axis[low]) if value > axis[low] else 0.0


def _weights(axis: Sequence[int], value: int) -> F64:
    low, share = _place(axis, value)
    weights = np.zeros(len(axis))
    weights[low] = 1 - share
    if share:
        weights[low + 1] = share
    return weights
