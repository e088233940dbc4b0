"""How far drafts are accepted: what the live requests' counts say about every verify width.

A draft is reached only when all before it were accepted, so the model is one chance per position:
accepted, given that it was reached. All requests share a profile over positions; a request shifts
it up or down as a whole (one number, in logits), and where it has counts of its own they weigh in.
So a request that runs at a narrow width has an estimate for wider ones, and a new request starts
from what the engine has seen lately.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dflash_trt.decode.request import DecodeStats

F64 = npt.NDArray[np.float64]

PRIOR = 0.85  # before anything was seen: hopeful, since a few steps of drafting correct it
PROFILE_WEIGHT = 4.0  # steps' worth of belief that a position is like the one before it
OWN_WEIGHT = 24.0  # steps' worth of belief that a request follows the shifted profile
LEAST_VARIANCE, MOST_VARIANCE = 0.1, 4.0  # of the shifts between requests, in squared logits
VARIANCE_FOLLOW = 1 / 64  # per step
MAX_SHIFT = 5.0
PROFILE_KEEP = 1 - 1 / 512  # per step of a request that verified drafts
OWN_KEEP = 1 - 1 / 32  # likewise: text changes within a request, and soon


class AcceptanceModel:
    """Estimates for the requests of the last `update`. What was seen fades only as more is seen."""

    def __init__(self, block: int) -> None:
        num = block - 1
        self._reached, self._accepted = np.zeros(num), np.zeros(num)
        self._variance = 1.0
        self._live: list[DecodeStats] = []
        # One row per live request.
        self._counts = np.zeros((0, 2, num))  # offered and accepted, as last read
        self._own = np.zeros((0, 2, num))  # reached and accepted, fading
        self._shift = np.zeros(0)

    def update(self, stats: Sequence[DecodeStats]) -> float | None:
        """Take in what these requests verified since the last call.

        The drafts accepted, as a mean over all requests; None when no draft was verified.
        """
        changed = len(stats) != len(self._live) or any(
            new is not old for new, old in zip(stats, self._live, strict=True)
        )
        if changed:
            self._seat(stats)
        counts = _counts(stats, self._counts.shape[2])
        gained, self._counts = counts - self._counts, counts
        offered, accepted = gained[:, 0], gained[:, 1]
        tried = offered.any(axis=1)
        num_tried = int(np.count_nonzero(tried))
        if not num_tried:
            return None
        before = np.concatenate([offered[:, :1], accepted[:, :-1]], axis=1)
        news = np.stack([np.minimum(offered, before), accepted], axis=1)
        # A position that is not tried fades too: in the end it is believed to be like the one
        # before it, and so is tried again.
        self._own *= np.where(tried, OWN_KEEP, 1.0)[:, None, None]
        self._own += news
        reached, taken = news.sum(axis=0)
        keep = PROFILE_KEEP**num_tried
        self._reached = self._reached * keep + reached
        self._accepted = self._accepted * keep + taken
        self._fit_shifts()
        return float(taken.sum()) / len(stats)

    def fade(self, factor: float) -> None:
        """Believe less in what the live requests have shown: it is old."""
        self._own *= factor

    def expected_tokens(self) -> F64:
        """Tokens that a step at each width 1..K brings to all live requests together."""
        reached, accepted = self._own[:, 0], self._own[:, 1]
        chance = _sigmoid(self._profile() + self._shift[:, None])
        chance = (accepted + OWN_WEIGHT * chance) / (reached + OWN_WEIGHT)
        drafts = np.cumsum(np.cumprod(chance, axis=1).sum(axis=0))
        tokens: F64 = np.concatenate([[0.0], drafts]) + len(self._live)
        return tokens

    def _fit_shifts(self) -> None:
        """Each request's likeliest shift, and how much requests differ in it at all."""
        logits = self._profile()
        reached, accepted = self._own[:, 0], self._own[:, 1]
        doubt = np.full(len(self._live), self._variance)
        for _ in range(2):  # Newton, from the last step's shift: it hardly moves between steps
            chance = _sigmoid(logits + self._shift[:, None])
            slope = (accepted - reached * chance).sum(axis=1) - self._shift / self._variance
            doubt = 1 / ((reached * chance * (1 - chance)).sum(axis=1) + 1 / self._variance)
            moved = self._shift + (slope * doubt).clip(-1, 1)
            self._shift = moved.clip(-MAX_SHIFT, MAX_SHIFT)
        # One step of expectation-maximisation, slowly: requests alike pull a new one to the
        # average, requests that differ let it go its own way.
        spread = float((self._shift**2 + doubt).mean())
        self._variance += VARIANCE_FOLLOW * (spread - self._variance)
        self._variance = min(max(self._variance, LEAST_VARIANCE), MOST_VARIANCE)

    def _profile(self) -> F64:
        """Logits of the shared chances."""
        chance, chances = PRIOR, []
        for reached, accepted in zip(self._reached.tolist(), self._accepted.tolist(), strict=True):
            chance = (accepted + PROFILE_WEIGHT * chance) / (reached + PROFILE_WEIGHT)
            chances.append(chance)
        bounded = np.clip(np.array(chances), 0.01, 0.99)
        logits: F64 = np.log(bounded / (1 - bounded))
        return logits

    def _seat(self, stats: Sequence[DecodeStats]) -> None:
        """Rows for these requests: a known one keeps its own, a new one starts from nothing."""
        row_of = {id(old): row for row, old in enumerate(self._live)}
        rows = [row_of.get(id(new), -1) for new in stats]
        num = self._counts.shape[2]
        # A row of zeros at the end, for index -1: what a new request has done so far is all news.
        fresh = np.zeros((1, 2, num))
        own = np.concatenate([self._own, fresh])[rows]
        shift = np.append(self._shift, 0.0)[rows]
        counts = np.concatenate([self._counts, fresh])[rows]
        self._own, self._shift, self._counts = own, shift, counts
        self._live = list(stats)


def _counts(stats: Sequence[DecodeStats], num: int) -> F64:
    rows = [(one.offered, one.accepted) for one in stats]
    return np.array(rows, np.float64).reshape(len(rows), 2, num)


def _sigmoid(x: F64) -> F64:
    chance: F64 = 1 / (1 + np.exp(-x))
    return chance
