"""Parts of the server alone: the copy of metrics, shared memory, finding a tritonserver."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import prometheus_client as prom
import pytest

from dflash_trt.errors import ConfigError
from dflash_trt.serve import tritonserver
from dflash_trt.serve.metrics import MetricsMirror, ServeTelemetry
from dflash_trt.serve.supervisor import SHM_PREFIX, remove_stale_regions


class TritonFamily:
    """Triton's metrics, as strict as they are there: no decrease, no second thread."""

    COUNTER, GAUGE = "counter", "gauge"
    samples: dict[tuple[str, frozenset[tuple[str, str]]], float]
    names: set[str]
    thread: int

    def __init__(self, name: str, description: str, kind: str) -> None:
        assert name not in self.names
        assert description
        self.names.add(name)
        self._name, self._kind = name, kind

    def Metric(self, labels: dict[str, str]) -> Any:  # noqa: N802
        key = (self._name, frozenset(labels.items()))
        assert key not in self.samples
        self.samples[key] = 0.0
        family = self

        class Metric:
            def increment(self, value: float) -> None:
                assert family._kind == "counter"
                assert value >= 0
                assert threading.get_ident() == family.thread
                family.samples[key] += value

            def set(self, value: float) -> None:
                assert family._kind == "gauge"
                assert threading.get_ident() == family.thread
                family.samples[key] = value

        return Metric()


@pytest.fixture
def family() -> type[TritonFamily]:
    class Fresh(TritonFamily):
        samples, names, thread = {}, set(), threading.get_ident()

    return Fresh


def test_mirror_follows_a_registry(family: type[TritonFamily]) -> None:
    registry = prom.CollectorRegistry()
    counter = prom.Counter("jobs", "Jobs", ["kind"], registry=registry)
    gauge = prom.Gauge("level", "Level", registry=registry)
    histogram = prom.Histogram("seconds", "Seconds", buckets=(1.0, 2.0), registry=registry)
    mirror = MetricsMirror(registry, family)

    def own() -> dict[Any, float]:
        return {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for metric in registry.collect()
            for sample in metric.samples
            if not sample.name.endswith("_created")
        }

    mirror.publish()
    assert family.samples == own()
    for value in (0.5, 1.5, 9.0):
        counter.labels("a").inc(2)
        counter.labels("b").inc()
        gauge.set(5 - value)
        histogram.observe(value)
        mirror.publish()
        assert family.samples == pytest.approx(own())
    assert family.samples["seconds_bucket", frozenset({("le", "2.0")})] == 2


def test_heartbeat_stops_when_a_step_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr("time.time", lambda: now[0])
    telemetry = ServeTelemetry(4, {"slots": 2}, {"model": "m"})
    now[0] = 1050.0
    assert telemetry.heartbeat() == 1050.0
    telemetry.on_queued()
    now[0] = 1060.0
    assert telemetry.heartbeat() == 1050.0
    telemetry.on_load(0, 1)
    now[0] = 1090.0
    assert telemetry.heartbeat() == 1060.0
    telemetry.on_load(0, 0)
    now[0] = 1100.0
    assert telemetry.heartbeat() == 1100.0


def test_only_stale_regions_are_removed(tmp_path: Path) -> None:
    used, stale, other = (tmp_path / name for name in (f"{SHM_PREFIX}1", f"{SHM_PREFIX}2", "x"))
    for file in (used, stale, other):
        file.write_bytes(bytes(4096))
    with used.open("r+b") as file, mmap.mmap(file.fileno(), 4096):
        assert remove_stale_regions(tmp_path) == [stale.name]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([used.name, other.name])


@pytest.fixture
def nothing_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[], Any]:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(tritonserver, "CONTAINER", tmp_path / "tritonserver-of-the-container")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    return tritonserver.find_tritonserver


def test_no_tritonserver(nothing_installed: Callable[[], Any]) -> None:
    with pytest.raises(ConfigError, match="there is no tritonserver") as caught:
        nothing_installed()
    assert "--no-triton" in caught.value.hint


def test_tritonserver_on_path_comes_first(
    nothing_installed: Callable[[], Any], tmp_path: Path
) -> None:
    tritonserver.CONTAINER.touch()
    assert nothing_installed().binary == tritonserver.CONTAINER
    own = tmp_path / "tritonserver"
    own.write_text("#!/bin/sh\n")
    own.chmod(0o755)
    assert nothing_installed().binary == own


def test_wheel_needs_numpy_1(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("numpy.__version__", "2.1.0")
    with pytest.raises(ConfigError, match=r"needs NumPy 1, this environment has 2\.1\.0"):
        tritonserver._from_wheel(tmp_path)
    monkeypatch.setattr("numpy.__version__", "1.26.4")
    with pytest.raises(ConfigError, match="cannot run Python"):
        tritonserver._from_wheel(tmp_path)
