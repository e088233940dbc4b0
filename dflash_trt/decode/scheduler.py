"""Runs requests on a session: admits, reads prompts in chunks, decodes blocks, retires.

One call of `step` is one step of the session. Prompt chunks and decoding alternate while both
have work, so neither starves the other.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence

import numpy as np

from dflash_trt.decode.request import DecodeStats, Delta, SamplingParams
from dflash_trt.decode.slots import Slot
from dflash_trt.errors import CapacityError, ConfigError, RequestError
from dflash_trt.runtime.session import Session, StepRows
from dflash_trt.text import BlockResult, StopChecker, TextStream, Tokenizer


class Scheduler:
    """Continuous batching over the slots of one session. Not thread-safe."""

    def __init__(
        self,
        session: Session,
        tokenizer: Tokenizer,
        eos_ids: Sequence[int],
        width: int,
        padded_width: int | None = None,
    ) -> None:
        """`width` is the number of tokens that a decode step verifies: 1 is plain decoding.

        `padded_width` fills decode rows up with invalid tokens, so that plain decoding runs the
        very shapes of a wider verification. Raises `ConfigError` out of range.
        """
        limits = session.limits
        shape = width if padded_width is None else padded_width
        if not 1 <= width <= shape <= limits.block:
            raise ConfigError(f"verify width is {shape}, allowed are 1 to {limits.block}")
        self._session = session
        self._tokenizer = tokenizer
        self._eos_ids = tuple(eos_ids)
        self._width = width
        self._padded_width = padded_width or 1
        self._limits = limits
        self._slots: list[Slot | None] = [None] * limits.max_slots
        self._waiting: deque[Slot] = deque()
        self._ids = itertools.count()
        self._prefilled_last = False

    def submit(self, prompt: Sequence[int], params: SamplingParams) -> tuple[int, DecodeStats]:
        """Queue a request: its id, and the counts that the steps will fill in.

        Raises `RequestError` for a bad prompt, `CapacityError` when it does not fit.
        """
        max_tokens = self._check(prompt, params)
        checker = StopChecker(
            params.stop, params.stop_token_ids, eos_ids=self._eos_ids,
            ignore_eos=params.ignore_eos, max_tokens=max_tokens,
        )  # fmt: skip
        slot = Slot(
            request_id=next(self._ids),
            prompt=list(prompt),
            params=params,
            max_tokens=max_tokens,
            stream=TextStream(self._tokenizer.detokenizer(), checker),
            stats=DecodeStats(self._limits.block),
        )
        self._waiting.append(slot)
        return slot.request_id, slot.stats

    @property
    def has_work(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self._waiting) or any(self._slots)

    def step(self) -> list[Delta]:
        """Run one step; what it brought to each request that it touched."""
        self._admit()
        prefilling = [i for i, slot in enumerate(self._slots) if slot and slot.is_prefilling]
        decoding = [i for i, slot in enumerate(self._slots) if slot and not slot.is_prefilling]
        if prefilling and not (decoding and self._prefilled_last):
            self._prefilled_last = True
            # The slot that has read least of its prompt waits longest: serve it first.
            return self._prefill(min(prefilling, key=lambda i: self._seat(i).request_id))
        self._prefilled_last = False
        return self._decode(decoding) if decoding else []

    def cancel(self, request_id: int) -> None:
        """Forget a request, waiting or running; its slot is free at once."""
        self._waiting = deque(s for s in self._waiting if s.request_id != request_id)
        for index, slot in enumerate(self._slots):
            if slot and slot.request_id == request_id:
                self._retire(index)

    def _check(self, prompt: Sequence[int], params: SamplingParams) -> int:
        if not len(prompt):
            raise RequestError("the prompt is empty", hint="give at least one token")
        vocab = self._limits.vocab_size
        bad = next((token for token in prompt if not 0 <= token < vocab), None)
        if bad is not None:
            raise RequestError(f"prompt token {bad} is outside the vocabulary of {vocab}")
        room = self._limits.max_seq_len - len(prompt)
        if room < 1:
            raise CapacityError(
                f"the prompt has {len(prompt)} tokens, the engine holds "
                f"{self._limits.max_seq_len} of prompt and output",
                hint="shorten the prompt, or build with a larger --max-seq-len",
            )
        wanted = room if params.max_tokens is None else params.max_tokens
        if wanted > room:
            raise CapacityError(
                f"max_tokens {wanted} and a prompt of {len(prompt)} tokens exceed the engine's "
                f"{self._limits.max_seq_len}",
                hint=f"ask for at most {room} tokens, or build with a larger --max-seq-len",
            )
        return wanted

    def _admit(self) -> None:
        for index, slot in enumerate(self._slots):
            if slot is None and self._waiting:
                self._slots[index] = self._waiting.popleft()

    def _seat(self, index: int) -> Slot:
        slot = self._slots[index]
        assert slot is not None
        return slot

    def _prefill(self, index: int) -> list[Delta]:
        slot = self._seat(index)
        chunk = slot.prompt[slot.length : slot.length + self._limits.prefill_chunk]
        is_last = slot.length + len(chunk) == len(slot.prompt)
        # Tokens that the first decode step verifies are drafted by the last chunk's step.
        drafts = min(self._width, slot.remaining) - 1 if is_last else 0
        rows = self._rows([(slot, list(chunk), len(chunk))], 1)
        result = self._session.step(index, rows, max(drafts, 0))
        next_row = result.next_tokens[0].tolist()
        block = slot.take_prompt(int(result.committed[0]), next_row)
        return [] if block is None else [self._deliver(index, next_row[:1], block)]

    def _decode(self, decoding: list[int]) -> list[Delta]:
        """One block for every decoding slot; slots between them that do not decode stand idle."""
        first, last = decoding[0], decoding[-1]
        batch: list[tuple[Slot | None, list[int], int]] = []
        for index in range(first, last + 1):
            slot = self._slots[index]
            if index in decoding and slot is not None:
                # A token past max_tokens would be thrown away, so it is not verified.
                batch.append((slot, slot.row[: min(self._width, slot.remaining)], 1))
            else:
                batch.append((slot, [], 0))
        most = max(slot.remaining for slot, row, _ in batch if slot and row)
        result = self._session.step(
            first, self._rows(batch, self._padded_width), min(self._width, most) - 1
        )
        deltas = []
        for i, (slot, row, _) in enumerate(batch):
            if slot is None or not row:
                continue
            next_row = result.next_tokens[i].tolist()
            committed = int(result.committed[i])
            new = [*slot.row[1:committed], next_row[0]]
            block = slot.take_block(len(row) - 1, committed, next_row)
            deltas.append(self._deliver(first + i, new, block))
        return deltas

    def _deliver(self, index: int, new: list[int], block: BlockResult) -> Delta:
        slot = self._seat(index)
        if block.reason is not None:
            self._retire(index)
        ids = tuple(new[: block.num_tokens])
        return Delta(slot.request_id, ids, block.text, block.reason)

    def _retire(self, index: int) -> None:
        self._slots[index] = None
        self._session.release(index)

    def _rows(self, batch: list[tuple[Slot | None, list[int], int]], least_width: int) -> StepRows:
        """Pad the rows of (slot, tokens, known) to one width; an idle row has count 0."""
        width = max(least_width, *(len(tokens) for _, tokens, _ in batch))
        tokens = np.zeros((len(batch), width), np.int32)
        for i, (_, row, _) in enumerate(batch):
            tokens[i, : len(row)] = row
        # An idle row is greedy, whatever its slot samples with.
        greedy = SamplingParams()
        params = [slot.params if slot and row else greedy for slot, row, _ in batch]
        return StepRows(
            tokens=tokens,
            length=np.array([slot.length if slot else 0 for slot, _, _ in batch], np.int32),
            count=np.array([len(row) for _, row, _ in batch], np.int32),
            known=np.array([known for _, _, known in batch], np.int32),
            temperature=np.array([p.temperature for p in params], np.float32),
            top_k=np.array([p.top_k for p in params], np.int32),
            top_p=np.array([p.top_p for p in params], np.float32),
            min_p=np.array([p.min_p for p in params], np.float32),
            seed=np.array([p.seed for p in params], np.int64),
        )
