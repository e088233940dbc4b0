"""What deploy/ says of the package must be true: flags, extras, metrics, labels."""

from __future__ import annotations

import functools
import json
import re
import tomllib
from collections.abc import Iterator
from typing import Any

import promql_parser
import pytest
import typer.main
import yaml
from charts import CHART, EXAMPLES, ROOT, example, merged, objects, server

from dflash_trt.build.recipe import recipe_names
from dflash_trt.cli.app import app
from dflash_trt.decode.telemetry import FinishEvent, StepEvent
from dflash_trt.flavor import CPU, device_of
from dflash_trt.serve.metrics import ServeTelemetry

SETS = ["default", *EXAMPLES]
# What Prometheus and Kubernetes add to a sample.
ADDED_LABELS = {"le", "namespace", "pod"}
RULES = yaml.safe_load((CHART / "files" / "alerts.yaml").read_text())["groups"][0]["rules"]
DASHBOARD = json.loads((ROOT / "deploy" / "grafana" / "dflash-trt.json").read_text())
OPERATIONS = (ROOT / "docs" / "operations.md").read_text()
GRAFANA = {"$__rate_interval": "5m", "$namespace": ".*", "$pod": ".*"}


def command(name: str) -> Any:
    group: Any = typer.main.get_command(app)
    return group.commands[name]


@functools.cache
def samples() -> dict[str, set[str]]:
    """Labels of each sample that a server may report."""
    telemetry = ServeTelemetry(4, {"slots": 1, "queue_limit": 1}, {"model": "m"})
    telemetry.on_finished(FinishEvent("stop", 1, 2, 1.0, 1.0))
    for kind in ("prefill", "decode"):
        telemetry.on_step(StepEvent(kind, 2, 1, 1.0, [(1, 1, 2)]))
    families = telemetry.registry.collect()
    return {
        sample.name: set(sample.labels)
        for family in families
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


def known_samples() -> dict[str, set[str]]:
    """Those, and what Prometheus adds: whether a pod could be scraped, and its own alerts."""
    return samples() | {"up": set(), "ALERTS": {"alertname", "alertstate"}}


def metrics() -> set[str]:
    """The names of what a server reports, a histogram's parts as one."""
    return {re.sub(r"_(bucket|sum|count)$", "", name) for name in samples()}


def selectors(expression: Any) -> Iterator[Any]:
    """All vector selectors of a parsed query."""
    if isinstance(expression, promql_parser.VectorSelector):
        yield expression
    for name in ("expr", "lhs", "rhs", "vector_selector", "args"):
        child = getattr(expression, name, None)
        for item in child if isinstance(child, list) else [child]:
            if item is not None:
                yield from selectors(item)


def check_query(query: str) -> None:
    """Raises when a query cannot be parsed, or names what no server reports."""
    for variable, value in GRAFANA.items():
        query = query.replace(variable, value)
    found = list(selectors(promql_parser.parse(query)))
    assert found
    known = known_samples()
    for selector in found:
        assert selector.name in known
        matched = {matcher.name for matcher in selector.matchers.matchers}
        assert matched <= known[selector.name] | ADDED_LABELS
    labels = set().union(*(known[selector.name] for selector in found)) | ADDED_LABELS
    grouped = {word.strip() for by in re.findall(r"by ?\((.*?)\)", query) for word in by.split(",")}
    assert grouped <= labels


@pytest.mark.parametrize("name", SETS)
def test_flags_of_serve(name: str) -> None:
    off = {"server": {"openai": {"enabled": False}}, "gateway": {"triton": True}}
    keys = {"server": {"openai": {"apiKeySecret": {"name": "a", "key": "b"}}}}
    for layer in ({}, off, keys):
        for item in objects(merged(example(name), layer), "Deployment"):
            (container,) = item["spec"]["template"]["spec"]["containers"]
            verb, *args = container["args"]
            assert (container["command"], verb) == (["dflash-trt"], "serve")
            with command("serve").make_context("serve", args) as context:
                assert context.params["engine"].as_posix().startswith("/engines/")


@pytest.mark.parametrize("name", SETS)
def test_flags_of_build(name: str) -> None:
    for job in objects(example(name), "Job"):
        (container,) = job["spec"]["template"]["spec"]["containers"]
        assert "exec dflash-trt build --output" in container["command"][2]
        args = ["--output", "/engines/x", *container["args"]]
        with command("build").make_context("build", args) as context:
            assert context.params["target"] in recipe_names()
            on_gpu = "nvidia.com/gpu" in container["resources"]["limits"]
            assert device_of(context.params["device"] or CPU).is_gpu == on_gpu


def test_ports_are_those_of_the_container() -> None:
    ports = {port["name"]: port["containerPort"] for port in server({})["ports"]}
    with command("serve").make_context("serve", server({})["args"][1:]) as context:
        assert {name: context.params[f"{name}_port"] for name in ports} == ports
    off = server({"server": {"openai": {"enabled": False}}})
    with command("serve").make_context("serve", off["args"][1:]) as context:
        assert context.params["openai_port"] == 0


def test_extras_of_the_dockerfile() -> None:
    text = (ROOT / "deploy" / "docker" / "Dockerfile").read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"].keys()
    named = re.findall(r"dflash-trt\[([a-z,]+)\$", text)
    assert len(named) == 2
    assert {name for group in named for name in group.split(",")} <= extras
    (comment,) = re.findall(r"^# GPU_EXTRA .*\n#.*$", text, re.MULTILINE)
    assert set(re.findall(r"`([\w-]+)`", comment)) <= extras


@pytest.mark.parametrize("rule", RULES, ids=[rule["alert"] for rule in RULES])
def test_alert(rule: dict[str, Any]) -> None:
    check_query(rule["expr"])
    assert rule["labels"]["severity"] in ("critical", "warning")
    assert {"summary", "description"} == rule["annotations"].keys()
    assert f"| `{rule['alert']}`" in OPERATIONS


def test_operations_explain_no_other_alert() -> None:
    assert set(re.findall(r"`(Dflash\w+)`", OPERATIONS)) == {rule["alert"] for rule in RULES}


def test_alerts_of_a_release() -> None:
    (rules,) = objects(example("production"), "PrometheusRule")
    for rule in rules["spec"]["groups"][0]["rules"]:
        check_query(rule["expr"])


@pytest.mark.parametrize("panel", DASHBOARD["panels"], ids=lambda panel: panel["id"])
def test_panel(panel: dict[str, Any]) -> None:
    assert panel["title"]
    assert panel["description"]
    assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    for target in panel["targets"]:
        check_query(target["expr"])


def test_the_dashboard_shows_every_metric() -> None:
    text = json.dumps(DASHBOARD)
    assert {name for name in metrics() if name not in text} == set()


def test_restarts_are_counted_over_more_than_one_scrape() -> None:
    """A start takes longer than Grafana's own interval, which would end before it does."""
    (panel,) = [panel for panel in DASHBOARD["panels"] if panel["title"] == "Restarts"]
    assert re.findall(r"\[(.*?)\]", panel["targets"][0]["expr"]) == ["1h"]


def test_panels_do_not_overlap() -> None:
    cells: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        own = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not own & cells
        assert max(x for x, _ in own) < 24
        cells |= own
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)


def test_autoscalers_watch_metrics_that_exist() -> None:
    known = samples()
    for item in objects(example("ingress-hpa"), "HorizontalPodAutoscaler"):
        for metric in item["spec"]["metrics"]:
            assert metric["pods"]["metric"]["name"] in known
    for item in objects(example("production"), "ScaledObject"):
        for trigger in item["spec"]["triggers"]:
            check_query(trigger["metadata"]["query"])


def test_operations_explain_every_metric_and_no_other() -> None:
    named = set(re.findall(r"`(dflash_\w+)`", OPERATIONS))
    assert named == metrics()


@pytest.mark.parametrize(
    "query",
    [
        "dflash_queue_lenght",
        "rate(dflash_no_such_total[5m]) / 2",
        "time() - max(dflash_no_such)",
        "histogram_quantile(0.5, sum by (le) (rate(dflash_no_such_bucket[5m])))",
        'dflash_slots{gpu="0"}',
        "sum by (gpu) (dflash_slots)",
        "sum(",
    ],
)
def test_the_check_of_queries_sees_what_is_wrong(query: str) -> None:
    with pytest.raises((AssertionError, ValueError)):
        check_query(query)
