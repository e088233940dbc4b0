"""What a scheduler tells about its work, for whoever counts it. The default counts nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from dflash_trt.text.stop import FinishReason

StepKind = Literal["prefill", "decode"]


@dataclass(frozen=True)
class StepEvent:
    """One run of the session. Blocks count delivered tokens: what a stop cut off is no more."""

    kind: StepKind
    width: int  # tokens of the longest row
    num_slots: int  # rows that were not idle
    seconds: float  # in the session
    # Of each decoding row: drafts verified, accepted drafts delivered, tokens delivered.
    blocks: Sequence[tuple[int, int, int]]


@dataclass(frozen=True)
class FinishEvent:
    """The end of a request, whatever its phase."""

    reason: FinishReason
    num_prompt_tokens: int
    num_tokens: int  # delivered
    seconds: float  # since it was submitted
    decode_s: float | None  # since its first token; None without one


class Telemetry(Protocol):
    """Hears of every event, in the thread that runs the scheduler. Must be quick and not raise."""

    def on_queued(self) -> None:
        """A request waits for a slot."""

    def on_admitted(self, queue_s: float) -> None:
        """A request has a slot, after `queue_s` seconds."""

    def on_first_token(self, seconds: float) -> None:
        """A request has its first token, `seconds` after it was submitted."""

    def on_step(self, event: StepEvent) -> None:
        """A step succeeded."""

    def on_failed_step(self) -> None:
        """A step raised; its requests end with the reason "error"."""

    def on_finished(self, event: FinishEvent) -> None:
        """A request is over."""

    def on_load(self, num_waiting: int, num_slots: int) -> None:
        """Requests that wait and slots in use, at the end of a call of the scheduler."""


class NoTelemetry:
    """Listens to nothing."""

    def on_queued(self) -> None:
        """See `Telemetry`."""

    def on_admitted(self, queue_s: float) -> None:
        """See `Telemetry`."""

    def on_first_token(self, seconds: float) -> None:
        """See `Telemetry`."""

    def on_step(self, event: StepEvent) -> None:
        """See `Telemetry`."""

    def on_failed_step(self) -> None:
        """See `Telemetry`."""

    def on_finished(self, event: FinishEvent) -> None:
        """See `Telemetry`."""

    def on_load(self, num_waiting: int, num_slots: int) -> None:
        """See `Telemetry`."""
