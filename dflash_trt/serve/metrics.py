"""A server's metrics: what decoding tells, what autoscalers and probes ask, and Triton's copy."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from dflash_trt.decode.prometheus import PrometheusTelemetry

HEARTBEAT = "dflash_heartbeat_timestamp_seconds"


class ServeTelemetry(PrometheusTelemetry):
    """Adds gauges of limits, of health, and a heartbeat that stops when a step hangs."""

    def __init__(
        self,
        block: int,
        limits: Mapping[str, int],
        info: Mapping[str, str],
    ) -> None:
        """`limits` become gauges, `info` the labels of a gauge that is 1."""
        super().__init__(block)
        import prometheus_client as prom

        self._last_load = time.time()
        self._has_work = False
        for name, value in limits.items():
            prom.Gauge(f"dflash_{name}", "A limit of this server", registry=self.registry).set(
                value
            )
        labels = prom.Gauge(
            "dflash_engine_info", "The engine, as labels", list(info), registry=self.registry
        )
        labels.labels(*info.values()).set(1)
        self._healthy = prom.Gauge(
            "dflash_healthy", "1 while requests are answered", registry=self.registry
        )
        beat = prom.Gauge(HEARTBEAT, "When the engine was last idle or ended a step",
                          registry=self.registry)  # fmt: skip
        beat.set_function(self.heartbeat)

    def watch(self, is_healthy: Callable[[], bool]) -> None:
        """Ask this for the health from now on."""
        self._healthy.set_function(lambda: float(is_healthy()))

    def heartbeat(self) -> float:
        """Unix time at which the engine was last seen to be idle or to end a step."""
        return self._last_load if self._has_work else time.time()

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

    def publish(self) -> None:
        """Bring Triton's metrics to the registry's values."""
        for family in self._registry.collect():
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
