"""When the alerts fire: the rules of a release, evaluated over what its pods would report.

`promtool` of Prometheus does that, where it is on PATH. What can be read from the rules needs none.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from charts import CHART, Values, merged, the

from dflash_trt.serve.metrics import RefusalReason
from dflash_trt.serve.supervisor import EXIT_MARGIN_S
from dflash_trt.text.stop import FinishReason

RULES: Values = {"metrics": {"rules": {"enabled": True}}}
ONE, OTHER = (f"demo-dflash-triton-cpu-6d4cf56db6-{pod}" for pod in ("x2x9k", "b7m4q"))
START, DRAINING = "dflash_start_time_seconds", "dflash_draining"
FINISHED, REFUSED = "dflash_requests_finished_total", "dflash_requests_refused_total"
EVER = "1+0x900"  # of a pod that is well. Samples are 15 s apart: ten minutes are 40
GONE = "stale"


def rules(values: Values = RULES) -> dict[str, Any]:
    """The rules of a release by their names."""
    (group,) = the(values, "PrometheusRule")["spec"]["groups"]
    return {rule["alert"]: rule for rule in group["rules"]}


def series(name: str, samples: str, pod: str = ONE, **labels: str) -> dict[str, str]:
    """What one pod reports, in promtool's notation."""
    said = {"namespace": "llm", "pod": pod, **labels}
    text = ",".join(f'{key}="{value}"' for key, value in said.items())
    return {"series": f"{name}{{{text}}}", "values": samples}


def pod(started: str = EVER, scraped: str = EVER, name: str = ONE) -> list[dict[str, str]]:
    """A pod's start time, and whether it could be scraped."""
    return [series(START, started, name), series("up", scraped, name)]


WELL = pod(name=OTHER)
DEAD = pod(f"1+0x40 {GONE}", "1+0x40 0+0x800")
STORIES: dict[str, tuple[list[dict[str, str]], dict[str, set[str]]]] = {
    "a drain within its limit, and the pod's end": (
        [
            *WELL,
            *pod(f"1+0x46 {GONE}", f"1+0x46 {GONE}"),
            series("dflash_healthy", f"1+0x46 {GONE}"),
            series(DRAINING, f"0+0x40 1+0x5 {GONE}"),
        ],
        {"11m": set(), "13m": set(), "30m": set(), "2h": set()},
    ),
    "a drain that does not end": (
        [*WELL, *pod(), series(DRAINING, "0+0x40 1+0x40")],
        {"13m": set(), "14m": {"DflashDrainTooLong"}},
    ),
    "a drain that cuts requests off": (
        [*WELL, *pod(), series(FINISHED, f"0+0x40 3+0x1 {GONE}", reason="shutdown")],
        {"10m": set(), "11m": {"DflashRequestsCutOff"}, "40m": set()},
    ),
    "an engine that dies and leaves its server behind": (
        [*WELL, *pod(), series("dflash_healthy", "1+0x40 0+0x40")],
        {"10m": set(), "12m": {"DflashNotHealthy"}},
    ),
    "a container that is started again": (
        [*WELL, *pod(f"1+0x40 {GONE} _x8 700+0x800")],
        {"10m": set(), "14m": {"DflashRestarted"}, "40m": {"DflashRestarted"}, "45m": set()},
    ),
    "one whose start takes as long as it may": (
        [*WELL, *pod(f"1+0x40 {GONE} _x59 1500+0x400")],
        {"24m": set(), "26m": {"DflashRestarted"}},
    ),
    "pods that Prometheus finds by another monitor": (
        [
            series(START, f"1+0x40 {GONE}", job="llm/service"),
            series(START, "_x40 1+0x400", job="llm/pods"),
            series("up", f"1+0x40 {GONE}", job="llm/service"),
            series("up", "_x40 1+0x400", job="llm/pods"),
        ],
        {"11m": set(), "30m": set(), "1h": set()},
    ),
    "one that is started again and again": (
        [*WELL, *pod("1+0x40 700+0x40 1300+0x40 1900+0x40")],
        {"25m": {"DflashRestarted"}, "35m": {"DflashRestarted", "DflashCrashLoop"}},
    ),
    "one that does not come up again": (
        [*WELL, *DEAD],
        {"20m": set(), "26m": {"DflashMetricsGone"}, "3h": {"DflashMetricsGone"}},
    ),
    "one whose server comes up, and its engine does not": (
        [*WELL, *pod(f"1+0x40 {GONE}")],
        {"20m": set(), "26m": {"DflashMetricsGone"}},
    ),
    "all of them": (
        DEAD,
        {"14m": set(), "16m": {"DflashNoServer"}, "26m": {"DflashNoServer", "DflashMetricsGone"}},
    ),
    "all pods leave Prometheus' sight": (
        pod(f"1+0x40 {GONE}", f"1+0x40 {GONE}"),
        {"14m": set(), "16m": {"DflashNoServer"}, "5h": {"DflashNoServer"}},
    ),
    "they stay away for longer than a server is remembered": (
        pod(f"1+0x40 {GONE} _x1600 9+0x200", f"1+0x40 {GONE} _x1600 1+0x200"),
        {"5h": {"DflashNoServer"}, "6h30m": {"DflashNoServer"}, "7h": set()},
    ),
    "a release that was never up": (
        [series("up", "0+0x100")],
        {"20m": set()},
    ),
    "a pod that never comes up": (
        [*WELL, series("up", "0+0x900"), series("up", "1+0x900", "demo-dflash-triton-cpu-1-2")],
        {"79m": set(), "81m": {"DflashNotStarted"}},
    ),
    "pods of others": (
        [
            series("up", "0+0x900", "else-1-1"),
            *pod(
                f"1+0x40 {GONE}", "1+0x40 0+0x800", name="demo-dflash-triton-gpu-6d4cf56db6-x2x9k"
            ),
        ],
        {"16m": set(), "3h": set()},
    ),
    "requests that fail, from the first on": (
        [
            *pod(),
            series(FINISHED, "0+10x200", reason="stop"),
            series(FINISHED, "0+0x40 1+1x160", reason="error"),
        ],
        {"10m": set(), "17m": {"DflashRequestsFail"}},
    ),
    "a burst of refusals": (
        [*pod(), series(REFUSED, "0+0x40 0+50x4 200+0x400", reason="queue_full")],
        {"12m": set(), "15m": set(), "25m": set()},
    ),
    "refusals that go on": (
        [*pod(), series(REFUSED, "0+0x40 0+5x200", reason="overload")],
        {"12m": set(), "25m": {"DflashRequestsRefused"}},
    ),
    "requests that are refused for what they are": (
        [*pod(), series(REFUSED, "0+5x400", reason="invalid")],
        {"40m": set()},
    ),
}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not on PATH")
@pytest.mark.parametrize("story", STORIES)
def test_what_fires_when(story: str, tmp_path: Path) -> None:
    said, firing = STORIES[story]
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(the(RULES, "PrometheusRule")["spec"]))
    expected = [
        {
            "expr": 'group by (alertname) (ALERTS{alertstate="firing"})',
            "eval_time": at,
            "exp_samples": [{"labels": f'{{alertname="{name}"}}', "value": 1} for name in names],
        }
        for at, names in firing.items()
    ]
    test = {"interval": "15s", "input_series": said, "promql_expr_test": expected}
    told = {"rule_files": ["rules.yaml"], "evaluation_interval": "15s", "tests": [test]}
    (tmp_path / "test.yaml").write_text(yaml.safe_dump(told))
    command = ["promtool", "test", "rules", "test.yaml"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_drain_and_a_start_may_take_what_this_release_says() -> None:
    own = {"drain": {"longestRequestSeconds": 700}, "probes": {"startupSeconds": 1800}}
    found = rules(merged(RULES, own, {"build": {"maxSeconds": 7200}}))
    names = ("DflashDrainTooLong", "DflashMetricsGone", "DflashNotStarted")
    assert [found[name]["for"] for name in names] == ["775s", "1800s", "9300s"]


def windows(values: Values) -> dict[str, str]:
    """How far back the rules that count restarts look."""
    found = rules(values)
    names = ("DflashRestarted", "DflashCrashLoop")
    return {name: re.findall(r"\[(\w+)\]", found[name]["expr"])[0] for name in names}


def test_restarts_are_seen_however_long_a_start_takes() -> None:
    assert windows(RULES) == {"DflashRestarted": "1800s", "DflashCrashLoop": "7200s"}
    slow = merged(RULES, {"probes": {"startupSeconds": 1800}})
    assert windows(slow) == {"DflashRestarted": "2700s", "DflashCrashLoop": "10800s"}


def test_a_drain_is_too_long_when_its_server_should_have_ended() -> None:
    found = rules(merged(RULES, {"drain": {"longestRequestSeconds": 700}}))
    wait = int(found["DflashDrainTooLong"]["for"].removesuffix("s"))
    assert wait > 700 + EXIT_MARGIN_S


def test_what_is_gone_is_told_by_its_pod_and_not_by_how_it_was_found() -> None:
    expression = rules()["DflashMetricsGone"]["expr"]
    assert len(re.findall(r"\b(?:unless|and)\b", expression)) == 2
    assert len(re.findall(r"\b(?:unless|and) on \(namespace, pod\)", expression)) == 2


def test_that_no_server_reports_stays_an_alert_of_the_same_labels() -> None:
    """What served is forgotten after six hours; from then on the alert itself is remembered."""
    expression = rules()["DflashNoServer"]["expr"]
    first, still = expression.split(" or ")
    assert "[6h]" in first
    assert re.match(r'absent\(dflash_start_time_seconds{namespace="llm",pod=~"demo-', still)
    assert 'and on (namespace) ALERTS{alertname="DflashNoServer",alertstate="firing"' in still


def seconds(duration: str) -> int:
    return int(duration[:-1]) * {"s": 1, "m": 60, "h": 3600}[duration[-1]]


def test_the_file_has_the_limits_of_a_default_release() -> None:
    (group,) = yaml.safe_load((CHART / "files" / "alerts.yaml").read_text())["groups"]
    of_file = {rule["alert"]: rule for rule in group["rules"]}
    for name, window in windows(RULES).items():
        assert seconds(window) == seconds(re.findall(r"\[(\w+)\]", of_file[name]["expr"])[0])
    for name in ("DflashMetricsGone", "DflashDrainTooLong"):
        assert seconds(rules()[name]["for"]) == seconds(of_file[name]["for"])


def test_the_file_is_a_default_release_for_any_prometheus() -> None:
    (group,) = yaml.safe_load((CHART / "files" / "alerts.yaml").read_text())["groups"]
    assert [rule["alert"] for rule in group["rules"]] == list(rules())
    for rule in group["rules"]:
        selectors = re.findall(r"\b((?:dflash_\w+|up)\b(?:\{[^}]*\})?)", rule["expr"])
        assert selectors
        assert [text for text in selectors if not re.search(r'\{pod=~"\.\*', text)] == []


def test_a_release_watches_its_own_pods() -> None:
    for rule in rules().values():
        selectors = re.findall(r"\b(?:dflash_\w+|up)\b(?:\{([^}]*)\})?", rule["expr"])
        for text in selectors:
            assert text.startswith('namespace="llm",pod=~"demo-dflash-triton-(cpu)-')


def reasons(alert: str) -> set[str]:
    (found,) = re.findall(r'reason=~"([\w|]+)"', rules()[alert]["expr"])
    return set(found.split("|"))


def test_ends_that_are_failures() -> None:
    """The reasons that are neither the request's own end nor its client's choice."""
    assert reasons("DflashRequestsFail") == {*get_args(FinishReason)} - {
        "stop", "length", "cancelled",
    }  # fmt: skip
    assert reasons("DflashRequestsRefused") == {*get_args(RefusalReason)} - {"stopping", "invalid"}
