"""Text of one request: blocks of token ids in, text that is safe to show out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dflash_trt.text.detokenize import Detokenizer
from dflash_trt.text.stop import FinishReason, StopChecker


@dataclass(frozen=True)
class BlockResult:
    """How much of a block belongs to the output: its first `num_tokens` ids and `text`."""

    num_tokens: int
    text: str
    reason: FinishReason | None = None
    matched: str | int | None = None


class TextStream:
    """Joins a detokenizer and a stop checker; the one object a slot needs for its text."""

    def __init__(self, detokenizer: Detokenizer, checker: StopChecker) -> None:
        self._detokenizer = detokenizer
        self._checker = checker

    @property
    def num_tokens(self) -> int:
        """Tokens of the output so far, the stopping one included."""
        return self._checker.num_tokens

    @property
    def reason(self) -> FinishReason | None:
        """Why the output ended; None while it goes on."""
        return self._checker.reason

    def push(self, ids: Sequence[int]) -> BlockResult:
        """Take the ids that one step committed; ids behind the stopping one are left out.

        The result that has a reason also holds the text kept back so far, so nothing remains.
        """
        if not self._checker.needs_text:
            return self._push_ids(ids)
        parts = []
        for index, token_id in enumerate(ids):
            stopping = self._checker.is_stop_id(token_id)
            delta = "" if stopping else self._detokenizer.push([token_id])
            result = self._checker.feed(token_id, delta)
            parts.append(result.text)
            if result.reason is not None:
                parts.append(self.finish())
                return BlockResult(index + 1, "".join(parts), result.reason, result.matched)
        return BlockResult(len(ids), "".join(parts))

    def _push_ids(self, ids: Sequence[int]) -> BlockResult:
        """`push` without stop strings: all ids at once, which most requests are."""
        count, stop_id = self._checker.feed_ids(ids)
        text = self._detokenizer.push(ids[: count if stop_id is None else count - 1])
        if self._checker.reason is not None:
            text += self.finish()
        return BlockResult(count, text, self._checker.reason, stop_id)

    def finish(self) -> str:
        """Return the text kept back; call it when the output ends from outside (cancelled)."""
        return self._checker.finish(self._detokenizer.flush())
