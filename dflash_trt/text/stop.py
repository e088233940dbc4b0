"""Decides at which token a text ends, and keeps back what may still become a stop string.

Conventions (those of OpenAI's API and vLLM):
* A stop id (an end-of-sequence id, or one the request names) is a generated token: it counts in
  the output's ids. Its text is never shown.
* A stop string is matched on text, never on ids. The output's ids end with the token that
  completed it; the text is cut before it.
* The first stop string to be complete wins; of several that end at the same character, the
  longest. So the text does not depend on how characters are grouped into tokens or blocks.
* Stopping is tested before the length cap: a stop at the last allowed token is "stop".
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from dflash_trt.errors import RequestError

MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256

# Why an output ended. The first two are decided here, the others from outside: by the client, its
# deadline, an engine that is closed, or a step that failed.
FinishReason = Literal["stop", "length", "cancelled", "timeout", "shutdown", "error"]


@dataclass(frozen=True)
class StopResult:
    """What one token brought: text now free to show, and why the output ends here, if it does."""

    text: str
    reason: FinishReason | None = None
    matched: str | int | None = None


class _Matcher:
    """Knuth-Morris-Pratt for one stop string: one character in, length of the match so far out."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.matched = 0
        self._fallback = [0] * len(pattern)
        length = 0
        for index in range(1, len(pattern)):
            while length and pattern[index] != pattern[length]:
                length = self._fallback[length - 1]
            length += pattern[index] == pattern[length]
            self._fallback[index] = length

    def advance(self, char: str) -> int:
        """Take one character. Must not be called again after a full match."""
        while self.matched and char != self.pattern[self.matched]:
            self.matched = self._fallback[self.matched - 1]
        self.matched += char == self.pattern[self.matched]
        return self.matched


class StopChecker:
    """Stop rules of one request, fed token by token, in host memory only."""

    def __init__(
        self,
        stop_strings: Sequence[str] = (),
        stop_ids: Collection[int] = (),
        *,
        eos_ids: Collection[int] = (),
        ignore_eos: bool = False,
        max_tokens: int | None = None,
    ) -> None:
        """`ignore_eos` ignores `eos_ids` (the model's), never `stop_ids` (the request's).

        Raises `RequestError` for a bad stop string, stop id or `max_tokens`.
        """
        _check_stop_strings(stop_strings)
        _check_stop_ids(stop_ids)
        if max_tokens is not None and max_tokens < 1:
            raise RequestError(f"max_tokens {max_tokens} is out of range: at least 1")
        self._matchers = [_Matcher(text) for text in dict.fromkeys(stop_strings)]
        self._first_chars = frozenset(text[0] for text in stop_strings)
        self._ids = frozenset(stop_ids) | (frozenset() if ignore_eos else frozenset(eos_ids))
        self._max_tokens = max_tokens
        self._held = ""
        self._cut = False
        self.num_tokens = 0
        self.reason: FinishReason | None = None

    @property
    def needs_text(self) -> bool:
        """Whether there are stop strings; without, `feed_ids` is enough."""
        return bool(self._matchers)

    def feed_ids(self, ids: Sequence[int]) -> tuple[int, int | None]:
        """Take tokens whose text does not matter: how many are output, and the stop id if it came.

        The stop id is the last of them. After the end, call nothing.
        """
        assert self.reason is None, "fed after the end"
        room = len(ids) if self._max_tokens is None else self._max_tokens - self.num_tokens
        end = next((i for i, token in enumerate(ids[:room]) if token in self._ids), None)
        count = min(len(ids), room) if end is None else end + 1
        self.num_tokens += count
        if end is not None:
            self.reason = "stop"
        elif self.num_tokens == self._max_tokens:
            self.reason = "length"
        return count, None if end is None else ids[end]

    def is_stop_id(self, token_id: int) -> bool:
        """True for an id that ends the output; its text must not be shown."""
        return token_id in self._ids

    def feed(self, token_id: int, delta: str) -> StopResult:
        """Take one generated token and the text it made certain; return the text to show.

        The delta of a stop id is ignored. After a result with a reason, call only `finish`.
        """
        assert self.reason is None, "fed after the end"
        self.num_tokens += 1
        text = ""
        matched: str | int | None = token_id
        if token_id not in self._ids:
            text, matched = self._release(delta)
        if matched is not None:
            self.reason = "stop"
        elif self.num_tokens == self._max_tokens:
            self.reason = "length"
        return StopResult(text, self.reason, matched)

    def finish(self, tail: str = "") -> str:
        """Return the text still kept back, once no token follows; `tail` is `Detokenizer.flush()`.

        Empty after a stop string: what follows it is never shown.
        """
        if self._cut:
            return ""
        text, _ = self._release(tail)
        if not self._cut:
            text, self._held = text + self._held, ""
        return text

    def _release(self, delta: str) -> tuple[str, str | None]:
        if not self._matchers:
            return delta, None
        if not self._held and self._first_chars.isdisjoint(delta):
            return delta, None
        text = self._held + delta
        end = len(self._held)
        for char in delta:
            end += 1
            done = [m.pattern for m in self._matchers if m.advance(char) == len(m.pattern)]
            if done:
                longest = max(done, key=len)
                self._held, self._cut = "", True
                return text[: end - len(longest)], longest
        shown = end - max(matcher.matched for matcher in self._matchers)
        self._held = text[shown:]
        return text[:shown], None


def _check_stop_strings(stop_strings: Sequence[str]) -> None:
    if isinstance(stop_strings, str):
        raise RequestError("stop must be a list of strings, not one string")
    if len(stop_strings) > MAX_STOP_STRINGS:
        raise RequestError(f"{len(stop_strings)} stop strings: at most {MAX_STOP_STRINGS}")
    for index, text in enumerate(stop_strings):
        if not isinstance(text, str):
            raise RequestError(f"stop[{index}] is a {type(text).__name__}, not a string")
        if not 1 <= len(text) <= MAX_STOP_CHARS:
            allowed = f"1 to {MAX_STOP_CHARS}"
            raise RequestError(f"stop[{index}] has {len(text)} characters: {allowed} are allowed")


def _check_stop_ids(stop_ids: Collection[int]) -> None:
    for token_id in stop_ids:
        if isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0:
            raise RequestError(f"stop token id {token_id!r} is not a whole number from 0")
