"""Values that the chart refuses, each with a message that names the place."""

from __future__ import annotations

import pytest
from charts import Values, merged, pool, refusal, render

BUILD = {"gpus": 0, "engine": {"build": {"target": "qwen3-4b"}}}
CLOSED = {"server": {"openai": {"enabled": False}}}
STORE = {"source": "store:engines/x", "sizeLimit": "1Gi"}
GATEWAY = {"enabled": True, "parentRefs": [{"name": "p"}]}
SCALED = {"autoscaling": {"minReplicas": 1, "maxReplicas": 3}}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"gpuPools": []}, "additional properties 'gpuPools' not allowed"),
        ({"server": {"quue": 1}}, "additional properties 'quue' not allowed"),
        ({"pools": []}, "'/pools': minItems"),
        (pool(replica=2), "additional properties 'replica' not allowed"),
        (pool(gpus=2), "'/pools/0/gpus': value must be one of 0, 1"),
        (pool(gpuResource="gpu"), "'/pools/0/gpuResource'"),
        (pool(name="a-name-of-16-char"), "'/pools/0/name': maxLength"),
        (pool(name="A100"), "'/pools/0/name'"),
        (pool(replicas=-1), "'/pools/0/replicas': minimum"),
        (pool(engine={}), "'/pools/0/engine': minProperties"),
        (
            pool(engine={"pvc": {"claim": "a", "path": ""}, "build": {"target": "b"}}),
            "'/pools/0/engine': maxProperties",
        ),
        (pool(engine={"pvc": {"path": "x"}}), "missing property 'claim'"),
        (pool(engine={"pvc": {"claim": "a", "path": "../x y"}}), "'/pools/0/engine/pvc/path'"),
        (
            pool(engine={"objectStore": {"source": "no remote", "sizeLimit": "1Gi"}}),
            "'/pools/0/engine/objectStore/source'",
        ),
        (pool(resources={"limits": {"memory": "8G"}}), "/resources/limits/memory"),
        (pool(resources={"limits": {"nvidia.com/gpu": 1}}), "/resources/limits"),
        ({"image": {"digest": "latest"}}, "'/image/digest'"),
        ({"drain": {"longestRequestSeconds": 0}}, "'/drain/longestRequestSeconds': minimum"),
        ({"server": {"queue": "64"}}, "'/server/queue': got string, want integer"),
        ({"podSecurityContext": {"runAsNonRoot": False}}, "'/podSecurityContext/runAsNonRoot'"),
        ({"containerSecurityContext": {"privileged": True}}, "/privileged"),
        ({"build": {"hubTokenSecret": {"name": "hub"}}}, "'key' required, if 'name' exists"),
        ({"build": {"hubTokenSecret": {"token": "hf_abc"}}}, "'token' not allowed"),
        ({"autoscaling": {"kind": "vpa"}}, "'/autoscaling/kind'"),
        ({"autoscaling": {"kind": "keda"}}, "'/autoscaling/keda/prometheus'"),
        ({"ingress": {"enabled": True}}, "'/ingress/host': minLength"),
        ({"ingress": {"grpc": {"enabled": True}}}, "'/ingress/grpc/host': minLength"),
        ({"gateway": {"enabled": True}}, "'/gateway/parentRefs': minItems"),
        ({"gateway": {"hostnames": ["a b"]}}, "'/gateway/hostnames/0'"),
        (pool(resources={"claims": [{"name": "a"}]}), "additional properties 'claims'"),
        ({"autoscaling": {"keda": {"pollingSeconds": 5}}}, "'pollingSeconds' not allowed"),
        ({"autoscaling": {"keda": {"fallback": {"replicas": 5}}}}, "'failureThreshold' required"),
        ({"autoscaling": {"scaleUpStabilizationSeconds": 3601}}, "maximum"),
        (
            pool(engine={"objectStore": {**STORE, "env": {"PATH": "/tmp"}}}),
            "'/pools/0/engine/objectStore/env'",
        ),
    ],
)
def test_refused_by_the_schema(values: Values, message: str) -> None:
    assert message in refusal(values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"pools": pool()["pools"] * 2},
            "pools: two pools are named a",
        ),
        (
            pool(replicas=2, **BUILD),
            "pools: a may have 2 replicas, and its engine's volume is ReadWriteOnce",
        ),
        (
            pool(**SCALED, **BUILD),
            "pools: a may have 3 replicas, and its engine's volume is ReadWriteOnce",
        ),
        (
            pool(
                engine={"pvc": {"claim": "x", "path": "", "accessMode": "ReadWriteOnce"}},
                replicas=4,
            ),
            "pools: a may have 4 replicas, and its engine's volume is ReadWriteOnce",
        ),
        (
            {
                "pools": [
                    pool(gpus=0, name=name, engine={"build": {"target": "t", "claim": "shared"}})[
                        "pools"
                    ][0]
                    for name in ("a", "b")
                ]
            },
            "pools: a and b share the claim shared, which is ReadWriteOnce",
        ),
        (
            merged(pool(), {"shm": {"sizeLimit": "8Gi"}}),
            "pools: a has a memory limit of 8Gi, and /dev/shm alone may take 8Gi of it",
        ),
        (
            merged(pool(), {"autoscaling": {"kind": "hpa"}}),
            "autoscaling.kind is hpa, and no pool has autoscaling.minReplicas and maxReplicas",
        ),
        (
            pool(autoscaling={"minReplicas": 3, "maxReplicas": 2}),
            "pools: a has autoscaling.minReplicas above maxReplicas",
        ),
        (
            merged(pool(**BUILD), {"build": {"hook": True}}),
            "build.hook: the Job of pool a runs before the chart can make a claim",
        ),
        (
            pool(engine={"build": {"target": "qwen3-4b"}}),
            "pools: a has GPUs, and its engine would be built for the CPU: add --device",
        ),
        (
            pool(engine={"build": {"target": "t", "args": ["--device-like", "x"], "gpus": 0}}),
            "pools: a has GPUs, and its engine would be built for the CPU: add --device",
        ),
        (
            pool(**SCALED),
            "pools: a has autoscaling, and autoscaling.kind is none: set replicas, or a kind",
        ),
        (
            pool(gpus=0, gpuResource="nvidia.com/gpu"),
            "pools: a has a gpuResource, and gpus is 0",
        ),
        (
            pool(engine={"objectStore": STORE}),
            "pools: a copies its engine from the remote store, which nothing describes: "
            "set RCLONE_CONFIG_STORE_TYPE in engine.objectStore.env, or name a secret",
        ),
        (
            pool(engine={"objectStore": {**STORE, "source": "store,env_auth=true:b/x"}}),
            "which nothing describes: set RCLONE_CONFIG_STORE_TYPE in engine.objectStore.env",
        ),
        (
            pool(engine={"objectStore": {**STORE, "env": {"RCLONE_CONFIG_STORE_SAS_URL": "x"}}}),
            "pools: a has RCLONE_CONFIG_STORE_SAS_URL in engine.objectStore.env, which is named",
        ),
        (
            pool(engine={"objectStore": {**STORE, "env": {"RCLONE_CONFIG_STORE_KEY": "x"}}}),
            "pools: a has RCLONE_CONFIG_STORE_KEY in engine.objectStore.env, which is named like a "
            "secret: put it into engine.objectStore.secret",
        ),
        (
            {"serviceAccount": {"create": False, "annotations": {"a": "b"}}},
            "serviceAccount: annotations are for an account that the chart makes",
        ),
        (
            merged(CLOSED, {"ingress": {"enabled": True, "host": "h"}}),
            "ingress: there is nothing to route to: set server.openai.enabled or ingress.triton",
        ),
        (
            merged(CLOSED, {"gateway": {"enabled": True, "parentRefs": [{"name": "p"}]}}),
            "gateway: there is nothing to route to: set server.openai.enabled, gateway.triton or",
        ),
        (
            merged(CLOSED, {"service": {"type": "NodePort"}}),
            "service: a NodePort would have no ports: set server.openai.enabled or service.triton",
        ),
        (
            {"gateway": {**GATEWAY, "grpc": {"hostnames": ["grpc.example.com"]}}},
            "gateway: grpc.hostnames are of a GRPCRoute, which is made only with "
            "gateway.grpc.enabled: true",
        ),
        (
            merged(
                CLOSED,
                {"gateway": {**GATEWAY, "hostnames": ["a.b"], "grpc": {"enabled": True}}},
            ),
            "gateway: hostnames are of the HTTPRoute, and there is none without",
        ),
        (
            {"extraEnv": [{"name": "MY_TOKEN", "value": "abc"}]},
            "extraEnv: MY_TOKEN is named like a secret and has a plain value: "
            "use valueFrom.secretKeyRef",
        ),
    ],
)
def test_refused_by_the_templates(values: Values, message: str) -> None:
    assert message in refusal(values)


@pytest.mark.parametrize("args", [["--device", "sm90"], ["--max-slots", "2", "--device=sm90"]])
def test_a_gpu_pool_with_a_device_is_taken(args: list[str]) -> None:
    assert render(pool(engine={"build": {"target": "qwen3-4b", "args": args}}))


def test_what_a_parent_chart_passes_is_taken() -> None:
    assert render({"global": {"imageRegistry": "x"}}) == render({})


def test_a_gateway_that_is_off_may_keep_its_hostnames() -> None:
    hostnames = {"hostnames": ["a.b"], "grpc": {"hostnames": ["c.d"]}}
    assert render({"gateway": hostnames}) == render({})


def test_a_remote_may_be_a_connection_string() -> None:
    store = {"source": "store,env_auth=true:b/x", "env": {"RCLONE_CONFIG_STORE_TYPE": "s3"}}
    assert render(pool(engine={"objectStore": {**STORE, **store}}))


def test_where_a_token_comes_from_is_no_secret() -> None:
    url = {"RCLONE_CONFIG_STORE_TYPE": "box", "RCLONE_CONFIG_STORE_TOKEN_URL": "https://a.b"}
    assert render(pool(engine={"objectStore": {**STORE, "env": url}}))
    assert render({"extraEnv": [{"name": "MY_TOKEN_URL", "value": "https://a.b"}]})


def test_a_secret_by_reference_is_taken() -> None:
    token = {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}}
    assert render({"extraEnv": [token]})
