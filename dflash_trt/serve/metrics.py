"""A server's metrics: what decoding tells, what autoscalers and probes ask, and Triton's copy."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, get_args

from dflash_trt.decode.prometheus import PrometheusTelemetry
from dflash_trt.errors import DFlashError, EngineStopped, QueueFull

_LOG = logging.getLogger(__name__)
HEARTBEAT = "dflash_heartbeat_timestamp_seconds"

# Why a request was not taken in: nothing of it is in the other metrics. `invalid` is what no server
# with this engine would serve, `overload` are more connections than OpenAI's API holds.
RefusalReason = Literal["queue_full", "stopping", "invalid", "overload"]


class ServeTelemetry(PrometheusTelemetry):
    """Adds limits, health, what was refused, and a heartbeat that stops when a step hangs."""

    def __init__(
        self,
        block: int,
        limits: Mapping[str, int],
        info: Mapping[str, str],
    ) -> None:
        """`limits` become gauges, `info` the labels of a gauge that is 1."""
        super().__init__(block)
        import prometheus_client as prom

        def gauge(name: str, text: str, *labels: str) -> prom.Gauge:
            return prom.Gauge(f"dflash_{name}", text, labels, registry=self.registry)

        self._last_load = time.time()
        self._has_work = False
        for name, value in limits.items():
            gauge(name, "A limit of this server").set(value)
        gauge("engine_info", "The engine, as labels", *info).labels(*info.values()).set(1)
        gauge("start_time_seconds", "When this engine was started").set(time.time())
        self._healthy = gauge("healthy", "1 while what runs is answered")
        self._draining = gauge("draining", "1 from the order to end on")
        gauge(HEARTBEAT.removeprefix("dflash_"), "When the engine was last idle or ended a step"
              ).set_function(self.heartbeat)  # fmt: skip
        refused = prom.Counter(
            "dflash_requests_refused", "Requests not taken in", ["reason"], registry=self.registry
        )
        self._refused = {reason: refused.labels(reason) for reason in get_args(RefusalReason)}

    def watch(self, is_healthy: Callable[[], bool], is_draining: Callable[[], bool]) -> None:
        """Ask these from now on."""
        self._healthy.set_function(lambda: float(is_healthy()))
        self._draining.set_function(lambda: float(is_draining()))

    def heartbeat(self) -> float:
        """Unix time at which the engine was last seen to be idle or to end a step."""
        return self._last_load if self._has_work else time.time()

    def on_refused(self, reason: RefusalReason) -> None:
        """A request was not taken in. Any thread may call this."""
        self._refused[reason].inc()

    @contextlib.contextmanager
    def refusals(self) -> Iterator[None]:
        """Around the way of a request to the engine: what it raises there, it was refused for."""
        try:
            yield
        except DFlashError as error:
            is_stopping = isinstance(error, EngineStopped)
            is_full = isinstance(error, QueueFull)
            self.on_refused("stopping" if is_stopping else "queue_full" if is_full else "invalid")
            raise

    def on_queued(self) -> None:
        """See `Telemetry`."""
        super().on_queued()
        if not self._has_work:
            self._last_load, self._has_work = time.time(), True

    def on_load(self, num_waiting: int, num_slots: int) -> None:
        """See `Telemetry`."""
        super().on_load(num_waiting, num_slots)
        self._last_load, self._has_work = time.time(), bool(num_waiting or num_slots)


class MetricsMirror:
    """Copies a registry to Triton's metrics. All calls must come from one thread.

    Triton's Python backend crashes when two threads touch metrics. It also has no way to set a
    histogram, so a histogram's buckets, sum and count are counters there: the names, labels and
    values are those of the registry, and PromQL does not see the difference.
    """

    def __init__(self, registry: Any, family: Any) -> None:
        """`registry` is of prometheus_client, `family` is Triton's `MetricFamily`."""
        self._registry = registry
        self._family = family
        self._families: dict[str, Any] = {}
        self._metrics: dict[tuple[str, tuple[tuple[str, str], ...]], tuple[Any, float]] = {}
        self._failing: set[str] = set()  # of which the log has heard

    def publish(self) -> None:
        """Bring Triton's metrics to the registry's values; one that fails does not stop others."""
        for family in self._registry.collect():
            try:
                self._copy_family(family)
            except Exception:
                if family.name not in self._failing:  # once: this is asked every second
                    _LOG.exception("Triton does not take the metric %s", family.name)
                self._failing.add(family.name)
            else:
                self._failing.discard(family.name)

    def _copy_family(self, family: Any) -> None:
        is_gauge = family.type == "gauge"
        for sample in family.samples:
            if not sample.name.endswith("_created"):
                self._copy(sample, family.documentation, is_gauge)

    def _copy(self, sample: Any, description: str, is_gauge: bool) -> None:
        key = (sample.name, tuple(sorted(sample.labels.items())))
        if key not in self._metrics:
            kind = self._family.GAUGE if is_gauge else self._family.COUNTER
            if sample.name not in self._families:
                self._families[sample.name] = self._family(
                    name=sample.name, description=description, kind=kind
                )
            metric = self._families[sample.name].Metric(labels=sample.labels)
            self._metrics[key] = (metric, 0.0)
        metric, known = self._metrics[key]
        if sample.value != known:
            if is_gauge:
                metric.set(sample.value)
            else:
                metric.increment(sample.value - known)
            self._metrics[key] = (metric, sample.value)
