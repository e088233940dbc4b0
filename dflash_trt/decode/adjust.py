"""What a request's history does to the logits of the next rows: penalties, biases, bans.

The host knows a row's drafts before they are verified, so each row's history is exact: it holds
the drafts before that row, which are in the output whenever that row's choice counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dflash_trt.decode.request import SamplingParams
from dflash_trt.runtime.session import F32, I32, AdjustRows

BANNED = np.float32(-1e30)


@dataclass(frozen=True)
class SlotAdjustment:
    """Adjustments of one slot's rows: arrays [R, P]."""

    ids: I32
    seen: F32
    count: F32
    bias: F32


class History:
    """Prompt and output of one request, as penalties, biases and bans need them."""

    def __init__(
        self,
        params: SamplingParams,
        prompt: Sequence[int],
        bad_words: Sequence[Sequence[int]],
        end_ids: Sequence[int],
    ) -> None:
        """`bad_words` as ids; `end_ids` are banned until `min_tokens` are out."""
        self._params = params
        self._text = list(prompt)
        self._num_prompt = len(self._text)
        self._bad_words = [tuple(word) for word in bad_words if word]
        self._end_ids = tuple(end_ids)
        self._places: dict[int, int] = {}
        self._ids = np.zeros(64, np.int32)
        self._state = np.zeros((3, 64), np.float32)  # seen, count, bias of each place
        for token, bias in params.logit_bias.items():
            self._state[2, self._place(token)] = bias
        if params.has_penalties:
            for token in self._text:
                self._state[0, self._place(token)] = 1.0

    def extend(self, tokens: Sequence[int]) -> None:
        """Note tokens that were delivered."""
        self._text.extend(tokens)
        if self._params.has_penalties:
            for token in tokens:
                place = self._place(token)
                self._state[0, place] = 1.0
                self._state[1, place] += 1.0

    def rows(self, drafts: Sequence[int], num_rows: int) -> SlotAdjustment:
        """Adjustments of `num_rows` rows; row r comes after the first r of `drafts`.

        Rows past the drafts are like the last one: their choice does not count.
        """
        bans = [self._banned(drafts[:r]) for r in range(min(num_rows, len(drafts) + 1))]
        banned = [[self._place(token) for token in row] for row in bans]
        places = [self._place(token) for token in drafts] if self._params.has_penalties else []
        num_ids = max(1, len(self._places))
        state = np.repeat(self._state[:, None, :num_ids], num_rows, axis=1)
        for r, place in enumerate(places[: num_rows - 1], start=1):
            state[0, r:, place] = 1.0
            state[1, r:, place] += 1.0
        for r, row in enumerate(banned):
            state[2, r, row] = BANNED
        ids = np.tile(self._ids[:num_ids], (num_rows, 1))
        return SlotAdjustment(ids, state[0], state[1], state[2])

    def _banned(self, drafts: Sequence[int]) -> list[int]:
        """Ids that may not follow the text and these drafts."""
        num_output = len(self._text) - self._num_prompt + len(drafts)
        banned = list(self._end_ids) if num_output < self._params.min_tokens else []
        for word in self._bad_words:
            before = len(word) - 1
            tail = [*self._text[-before:], *drafts][-before:] if before else []
            if tuple(tail) == word[:-1]:
                banned.append(word[-1])
        return banned

    def _place(self, token: int) -> int:
        place = self._places.setdefault(token, len(self._places))
        if place == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._state = np.concatenate([self._state, np.zeros_like(self._state)], axis=1)
        self._ids[place] = token
        return place


def join(
    slots: Sequence[tuple[SamplingParams, SlotAdjustment | None]], num_rows: int
) -> AdjustRows | None:
    """One step's adjustments, None when no slot has any; short rows are padded by repetition."""
    most = max((a.ids.shape[1] for _, a in slots if a is not None), default=0)
    if not most:
        return None
    empty = np.zeros((num_rows, 1), np.float32)
    nothing = SlotAdjustment(empty.astype(np.int32), empty, empty, empty)

    def padded(name: str) -> list[F32]:
        arrays = [getattr(a or nothing, name) for _, a in slots]
        return [np.pad(x, ((0, 0), (0, most - x.shape[1])), mode="edge") for x in arrays]

    def strength(name: str) -> F32:
        return np.array([getattr(params, name) for params, _ in slots], np.float32)

    return AdjustRows(
        repetition=strength("repetition_penalty"),
        presence=strength("presence_penalty"),
        frequency=strength("frequency_penalty"),
        ids=np.stack(padded("ids")).astype(np.int32),
        seen=np.stack(padded("seen")),
        count=np.stack(padded("count")),
        bias=np.stack(padded("bias")),
    )
