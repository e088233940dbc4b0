"""Renders the Helm chart with Helm's own engine, without a cluster."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from helm_python import Chart, HelmError, lint

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "helm" / "dflash-triton"
EXAMPLES = sorted(path.stem for path in (CHART / "examples").glob("*.yaml"))
RELEASE, NAMESPACE = "demo", "llm"
KUBERNETES = "1.34"
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml's is quicker, where there is one

Values = dict[str, Any]
Manifest = dict[str, Any]


def example(name: str) -> Values:
    """Values of examples/NAME.yaml; of values.yaml alone for "default"."""
    if name == "default":
        return {}
    values: Values = yaml.safe_load((CHART / "examples" / f"{name}.yaml").read_text())
    return values


def render_text(values: Values, release: str = RELEASE) -> dict[str, str]:
    """What Helm makes of each template, the empty ones left out. Raises `HelmError`."""
    return _rendered(json.dumps(values), release)


@functools.cache
def _rendered(values: str, release: str) -> dict[str, str]:
    with Chart.load(CHART) as chart:
        rendered = chart.render(json.loads(values), name=release, namespace=NAMESPACE)
    return {Path(path).name: text for path, text in sorted(rendered.items()) if text.strip()}


def render(values: Values, release: str = RELEASE) -> list[Manifest]:
    """All objects of a release."""
    texts = (text for name, text in render_text(values, release).items() if name != "NOTES.txt")
    return [item for text in texts for item in yaml.load_all(text, LOADER) if item]


def objects(values: Values, kind: str) -> list[Manifest]:
    """The objects of one kind."""
    return [item for item in render(values) if item["kind"] == kind]


def the(values: Values, kind: str) -> Manifest:
    """The only object of its kind."""
    (found,) = objects(values, kind)
    return found


def pod_templates(values: Values) -> Iterator[tuple[str, Manifest]]:
    """Name and spec of every pod that a release makes."""
    for item in render(values):
        if item["kind"] == "Pod":
            yield item["metadata"]["name"], item["spec"]
        elif item["kind"] in ("Deployment", "Job"):
            yield item["metadata"]["name"], item["spec"]["template"]["spec"]


def server(values: Values) -> Manifest:
    """The server's container of the only pool."""
    (container,) = the(values, "Deployment")["spec"]["template"]["spec"]["containers"]
    found: Manifest = container
    return found


def refusal(values: Values) -> str:
    """Why Helm refuses these values."""
    try:
        render_text(values)
    except HelmError as error:
        return str(error)
    raise AssertionError("rendered")


def lint_messages(values: Values) -> list[str]:
    """What `helm lint --strict` says beyond information."""
    report = lint(CHART, values, strict=True, kube_version=f"v{KUBERNETES}.0")
    told = [message["error"] for message in report["messages"] if message["severity"] > 1]
    return told + report["errors"]


def merged(*layers: Values) -> Values:
    """Values over values, as Helm merges files: maps deeply, lists replaced."""
    out: Values = {}
    for layer in layers:
        for key, value in layer.items():
            both = isinstance(value, dict) and isinstance(out.get(key), dict)
            out[key] = merged(out[key], value) if both else value
    return out


def pool(**changes: Any) -> Values:
    """Values with one pool, from a volume, with these keys changed."""
    facts = {
        "name": "a",
        "gpus": 1,
        "resources": {"limits": {"memory": "8Gi"}},
        "engine": {"pvc": {"claim": "engines", "path": "x"}},
    }
    return {"pools": [{**facts, **changes}]}
