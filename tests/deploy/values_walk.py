"""Walks the chart's schema: every value that can be set, and releases in which it matters."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import yaml
from charts import CHART, Values, merged, pool

Path = tuple[str | int, ...]
Schema = dict[str, Any]

DEFAULTS: Values = yaml.safe_load((CHART / "values.yaml").read_text())
SCHEMA: Schema = json.loads((CHART / "values.schema.json").read_text())
NOT_USED = {("global",)}  # a parent chart's, says the schema

_CPU = {"gpus": 0, "resources": {"requests": {"cpu": "2"}, "limits": {"memory": "8Gi"}}}
_SCALED = {"autoscaling": {"minReplicas": 1, "maxReplicas": 3}}
_BUILD = {"target": "qwen3-4b", "drafter": "d", "args": ["--device", "sm90"]}
_SHARED = {"build": {"cache": {"accessMode": "ReadWriteMany"}}}

# Between them every template renders, and every part of each.
RELEASES: dict[str, Values] = {
    "volume, KEDA, gateway": merged(
        pool(**_SCALED, runtimeClassName="nvidia", gpuResource="nvidia.com/gpu"),
        {
            "autoscaling": {
                "kind": "keda",
                "keda": {
                    "prometheus": "http://p",
                    "fallback": {"failureThreshold": 3, "replicas": 2},
                },
            },
            "gateway": {
                "enabled": True,
                "parentRefs": [{"name": "p"}],
                "triton": True,
                "grpc": {"enabled": True},
            },
            "metrics": {"monitor": {"kind": "PodMonitor"}, "rules": {"enabled": True}},
            "server": {"openai": {"apiKeySecret": {"name": "n", "key": "k"}}},
            "service": {"type": "LoadBalancer", "triton": True},
        },
    ),
    "store, HPA, ingress": merged(
        pool(
            **_SCALED,
            engine={
                "objectStore": {
                    "source": "s:p", "secret": "s", "env": {"RCLONE_A": "b"}, "sizeLimit": "1Gi",
                }
            },
        ),
        {
            "autoscaling": {"kind": "hpa"},
            "ingress": {
                "enabled": True,
                "host": "h",
                "tlsSecret": "t",
                "triton": True,
                "grpc": {"enabled": True, "host": "g", "tlsSecret": "t"},
            },
            "metrics": {"monitor": {"kind": "ServiceMonitor"}},
        },
    ),
    "volume": pool(replicas=1, rollout={"maxSurge": 1, "maxUnavailable": 0}),
    "build": merged(pool(**_CPU, engine={"build": _BUILD | {"args": []}}), _SHARED),
    "build, claimed": merged(
        pool(gpus=0, gpuResource="a/gpu", engine={"build": _BUILD | {"claim": "c", "gpus": 1}}),
        _SHARED,
        {"build": {"hubTokenSecret": {"name": "n", "key": "k"}}},
    ),
}  # fmt: skip


def leaves(schema: Schema = SCHEMA, path: Path = ()) -> Iterator[tuple[Path, Schema]]:
    """Each value that holds no other named ones, and its schema."""
    if "$ref" in schema:
        schema = SCHEMA["$defs"][schema["$ref"].rsplit("/", 1)[1]]
    if path in NOT_USED:
        return
    if path == ("pools",):
        yield from leaves(schema["items"], (*path, 0))
    elif "properties" in schema and schema.get("additionalProperties") is False:
        for name, child in schema["properties"].items():
            yield from leaves(child, (*path, name))
    else:
        yield path, schema


def get(values: Values, path: Path) -> Any:
    """What is there, of the values or the defaults; None for nothing."""
    place: Any = merged(DEFAULTS, values)
    for step in path:
        if isinstance(step, str) and step not in place:
            return None
        place = place[step]
    return place


def put(values: Values, path: Path, value: Any) -> Values:
    """The values with one changed. The folder of a pool that is not there is not made."""
    changed = merged({}, copy.deepcopy(values))
    place: Any = changed
    for step in path[:-1]:
        place = place[step] if isinstance(step, int) else place.setdefault(step, {})
    place[path[-1]] = value
    return changed


def fits(value: Any, schema: Schema) -> bool:
    """Whether a text or a number is one that the schema takes."""
    options = schema.get("anyOf", [schema])
    return any(_fits(value, option) for option in options)


def _fits(value: Any, schema: Schema) -> bool:
    if "$ref" in schema:
        schema = SCHEMA["$defs"][schema["$ref"].rsplit("/", 1)[1]]
    if "enum" in schema or "const" in schema:
        return False
    if isinstance(value, str):
        return (
            "string" in schema.get("type", "")
            and len(value) <= schema.get("maxLength", 999)
            and bool(re.search(schema.get("pattern", ""), value))
        )
    return (
        "integer" in schema.get("type", "")
        and schema.get("minimum", value) <= value <= schema.get("maximum", value)
    )  # fmt: skip


def filled(values: Values, make: Callable[[Schema], Any]) -> Values:
    """The values with every one replaced that is there and for which `make` makes something."""
    for path, schema in leaves():
        if get(values, path) is None:
            continue
        members = [
            schema.get("additionalProperties"),
            *schema.get("patternProperties", {}).values(),
        ]
        named = [member for member in members if isinstance(member, dict)]
        if "properties" in schema:
            continue  # names with rules of their own, as those of resources
        item = make(named[0] if named else schema.get("items", schema))
        if item is None:
            continue
        if named:
            item = dict.fromkeys(get(values, path) or ["a"], item)
        values = put(values, path, [item] if schema.get("type") == "array" else item)
    return values
