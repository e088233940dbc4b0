"""A session without a model: next tokens are a hash of the text, drafts are right by chance.

Its caches behave as real ones do: they hold what a step wrote, garbage past the committed length,
and nothing of value in a slot that was given back. So a scheduler that mixes up lengths, slots or
rows gets other tokens than `Toy.solo`, which knows of none of these.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models

from dflash_trt.decode.request import Delta, SamplingParams
from dflash_trt.decode.scheduler import Scheduler
from dflash_trt.decode.width import FixedWidth
from dflash_trt.runtime.session import SessionLimits, StepResult, StepRows
from dflash_trt.text import Tokenizer

VOCAB = 64
EOS = VOCAB - 1
START = 0x9E3779B97F4A7C15
GARBAGE = -1
BITS = (1 << 64) - 1


def mix(state: int, token: int) -> int:
    """The hash of a text with one more token."""
    state = (state ^ (token + 1)) * 0xBF58476D1CE4E5B9 & BITS
    return state ^ (state >> 29)


def choice(state: int, temperature: float, seed: int) -> int:
    """The token after a text: greedy ones depend on the text alone."""
    number = mix(state, seed + 7) if temperature else state
    return (number >> 7) % VOCAB


def toy_tokenizer() -> Tokenizer:
    """One printable character per token."""
    vocab = {chr(0x30 + index): index for index in range(VOCAB)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend, special_tokens={}, templates={}, source="toy")


TOKENIZER = toy_tokenizer()


@dataclass
class Call:
    """One step that the session ran."""

    first_slot: int
    rows: StepRows
    num_drafts: int

    @property
    def slots(self) -> list[int]:
        """The slots that were not idle."""
        return [self.first_slot + i for i, count in enumerate(self.rows.count) if count]


@dataclass
class ToySession:
    """`right` is the chance of a draft; `on_step` may raise, sleep or watch before a step."""

    limits: SessionLimits
    right: float = 0.7
    on_step: Callable[[Call], None] = lambda call: None
    keep_calls: bool = True
    calls: list[Call] = field(default_factory=list)
    released: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        rows = self.limits.max_seq_len + 2 * self.limits.block
        # [slot][position]: the hash of the text before it.
        self._texts = [[GARBAGE] * (rows + 1) for _ in range(self.limits.max_slots)]

    def step(
        self, first_slot: int, rows: StepRows, num_drafts: int, *, want_logits: bool = False
    ) -> StepResult:
        call = Call(first_slot, rows, num_drafts)
        if self.keep_calls:
            self.calls.append(call)
        self.on_step(call)
        num_slots = len(rows.tokens)
        committed = np.zeros(num_slots, np.int32)
        next_tokens = np.full((num_slots, 1 + num_drafts), VOCAB - 2, np.int32)
        for i in range(num_slots):
            done = self._row(first_slot + i, i, rows, num_drafts)
            if done is not None:
                committed[i], next_tokens[i] = done
        return StepResult(committed, next_tokens)

    def _row(
        self, slot: int, i: int, rows: StepRows, num_drafts: int
    ) -> tuple[int, list[int]] | None:
        text, length, count = self._texts[slot], int(rows.length[i]), int(rows.count[i])
        width = rows.tokens.shape[1]
        assert length + width <= self.limits.max_seq_len + self.limits.block
        text[0] = START
        for position in range(length + 1 + count, length + width + self.limits.block):
            text[position] = GARBAGE  # a step writes full rows, whatever counts
        if not count:
            return None
        assert text[length] != GARBAGE, "read a row that was never written"
        for j, token in enumerate(rows.tokens[i, :count].tolist()):
            text[length + j + 1] = mix(text[length + j], token)
        how = (float(rows.temperature[i]), int(rows.seed[i]))
        committed = int(rows.known[i])
        while committed < count and rows.tokens[i, committed] == choice(
            text[length + committed], *how
        ):
            committed += 1
        state = text[length + committed]
        next_row = [choice(state, *how)]
        for _ in range(num_drafts):
            state = mix(state, next_row[-1])
            right = choice(state, *how)
            lucky = (state >> 20) % 1000 < 1000 * self.right
            next_row.append(right if lucky else (right + 1) % VOCAB)
        return committed, next_row

    def release(self, slot: int) -> None:
        if self.keep_calls:
            self.released.append(slot)
        self._texts[slot] = [GARBAGE] * len(self._texts[slot])


def limits(**changes: int) -> SessionLimits:
    sizes = {"block": 4, "max_seq_len": 96, "max_slots": 3, "prefill_chunk": 5}
    return SessionLimits(**{**sizes, **changes}, vocab_size=VOCAB)


def scheduler(session: ToySession, width: int | None = None, **options: object) -> Scheduler:
    policy = FixedWidth(session.limits.block if width is None else width)
    return Scheduler(session, TOKENIZER, [EOS], policy, **options)  # type: ignore[arg-type]


def solo(prompt: Sequence[int], params: SamplingParams) -> tuple[list[int], str, str]:
    """Tokens, text and finish reason of a request alone, from the rules themselves."""
    assert params.max_tokens is not None
    ids: list[int] = []
    shown = ""
    while True:
        state = START
        for token in [*prompt, *ids]:
            state = mix(state, token)
        ids.append(choice(state, params.temperature, params.seed))
        ends = set(params.stop_token_ids) | (set() if params.ignore_eos else {EOS})
        if ids[-1] in ends:
            return ids, shown, "stop"
        shown += chr(0x30 + ids[-1])
        cuts = [shown.find(stop) for stop in params.stop if stop in shown]
        if cuts:
            return ids, shown[: min(cuts)], "stop"
        if len(ids) == params.max_tokens:
            return ids, shown, "length"


def random_job(rng: random.Random, most: int = 30) -> tuple[list[int], SamplingParams]:
    """A prompt and parameters of any kind."""
    prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 20))]
    stop = ["".join(chr(0x30 + rng.randrange(VOCAB)) for _ in range(rng.randint(1, 2)))]
    params = SamplingParams(
        max_tokens=rng.randint(1, most),
        temperature=rng.choice([0.0, 0.8]),
        seed=rng.randrange(1 << 40),
        stop=stop if rng.random() < 0.4 else (),
        stop_token_ids=[rng.randrange(VOCAB)] if rng.random() < 0.2 else (),
        ignore_eos=rng.random() < 0.3,
    )
    return prompt, params


class Client:
    """Joins deltas, and checks that they are in order."""

    def __init__(self) -> None:
        self.jobs: dict[int, tuple[list[int], SamplingParams]] = {}
        self.tokens: dict[int, list[int]] = defaultdict(list)
        self.text: dict[int, str] = defaultdict(str)
        self.last: dict[int, Delta] = {}

    def submit(self, to: Scheduler, job: Any, deadline_s: float | None = None) -> int:
        request, _ = to.submit(*job, deadline_s)
        self.jobs[request] = job
        return request

    def take(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            assert delta.request_id not in self.last, "nothing may come after the end"
            self.tokens[delta.request_id] += delta.token_ids
            self.text[delta.request_id] += delta.text
            if delta.finish_reason is not None:
                self.last[delta.request_id] = delta

    def run(self, on: Scheduler) -> None:
        while on.has_work:
            self.take(on.step())

    def check(self) -> None:
        """Every request has what it gets alone; one that was ended has the start of that."""
        assert set(self.last) == set(self.jobs)
        for request, job in self.jobs.items():
            tokens, text, reason = solo(*job)
            mine, ended = self.tokens[request], self.last[request].finish_reason
            if ended in ("stop", "length"):
                assert (mine, self.text[request], ended) == (tokens, text, reason)
            else:
                assert mine == tokens[: len(mine)]
                assert len(mine) < len(tokens)
                assert self.text[request] == TOKENIZER.decode(mine)
