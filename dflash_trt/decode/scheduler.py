"""Runs requests on a session: admits, reads prompts in chunks, decodes blocks, retires.

One call of `step` is one step of the session. What neither starves the other means here:
* A free slot takes the request that waits longest.
* While some slots read prompts and others decode, prompt chunks and decode steps alternate.
* Prompts are read in the order of arrival: the first to come is the first to answer.
So a decoding request waits for at most one chunk between two of its blocks, and a prompt of n
chunks is read within 2 (m + n) steps, m being the chunks of the prompts that came before it.

A session that raises fails the requests of the slots that the step ran on, idle ones among them:
what it wrote there is not known. All others go on.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

from dflash_trt.decode.admission import Door, RunConfig
from dflash_trt.decode.request import DecodeStats, Delta, SamplingParams
from dflash_trt.decode.rows import Batch, Row
from dflash_trt.decode.slots import Request, SlotTable
from dflash_trt.decode.telemetry import FinishEvent, NoTelemetry, StepEvent, StepKind, Telemetry
from dflash_trt.decode.width import WidthPolicy
from dflash_trt.runtime.session import Session, StepResult
from dflash_trt.text import Tokenizer
from dflash_trt.text.stop import FinishReason


class Scheduler:
    """Continuous batching over the slots of one session. Not thread-safe, but for `request`."""

    def __init__(
        self,
        session: Session,
        tokenizer: Tokenizer,
        eos_ids: Sequence[int],
        policy: WidthPolicy,
        *,
        padded_width: int = 1,
        config: RunConfig | None = None,
        telemetry: Telemetry | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`policy` says how many tokens a decode step verifies.

        `padded_width` fills decode rows up with invalid tokens, so that plain decoding runs the
        very shapes of a wider verification.
        """
        self._session = session
        self._limits = session.limits
        self._policy = policy
        self._padded_width = padded_width
        self.config = config or RunConfig()
        self._telemetry = telemetry or NoTelemetry()
        self._clock = clock
        self._door = Door(self._limits, self.config, tokenizer, eos_ids)
        self._slots = SlotTable(self._limits.max_slots, session.release)
        self._waiting: deque[Request] = deque()
        self._requests: dict[int, Request] = {}  # all that are not over
        self._ended: list[Delta] = []  # of requests that were cancelled since the last sweep
        self._prefilled_last = False
        self.num_failed_steps = 0  # in a row
        self.last_error: Exception | None = None

    def request(
        self, prompt: Sequence[int], params: SamplingParams, deadline_s: float | None = None
    ) -> Request:
        """A checked request, to be enqueued; its deadline runs from now. Any thread may call this.

        Raises `RequestError` for a bad prompt or field, `CapacityError` when it does not fit.
        """
        return self._door.request(prompt, params, self._clock(), deadline_s)

    def enqueue(self, request: Request) -> None:
        """Let a request wait. Raises `QueueFull`."""
        self.check_room(len(self._requests))
        self._requests[request.request_id] = request
        self._waiting.append(request)
        self._telemetry.on_queued()

    def submit(
        self, prompt: Sequence[int], params: SamplingParams, deadline_s: float | None = None
    ) -> tuple[int, DecodeStats]:
        """`request` and `enqueue`: the request's id, and the counts that the steps will fill in."""
        request = self.request(prompt, params, deadline_s)
        self.enqueue(request)
        return request.request_id, request.stats

    @property
    def has_work(self) -> bool:
        """Whether any request waits or runs, or a last delta is not fetched yet."""
        return bool(self._requests or self._ended)

    @property
    def has_room(self) -> bool:
        """Whether `enqueue` takes a request now."""
        return self._door.has_room(len(self._requests))

    def check_room(self, num_requests: int) -> None:
        """Raises `QueueFull` unless one more may come when so many are not over yet."""
        self._door.check_room(num_requests)

    @property
    def is_dead(self) -> bool:
        """Whether so many steps in a row failed that the next one would too."""
        return self.num_failed_steps >= self.config.max_failed_steps

    def cancel(self, request_id: int) -> None:
        """End a request in any phase; its slot is free at once, its last delta comes next.

        An unknown id, or that of a request that is over, is passed over.
        """
        request = self._requests.get(request_id)
        if request is not None:
            self._ended.append(self._end(request, "cancelled"))

    def end_all(self, reason: FinishReason, error: str = "") -> None:
        """End every request; their last deltas come next."""
        self._ended += [self._end(r, reason, error) for r in list(self._requests.values())]

    def sweep(self) -> list[Delta]:
        """Last deltas of the requests that were cancelled or are past their deadline."""
        now = self._clock()
        for request in [r for r in self._requests.values() if r.deadline <= now]:
            self._ended.append(self._end(request, "timeout"))
        ended, self._ended = self._ended, []
        return ended

    def step(self) -> list[Delta]:
        """Run one step; what it brought to each request that it touched, and the swept ones."""
        deltas = self.sweep()
        self._admit()
        batch = self._next_batch()
        if batch is not None:
            self._prefilled_last = batch.is_prefill
            start = self._clock()
            try:
                result = self._session.step(
                    batch.first_slot, batch.pack(), batch.num_drafts, want_logits=batch.want_logits
                )
            except Exception as error:  # a session may raise anything: its backend's own classes
                deltas += self._fail(batch, error)
            else:
                deltas += self._take(batch, result, self._clock() - start)
        self._telemetry.on_load(len(self._waiting), self._slots.num_used)
        return deltas

    def _admit(self) -> None:
        while self._waiting and self._slots.has_free:
            request = self._waiting.popleft()
            self._slots.seat(request)
            self._telemetry.on_admitted(self._clock() - request.submitted_at)

    def _next_batch(self) -> Batch | None:
        prefilling, decoding = self._slots.prefilling(), self._slots.decoding()
        if prefilling and not (decoding and self._prefilled_last):
            return self._chunk(min(prefilling, key=lambda request: request.request_id), decoding)
        return self._blocks(decoding) if decoding else None

    def _chunk(self, request: Request, decoding: list[Request]) -> Batch:
        """The next chunk of one prompt."""
        start = request.length
        slot, _ = self._slots.between(request, request)
        chunk = request.prompt[start : start + self._limits.prefill_chunk]
        drafts = 0
        if start + len(chunk) == len(request.prompt):
            # Tokens that the first decode step verifies are drafted by the last chunk's step.
            drafts = min(self._width([*decoding, request]), request.remaining) - 1
        return Batch(True, slot, [(request, chunk, len(chunk))], drafts, self._limits.block)

    def _blocks(self, decoding: list[Request]) -> Batch:
        """One block of every decoding slot; slots between them that do not decode stand idle."""
        width = self._width(decoding)
        first, seats = self._slots.between(decoding[0], decoding[-1])
        rows: list[Row] = [
            # A token past max_tokens would be thrown away, so it is not verified.
            (r, r.row[: min(width, r.remaining)], 1) if r and not r.is_prefilling else (r, [], 0)
            for r in seats
        ]
        most = max(request.remaining for request in decoding)
        drafts = min(width, most) - 1
        return Batch(False, first, rows, drafts, self._limits.block, self._padded_width)

    def _width(self, requests: list[Request]) -> int:
        width = self._policy.width([request.stats for request in requests])
        assert 1 <= width <= self._limits.block, f"a policy asked for verify width {width}"
        return width

    def _take(self, batch: Batch, result: StepResult, seconds: float) -> list[Delta]:
        """Account for a step that succeeded."""
        self.num_failed_steps = 0
        deltas: list[Delta] = []
        blocks: list[tuple[int, int, int]] = []
        next_rows, committed = result.next_tokens.tolist(), result.committed.tolist()
        for index, ((request, tokens, _), count, next_row) in enumerate(
            zip(batch.rows, committed, next_rows, strict=True)
        ):
            if request is None or not tokens:
                continue
            try:
                logits = None if result.logits is None else result.logits[index]
                taken = request.take(len(tokens), count, next_row, logits)
            except Exception as error:  # one row that cannot be read is no reason to end the others
                # Not `_end`: its text may be ahead of the tokens that were delivered.
                self._retire(request, "error")
                deltas.append(Delta(request.request_id, (), "", "error", _reason(error)))
                continue
            if taken is None:
                continue
            if not batch.is_prefill:
                delivered = len(taken.token_ids)
                blocks.append((len(tokens) - 1, min(count - 1, delivered), delivered))
            if request.first_token_at is None:
                request.first_token_at = self._clock()
                self._telemetry.on_first_token(request.first_token_at - request.submitted_at)
            if taken.finish_reason is not None:
                self._retire(request, taken.finish_reason)
            deltas.append(taken)
        width = max(len(tokens) for _, tokens, _ in batch.rows)
        num_slots = sum(1 for _, tokens, _ in batch.rows if tokens)
        if batch.is_prefill or batch.num_drafts == width - 1:
            self._policy.observe(width, num_slots, seconds, batch.is_prefill)
        kind: StepKind = "prefill" if batch.is_prefill else "decode"
        self._telemetry.on_step(StepEvent(kind, width, num_slots, seconds, blocks))
        return deltas

    def _fail(self, batch: Batch, error: Exception) -> list[Delta]:
        """End the requests of a step that raised."""
        self.num_failed_steps += 1
        self.last_error = error
        self._telemetry.on_failed_step()
        reason = _reason(error)
        return [self._end(r, "error", reason) for r, _, _ in batch.rows if r is not None]

    def _end(self, request: Request, reason: FinishReason, error: str = "") -> Delta:
        """End a request from outside, with the text that was kept back for its stop strings."""
        if request.slot is None:
            self._waiting.remove(request)
        self._retire(request, reason)
        return Delta(request.request_id, (), request.stream.finish(), reason, error)

    def _retire(self, request: Request, reason: FinishReason) -> None:
        self._slots.free(request)
        del self._requests[request.request_id]
        now, first = self._clock(), request.first_token_at
        self._telemetry.on_finished(
            FinishEvent(
                reason=reason,
                num_prompt_tokens=len(request.prompt),
                num_tokens=request.stream.num_tokens,
                seconds=now - request.submitted_at,
                decode_s=None if first is None else now - first,
            )
        )


def _reason(error: Exception) -> str:
    return f"the step failed with {type(error).__name__}: {error}"
