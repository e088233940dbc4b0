"""Telemetry as Prometheus metrics, in a registry of their own. Needs the extra `metrics`."""

from __future__ import annotations

from typing import get_args

from dflash_trt.decode.telemetry import FinishEvent, StepEvent, StepKind
from dflash_trt.errors import ConfigError
from dflash_trt.text.stop import FinishReason

# From a step of a small model on a GPU to a long prompt's chunk on a CPU; from a request that is
# answered at once to one that waited for others.
_STEP_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
_WAIT_S = (0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_RATES = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000)
_SLOTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class PrometheusTelemetry:
    """Counters, gauges and histograms named dflash_*; see `Telemetry` for the events."""

    def __init__(self, block: int) -> None:
        """`block` is the engine's. Raises `ConfigError` without the package prometheus_client."""
        try:
            import prometheus_client as prom
        except ImportError as error:
            raise ConfigError(
                "metrics need the package prometheus_client",
                hint="pip install 'dflash-trt[metrics]'",
            ) from error
        self.registry = registry = prom.CollectorRegistry()
        self._render = prom.generate_latest

        def counter(name: str, text: str, *labels: str) -> prom.Counter:
            return prom.Counter(f"dflash_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str) -> prom.Gauge:
            return prom.Gauge(f"dflash_{name}", text, registry=registry)

        def histogram(
            name: str, text: str, buckets: tuple[float, ...], *labels: str
        ) -> prom.Histogram:
            return prom.Histogram(
                f"dflash_{name}", text, labels, registry=registry, buckets=buckets
            )

        widths = tuple(float(width) for width in range(1, block + 1))
        self._queued = counter("requests_queued", "Requests taken in")
        finished = counter("requests_finished", "Requests that are over", "reason")
        # Each reason is there from the start, at 0: rate() does not see the event that makes one.
        self._finished = {reason: finished.labels(reason) for reason in get_args(FinishReason)}
        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens of requests that are over")
        self._tokens = counter("generated_tokens", "Tokens delivered")
        self._failed_steps = counter("failed_steps", "Steps that raised")
        self._waiting = gauge("queue_depth", "Requests that wait for a slot")
        self._slots = gauge("slots_in_use", "Slots that are taken")
        self._queue_s = histogram("queue_seconds", "Submission to slot", _WAIT_S)
        self._first_s = histogram("first_token_seconds", "Submission to first token", _WAIT_S)
        self._request_s = histogram("request_seconds", "Submission to end", _WAIT_S)
        self._rate = histogram("request_tokens_per_second", "After the first token", _RATES)
        step_s = histogram("step_seconds", "Time in the session", _STEP_S, "kind")
        step_slots = histogram("step_slots", "Rows that were not idle", _SLOTS, "kind")
        self._step_s = {kind: step_s.labels(kind) for kind in get_args(StepKind)}
        self._step_slots = {kind: step_slots.labels(kind) for kind in get_args(StepKind)}
        self._width = histogram("verify_width", "Tokens of the longest row of a block", widths)
        self._length = histogram("acceptance_length", "Tokens delivered by a row's block", widths)
        offered = counter("drafts_verified", "Steps of a row that verified this draft", "position")
        accepted = counter("drafts_accepted", ".. and delivered it", "position")
        self._offered = [offered.labels(str(position)) for position in range(1, block)]
        self._accepted = [accepted.labels(str(position)) for position in range(1, block)]

    def text(self) -> bytes:
        """All metrics in Prometheus' text format. Any thread may call this."""
        rendered: bytes = self._render(self.registry)
        return rendered

    def on_queued(self) -> None:
        """See `Telemetry`."""
        self._queued.inc()

    def on_admitted(self, queue_s: float) -> None:
        """See `Telemetry`."""
        self._queue_s.observe(queue_s)

    def on_first_token(self, seconds: float) -> None:
        """See `Telemetry`."""
        self._first_s.observe(seconds)
        self._tokens.inc()  # the only one that no block brings

    def on_step(self, event: StepEvent) -> None:
        """See `Telemetry`."""
        self._step_s[event.kind].observe(event.seconds)
        self._step_slots[event.kind].observe(event.num_slots)
        if event.kind == "prefill":
            return
        self._width.observe(event.width)
        num_tokens = 0
        # Rows by how many drafts they verified and delivered: one sum per position, not per row.
        offered, accepted = [0] * event.width, [0] * event.width
        for num_offered, num_accepted, num_delivered in event.blocks:
            self._length.observe(num_delivered)
            num_tokens += num_delivered
            offered[num_offered] += 1
            accepted[num_accepted] += 1
        self._tokens.inc(num_tokens)
        num_offered = num_accepted = 0
        for position in range(event.width - 1, 0, -1):
            num_offered += offered[position]
            num_accepted += accepted[position]
            if num_offered:
                self._offered[position - 1].inc(num_offered)
            if num_accepted:
                self._accepted[position - 1].inc(num_accepted)

    def on_failed_step(self) -> None:
        """See `Telemetry`."""
        self._failed_steps.inc()

    def on_finished(self, event: FinishEvent) -> None:
        """See `Telemetry`."""
        self._finished[event.reason].inc()
        self._prompt_tokens.inc(event.num_prompt_tokens)
        self._request_s.observe(event.seconds)
        if event.decode_s and event.num_tokens > 1:
            self._rate.observe((event.num_tokens - 1) / event.decode_s)

    def on_load(self, num_waiting: int, num_slots: int) -> None:
        """See `Telemetry`."""
        self._waiting.set(num_waiting)
        self._slots.set(num_slots)
