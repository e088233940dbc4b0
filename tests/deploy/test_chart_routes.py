"""What a release publishes: OpenAI's API, which asks for a key, and Triton, which asks for none."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from charts import Manifest, Values, example, merged, objects, render, render_text, server, the

OPENAI, TRITON = {9000, "openai"}, {8000, 8001, "http", "grpc"}
KEY = {"server": {"openai": {"apiKeySecret": {"name": "api-keys", "key": "keys"}}}}
GATEWAY = {"gateway": {"enabled": True, "parentRefs": [{"name": "public"}]}}
INGRESS = {"ingress": {"enabled": True, "host": "llm.example.com"}}
WAYS_IN: dict[str, Values] = {
    "gateway": GATEWAY,
    "ingress": INGRESS,
    "load balancer": {"service": {"type": "LoadBalancer"}},
    "node port": {"service": {"type": "NodePort"}},
}
WITH_TRITON: dict[str, Values] = {
    "gateway, HTTP": merged(GATEWAY, {"gateway": {"triton": True}}),
    "gateway, gRPC": merged(GATEWAY, {"gateway": {"grpc": {"enabled": True}}}),
    "ingress, HTTP": merged(INGRESS, {"ingress": {"triton": True}}),
    "ingress, gRPC": {"ingress": {"grpc": {"enabled": True, "host": "grpc.example.com"}}},
    "load balancer": {"service": {"type": "LoadBalancer", "triton": True}},
}


def published(values: Values) -> Iterator[int | str]:
    """The ports, by number or name, that can be reached from beyond the cluster."""
    for item in render(values):
        spec = item.get("spec", {})
        if item["kind"] in ("HTTPRoute", "GRPCRoute"):
            yield from (
                backend["port"] for rule in spec["rules"] for backend in rule["backendRefs"]
            )
        elif item["kind"] == "Ingress":
            for path in (path for rule in spec["rules"] for path in rule["http"]["paths"]):
                yield path["backend"]["service"]["port"]["name"]
        elif item["kind"] == "Service" and spec.get("type", "ClusterIP") != "ClusterIP":
            yield from (port["port"] for port in spec["ports"])


@pytest.mark.parametrize("way", WAYS_IN)
def test_what_asks_for_no_key_is_not_published_by_itself(way: str) -> None:
    ports = set(published(merged(KEY, WAYS_IN[way])))
    assert ports
    assert ports <= OPENAI


@pytest.mark.parametrize("way", WITH_TRITON)
def test_triton_is_published_on_request_and_the_notes_say_what_that_means(way: str) -> None:
    values = merged(KEY, WITH_TRITON[way])
    assert set(published(values)) & TRITON
    assert "asks for no key" in render_text(values)["NOTES.txt"]


OFF: dict[str, Values] = {
    "gateway": {"gateway": {"triton": True, "grpc": {"enabled": True}}},
    "ingress": {"ingress": {"triton": True}},
    "service": {"service": {"triton": True}},
}


@pytest.mark.parametrize("way", OFF)
def test_the_notes_warn_of_nothing_that_is_off(way: str) -> None:
    values = merged(KEY, OFF[way])
    assert not set(published(values))
    assert "asks for no key" not in render_text(values)["NOTES.txt"]


@pytest.mark.parametrize("way", WAYS_IN)
def test_the_notes_say_that_triton_is_not_published(way: str) -> None:
    """It was by these values alone, in charts before 0.2.0."""
    told = "Published is OpenAI's API alone"
    assert told in render_text(WAYS_IN[way])["NOTES.txt"]
    assert told not in render_text({})["NOTES.txt"]
    for more in WITH_TRITON.values():
        assert told not in render_text(more)["NOTES.txt"]


def test_the_production_example_publishes_what_its_key_guards() -> None:
    values = example("production")
    assert [arg for arg in server(values)["args"] if arg.startswith("--api-key-file=")]
    assert set(published(values)) == {9000}
    assert "asks for no key" not in render_text(values)["NOTES.txt"]


def test_within_the_cluster_a_service_has_all_ports() -> None:
    for way in WAYS_IN.values():
        (service,) = [
            item
            for item in objects(merged(KEY, way), "Service")
            if item["metadata"]["name"] == "demo-dflash-triton"
        ]
        assert service["spec"]["type"] == "ClusterIP"
        assert {port["port"] for port in service["spec"]["ports"]} == {8000, 8001, 8002, 9000}


def test_annotations_are_of_the_service_that_is_published() -> None:
    note = {"service": {"annotations": {"a": "b"}}}
    for way, name in (
        ({}, "demo-dflash-triton"),
        (WAYS_IN["load balancer"], "demo-dflash-triton-public"),
    ):
        noted = [
            item["metadata"]["name"]
            for item in objects(merged(way, note), "Service")
            if "annotations" in item["metadata"]
        ]
        assert noted == [name]


def methods(values: Values) -> set[str]:
    """The methods of Triton's gRPC service that a release routes, all by their whole names."""
    service = "inference.GRPCInferenceService"
    found = set()
    for route in objects(values, "GRPCRoute"):
        for match in (match for rule in route["spec"]["rules"] for match in rule["matches"]):
            assert match["method"].pop("type") == "Exact"
            assert match["method"].pop("service") == service
            found.add(match["method"].pop("method"))
    for path in (path for item in objects(values, "Ingress") for path in grpc_paths(item)):
        assert path["pathType"] == "Exact"
        found.add(path["path"].removeprefix(f"/{service}/"))
    return found


def grpc_paths(ingress: Manifest) -> list[Manifest]:
    paths = (path for rule in ingress["spec"]["rules"] for path in rule["http"]["paths"])
    return [path for path in paths if path["backend"]["service"]["port"]["name"] == "grpc"]


@pytest.mark.parametrize("way", ["gateway, gRPC", "ingress, gRPC"])
def test_grpc_routes_lead_to_inference_and_not_to_the_settings_of_a_server(way: str) -> None:
    assert methods(WITH_TRITON[way]) == {
        "ServerLive", "ServerReady", "ServerMetadata", "ModelReady", "ModelMetadata", "ModelConfig",
        "ModelInfer", "ModelStreamInfer",
    }  # fmt: skip


def test_http_routes_lead_to_models() -> None:
    route = the(WITH_TRITON["gateway, HTTP"], "HTTPRoute")
    (ingress,) = objects(WITH_TRITON["ingress, HTTP"], "Ingress")
    paths = [rule["matches"][0]["path"]["value"] for rule in route["spec"]["rules"]]
    assert paths == ["/v1", "/v2/models"]
    assert [path["path"] for path in ingress["spec"]["rules"][0]["http"]["paths"]] == paths


def test_a_gateway_waits_longer_than_a_request_may_take() -> None:
    values = merged(example("production"), {"drain": {"longestRequestSeconds": 300}})
    for rule in the(values, "HTTPRoute")["spec"]["rules"]:
        assert int(rule["timeouts"]["request"].removesuffix("s")) > 300


def test_without_the_openai_front_end_nothing_routes_to_it() -> None:
    off = {"server": {"openai": {"enabled": False}}, "gateway": {"triton": True}}
    for name in ("production", "ingress-hpa"):
        values = merged(example(name), off)
        assert "--openai-port=0" in server(values)["args"]
        rendered = str(render(values)).replace("--openai-port=0", "")
        assert not re.search(r"openai|9000|api-key|'/v1'", rendered)
