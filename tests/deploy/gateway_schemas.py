"""The parts of Gateway API that the chart uses, as JSON schemas: no Python package has them."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]


def _object(required: list[str], **properties: Schema) -> Schema:
    return {
        "type": "object",
        "required": required,
        "properties": properties,
        "additionalProperties": False,
    }


def _array(items: Schema) -> Schema:
    return {"type": "array", "items": items, "minItems": 1, "maxItems": 16}


STRING = {"type": "string", "minLength": 1}
PORT = {"type": "integer", "minimum": 1, "maximum": 65535}
BACKENDS = _array(_object(["name", "port"], name=STRING, port=PORT, weight={"type": "integer"}))
PATH = _object(
    ["type", "value"],
    type={"enum": ["Exact", "PathPrefix", "RegularExpression"]},
    value={"type": "string", "pattern": "^/"},
)
METHOD = _object(["service"], type={"enum": ["Exact"]}, service=STRING, method=STRING)
TIMEOUTS = _object([], request={"type": "string", "pattern": "^[0-9]+(s|m)$"})
PARENTS = _array(_object(["name"], name=STRING, namespace=STRING, sectionName=STRING))


def _route(kind: str, rule: Schema) -> Schema:
    spec = _object(
        ["parentRefs", "rules"],
        parentRefs=PARENTS,
        hostnames=_array({"type": "string", "pattern": r"^(\*\.)?[a-z0-9]([a-z0-9.-]*[a-z0-9])?$"}),
        rules=_array(rule),
    )
    return _object(
        ["apiVersion", "kind", "metadata", "spec"],
        apiVersion={"const": "gateway.networking.k8s.io/v1"},
        kind={"const": kind},
        metadata={"type": "object", "required": ["name"], "properties": {"name": STRING}},
        spec=spec,
    )


ROUTES = {
    "HTTPRoute": _route(
        "HTTPRoute",
        _object(
            ["backendRefs"],
            matches=_array(_object([], path=PATH)),
            backendRefs=BACKENDS,
            timeouts=TIMEOUTS,
        ),
    ),
    "GRPCRoute": _route(
        "GRPCRoute",
        _object(["backendRefs"], matches=_array(_object([], method=METHOD)), backendRefs=BACKENDS),
    ),
}
