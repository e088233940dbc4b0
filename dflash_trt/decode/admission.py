"""The door: what a scheduler takes in, and the checks that a request passes before it waits."""

from __future__ import annotations

import itertools
import math
import operator
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace

from dflash_trt.decode.adjust import History
from dflash_trt.decode.request import MAX_SEED, DecodeStats, SamplingParams
from dflash_trt.decode.slots import Request
from dflash_trt.errors import CapacityError, ConfigError, QueueFull, RequestError
from dflash_trt.runtime.session import SessionLimits
from dflash_trt.text import Tokenizer


@dataclass(frozen=True)
class RunConfig:
    """Choices of a run: how much is taken in, and when to give up. None is the engine's limit."""

    max_waiting: int = 256  # requests beyond those in slots
    max_prompt_tokens: int | None = None  # of one request
    max_output_tokens: int | None = None  # of one request, and the default of its max_tokens
    max_failed_steps: int = 3  # in a row; then the engine is dead
    # A step that has not ended by then never will: the engine is dead. 0: no limit. A step may have
    # kernels to compile when it is the first of its shape, so this is far above what steps take.
    max_step_s: float = 300.0

    def __post_init__(self) -> None:
        for name, value, least in (
            ("max_waiting", self.max_waiting, 0),
            ("max_prompt_tokens", self.max_prompt_tokens, 1),
            ("max_output_tokens", self.max_output_tokens, 1),
            ("max_failed_steps", self.max_failed_steps, 1),
            ("max_step_s", self.max_step_s, 0),
        ):
            if value is not None and not value >= least:  # nor NaN
                raise ConfigError(f"{name} is {value}, allowed are {least} and more")


class Door:
    """Makes checked requests. Keeps nothing of them, so any thread may call it."""

    def __init__(
        self, limits: SessionLimits, config: RunConfig, tokenizer: Tokenizer, eos_ids: Sequence[int]
    ) -> None:
        self._limits = limits
        self._config = config
        self._tokenizer = tokenizer
        self._eos_ids = tuple(eos_ids)
        self._ids = itertools.count()

    def has_room(self, num_requests: int) -> bool:
        """Whether one more may come when so many are not over yet."""
        return num_requests < self._limits.max_slots + self._config.max_waiting

    def check_room(self, num_requests: int) -> None:
        """Raises `QueueFull` unless one more may come when so many are not over yet."""
        if not self.has_room(num_requests):
            raise QueueFull(
                f"{num_requests} requests run or wait, the engine takes no more than that",
                hint="send the request again later",
            )

    def request(
        self, prompt: Sequence[int], params: SamplingParams, now: float, timeout_s: float | None
    ) -> Request:
        """A request that may wait. `now` and its deadline are times of the scheduler's clock.

        Raises `RequestError` for a bad prompt or field, `CapacityError` when it does not fit.
        """
        ids = self._token_ids(prompt)
        max_tokens = self._max_tokens(len(ids), params)
        if params.logprobs is not None and not self._limits.has_logits:
            raise RequestError(
                "this engine does not return logits, so there are no logprobs",
                hint="build it with --logits",
            )
        if timeout_s is not None and not (math.isfinite(timeout_s) and timeout_s > 0):
            raise RequestError(f"the deadline is in {timeout_s} s, allowed are times above 0")
        if params.temperature > 0 and params.seed is None:
            params = replace(params, seed=secrets.randbelow(MAX_SEED + 1))
        stream = self._tokenizer.text_stream(
            params.stop, params.stop_token_ids, eos_ids=self._eos_ids,
            ignore_eos=params.ignore_eos, max_tokens=max_tokens,
        )  # fmt: skip
        return Request(
            request_id=next(self._ids),
            prompt=ids,
            params=params,
            max_tokens=max_tokens,
            stream=stream,
            stats=DecodeStats(self._limits.block),
            history=self._history(ids, max_tokens, params) if params.adjusts_logits else None,
            deadline=math.inf if timeout_s is None else now + timeout_s,
            submitted_at=now,
        )

    def _history(self, prompt: list[int], max_tokens: int, params: SamplingParams) -> History:
        """Raises `RequestError` for a biased id outside the vocabulary, or more ids than fit."""
        bad = next((t for t in params.logit_bias if t >= self._limits.vocab_size), None)
        if bad is not None:
            vocab = self._limits.vocab_size
            raise RequestError(f"logit_bias id {bad} is outside the vocabulary of {vocab}")
        # A word in the middle of a text has a space before it, which is part of its first token.
        texts = [text for word in params.bad_words for text in (word, f" {word}")]
        bad_words = [self._tokenizer.encode(text, add_special_tokens=False) for text in texts]
        end_ids = {*params.stop_token_ids, *(() if params.ignore_eos else self._eos_ids)}
        touched = len(params.logit_bias) + len(bad_words) + len(end_ids)
        if params.has_penalties:  # the text, and the drafts that follow it
            touched += len(prompt) + max_tokens + self._limits.block
        most = self._limits.max_adjusted
        if most is not None and min(touched, self._limits.vocab_size) > most:
            raise RequestError(
                f"penalties, biases and bans may touch {touched} ids, this engine takes {most}",
                hint="bias or ban fewer, or ask for fewer tokens",
            )
        return History(params, prompt, bad_words, sorted(end_ids))

    def _token_ids(self, prompt: Sequence[int]) -> list[int]:
        try:
            ids = [operator.index(token) for token in prompt]
        except TypeError as error:
            raise RequestError("the prompt has token ids that are not whole numbers") from error
        if not ids:
            raise RequestError("the prompt is empty", hint="give at least one token")
        vocab = self._limits.vocab_size
        if min(ids) < 0 or max(ids) >= vocab:
            bad = next(token for token in ids if not 0 <= token < vocab)
            raise RequestError(f"prompt token {bad} is outside the vocabulary of {vocab}")
        return ids

    def _max_tokens(self, num_prompt: int, params: SamplingParams) -> int:
        limit = self._config.max_prompt_tokens
        if limit is not None and num_prompt > limit:
            raise CapacityError(
                f"the prompt has {num_prompt} tokens, allowed are {limit}",
                hint="shorten the prompt",
            )
        room = self._limits.max_seq_len - num_prompt
        if room < 1:
            raise CapacityError(
                f"the prompt has {num_prompt} tokens, the engine holds "
                f"{self._limits.max_seq_len} of prompt and output",
                hint="shorten the prompt, or build with a larger --max-seq-len",
            )
        limit = self._config.max_output_tokens
        if params.max_tokens is None:
            return room if limit is None else min(room, limit)
        if limit is not None and params.max_tokens > limit:
            raise RequestError(
                f"max_tokens is {params.max_tokens}, allowed are 1 to {limit}",
                hint=f"ask for at most {min(limit, room)} tokens",
            )
        if params.max_tokens > room:
            raise CapacityError(
                f"max_tokens {params.max_tokens} and a prompt of {num_prompt} tokens exceed the "
                f"engine's {self._limits.max_seq_len}",
                hint=f"ask for at most {room} tokens, or build with a larger --max-seq-len",
            )
        return params.max_tokens
