"""The chart through Helm's engine: lint, golden renders, and the schemas of what it renders.

DFLASH_TRT_UPDATE_GOLDEN=1 writes golden/ anew; read the diff before you commit it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from charts import (
    CHART,
    EXAMPLES,
    KUBERNETES,
    Manifest,
    example,
    lint_messages,
    pod_templates,
    pool,
    render,
    render_text,
)
from cloudcoil.models.keda.v1alpha1 import ScaledObject
from cloudcoil.models.prometheus_operator.v1 import PodMonitor, PrometheusRule, ServiceMonitor
from gateway_schemas import ROUTES

import dflash_trt

GOLDEN = Path(__file__).parent / "golden"
SETS = ["default", *EXAMPLES]
OPERATORS: dict[str, Any] = {
    model.__name__: model for model in (ScaledObject, PodMonitor, ServiceMonitor, PrometheusRule)
}
# What `values` says nothing of and the chart has templates for.
EVERY_KIND = {
    "Deployment", "GRPCRoute", "HTTPRoute", "HorizontalPodAutoscaler", "Ingress", "Job",
    "NetworkPolicy", "PersistentVolumeClaim", "Pod", "PodDisruptionBudget", "PodMonitor",
    "PrometheusRule", "ScaledObject", "Service", "ServiceAccount", "ServiceMonitor",
}  # fmt: skip


def check(manifest: Manifest) -> None:
    """Raises when an API server would refuse or prune a part of it."""
    kind = manifest["kind"]
    if kind in OPERATORS:
        OPERATORS[kind].model_validate(manifest, extra="forbid")
    elif kind in ROUTES:
        jsonschema.validate(manifest, ROUTES[kind])
    else:
        kubernetes_validate.validate(manifest, KUBERNETES, strict=True)


@pytest.mark.parametrize("name", SETS)
def test_lint(name: str) -> None:
    assert lint_messages(example(name)) == []


@pytest.mark.parametrize("name", SETS)
def test_golden(name: str) -> None:
    texts = render_text(example(name)).items()
    parts = [
        f"---\n# {file}\n{text.strip().removeprefix('---').strip()}\n"
        for file, text in texts
        if file != "NOTES.txt"
    ]
    text = "".join(parts)
    golden = GOLDEN / f"{name}.yaml"
    if os.environ.get("DFLASH_TRT_UPDATE_GOLDEN"):
        golden.write_text(text)
    assert golden.read_text() == text


def test_every_golden_file_has_its_values() -> None:
    assert sorted(path.stem for path in GOLDEN.glob("*.yaml")) == sorted(SETS)


@pytest.mark.parametrize("name", SETS)
def test_objects_follow_their_schemas(name: str) -> None:
    for manifest in render(example(name)):
        check(manifest)


@pytest.mark.parametrize("oldest", ["1.30", "1.37"])
def test_other_versions_of_kubernetes(oldest: str) -> None:
    for manifest in render(example("build-on-gpu")):
        kubernetes_validate.validate(manifest, oldest, strict=True)


def test_the_examples_show_every_object() -> None:
    assert {item["kind"] for name in SETS for item in render(example(name))} == EVERY_KIND


@pytest.mark.parametrize(
    ("kind", "path"),
    [
        ("Deployment", ("spec", "template", "spec")),
        ("HTTPRoute", ("spec", "rules", 0)),
        ("PodMonitor", ("spec",)),
        ("ScaledObject", ("spec",)),
    ],
)
def test_the_schemas_see_an_unknown_key(kind: str, path: tuple[str | int, ...]) -> None:
    (manifest,) = [item for item in render(example("production")) if item["kind"] == kind]
    check(manifest)
    place: Any = manifest
    for step in path:
        place = place[step]
    place["notAKey"] = 1
    with pytest.raises(
        (ValueError, jsonschema.ValidationError, kubernetes_validate.ValidationError)
    ):
        check(manifest)


@pytest.mark.parametrize("name", SETS)
def test_objects_have_unique_names_that_fit(name: str) -> None:
    items = render(example(name))
    names = [(item["kind"], item["metadata"]["name"]) for item in items]
    assert len(set(names)) == len(names)
    assert max(len(found) for _, found in names) <= 63


def test_the_longest_names_fit() -> None:
    values = pool(name="a" * 15, gpus=0, engine={"build": {"target": "qwen3-4b"}})
    items = render({**values, "fullnameOverride": "n" * 60})
    assert max(len(item["metadata"]["name"]) for item in items) <= 63


@pytest.mark.parametrize("name", SETS)
def test_servers_and_builds_report_to_nobody(name: str) -> None:
    off = {"name": "ORT_DISABLE_TELEMETRY", "value": "1"}
    containers = [c for _, spec in pod_templates(example(name)) for c in spec["containers"]]
    assert all(off in c["env"] for c in containers if c["name"] in ("server", "build"))


@pytest.mark.parametrize("name", SETS)
def test_every_pod_is_locked_down(name: str) -> None:
    for _, spec in pod_templates(example(name)):
        assert spec["automountServiceAccountToken"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in [*spec["containers"], *spec.get("initContainers", [])]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"]},
                "readOnlyRootFilesystem": True,
            }
            assert container["resources"]["limits"]["memory"]
            mounted = {mount["name"] for mount in container.get("volumeMounts", [])}
            assert mounted <= {volume["name"] for volume in spec.get("volumes", [])}


@pytest.mark.parametrize("name", SETS)
def test_no_secret_is_in_a_manifest(name: str) -> None:
    assert "Secret" not in {item["kind"] for item in render(example(name))}


def test_versions_agree() -> None:
    """The chart has a version of its own: its values change without the server."""
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == dflash_trt.__version__
    images = {spec["containers"][0]["image"] for _, spec in pod_templates({})}
    assert images == {f"dflash-trt/{name}:{dflash_trt.__version__}" for name in ("server", "build")}
