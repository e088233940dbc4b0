"""What the rendered objects make a cluster do."""

from __future__ import annotations

import copy
import math
import re
from typing import Any

import pytest
from charts import EXAMPLES, Values, example, merged, objects, pool, render, server, the
from charts import render_text as texts

SM90 = ["--device", "sm90"]
BUILD = pool(engine={"build": {"target": "qwen3-4b", "args": SM90}})
SETS = ["default", *EXAMPLES]


def spec(values: Values) -> Any:
    return the(values, "Deployment")["spec"]


def pod(values: Values) -> Any:
    return spec(values)["template"]["spec"]


def build_pod(values: Values) -> Any:
    return the(values, "Job")["spec"]["template"]["spec"]


def test_a_deployment_per_pool_and_one_service() -> None:
    values = example("two-gpu-types")
    h100, h200 = sorted(objects(values, "Deployment"), key=lambda item: item["metadata"]["name"])
    selectors = [item["spec"]["selector"]["matchLabels"] for item in (h100, h200)]
    assert selectors[0] != selectors[1]
    (service,) = [item for item in objects(values, "Service") if "type" in item["spec"]]
    for selector in selectors:
        assert service["spec"]["selector"].items() <= selector.items()
    engines = [
        item["spec"]["template"]["spec"]["containers"][0]["args"][1] for item in (h100, h200)
    ]
    assert engines == ["/engines/qwen3-8b-h100", "/engines/qwen3-8b-h200-mig"]
    limits = [
        item["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"]
        for item in (h100, h200)
    ]
    assert limits[0]["nvidia.com/gpu"] == limits[1]["nvidia.com/mig-3g.71gb"] == 1


@pytest.mark.parametrize("name", SETS)
def test_services_select_only_servers(name: str) -> None:
    items = render(example(name))
    for service in (item for item in items if item["kind"] == "Service"):
        selector = service["spec"]["selector"].items()
        for item in items:
            if item["kind"] in ("Deployment", "Job", "Pod"):
                labels = item["spec"].get("template", item)["metadata"]["labels"]
                assert (selector <= labels.items()) == (item["kind"] == "Deployment")


def test_gpu_pools_tolerate_the_usual_taint_and_cpu_pools_see_no_gpu() -> None:
    assert pod(pool())["tolerations"][0]["key"] == "nvidia.com/gpu"
    assert "tolerations" not in pod(pool(tolerations=[]))
    assert "tolerations" not in pod(pool(gpus=0))
    assert {"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"} in server(pool(gpus=0))["env"]


def test_a_gpu_pool_needs_no_spare_gpu_to_roll() -> None:
    rolling = [spec(pool(gpus=gpus))["strategy"]["rollingUpdate"] for gpus in (0, 1)]
    assert rolling == [{"maxSurge": 1, "maxUnavailable": 0}, {"maxSurge": 0, "maxUnavailable": 1}]


@pytest.mark.parametrize(("request_s", "wait_s"), [(120, 15), (900, 30)])
def test_a_pod_outlives_its_longest_request(request_s: int, wait_s: int) -> None:
    values = {"drain": {"longestRequestSeconds": request_s, "preStopSeconds": wait_s}}
    container = server(values)
    assert {f"--request-seconds={request_s}", f"--drain-seconds={request_s}"} <= {
        *container["args"]
    }
    assert container["lifecycle"]["preStop"] == {"sleep": {"seconds": wait_s}}
    # The server may take 15 s beyond the drain to unload.
    assert pod(values)["terminationGracePeriodSeconds"] > request_s + wait_s + 15


@pytest.mark.parametrize("seconds", [30, 901, 3600])
def test_startup_probe_waits_as_long_as_told(seconds: int) -> None:
    probe = server({"probes": {"startupSeconds": seconds}})["startupProbe"]
    assert probe["failureThreshold"] == math.ceil(seconds / probe["periodSeconds"])


def test_probes_ask_the_model_and_liveness_only_the_server() -> None:
    container = server({})
    paths = {kind: container[f"{kind}Probe"]["httpGet"]["path"] for kind in (
        "startup", "readiness", "liveness",
    )}  # fmt: skip
    assert paths["startup"] == paths["readiness"] == "/v2/models/ensemble/ready"
    assert paths["liveness"] == "/v2/health/live"


def test_writable_folders_are_the_declared_ones() -> None:
    mounts = {
        mount["mountPath"]: mount.get("readOnly", False) for mount in server({})["volumeMounts"]
    }
    assert mounts == {"/engines": True, "/dev/shm": False, "/tmp": False, "/cache": False}
    volumes = {volume["name"]: volume for volume in pod({})["volumes"]}
    assert volumes["shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "256Mi"}
    env = {item["name"]: item.get("value") for item in server({})["env"]}
    assert {env["HOME"], env["TMPDIR"]} == {"/cache", "/tmp"}
    assert env["HF_HUB_OFFLINE"] == "1"


def test_servers_wait_for_the_engine_that_the_job_writes() -> None:
    (init,) = pod(BUILD)["initContainers"]
    engine = next(item["value"] for item in init["env"] if item["name"] == "ENGINE")
    assert {"name": "ENGINE", "value": engine} in build_pod(BUILD)["containers"][0]["env"]
    assert server(BUILD)["args"][1] == engine
    volumes = [pod["volumes"][0]["persistentVolumeClaim"] for pod in (pod(BUILD), build_pod(BUILD))]
    assert (
        volumes[0]
        == volumes[1]
        == {"claimName": the(BUILD, "PersistentVolumeClaim")["metadata"]["name"]}
    )
    assert "nvidia.com/gpu" not in init["resources"]["limits"]


def test_a_job_is_never_changed_only_replaced() -> None:
    """The API server refuses a changed pod template, so equal names must mean equal templates."""
    layers: list[Values] = [
        {},
        {"build": {"retries": 5}},
        {"build": {"resources": {"limits": {"memory": "99Gi"}}}},
        {"buildImage": {"tag": "9.9"}},
        {"imagePullSecrets": [{"name": "x"}]},
        {"podSecurityContext": {"runAsUser": 7}},
    ]
    jobs = [the(merged(BUILD, layer), "Job") for layer in layers]
    assert len({job["metadata"]["name"] for job in jobs}) == len(layers)


def test_an_engine_is_built_again_only_for_what_changes_it() -> None:
    def engine(values: Values) -> str:
        found: str = server(values)["args"][1]
        return found

    same = [{"build": {"retries": 5, "downloads": "9Gi"}}, {"server": {"queue": 3}}]
    assert {engine(merged(BUILD, layer)) for layer in same} == {engine(BUILD)}
    others = [
        merged(BUILD, {"buildImage": {"tag": "9.9"}}),
        pool(engine={"build": {"target": "qwen3-8b", "args": SM90}}),
        pool(engine={"build": {"target": "qwen3-4b", "args": [*SM90, "--precision", "fp8"]}}),
        pool(**BUILD["pools"][0] | {"nodeSelector": {"gpu": "h200"}}),
        pool(**BUILD["pools"][0] | {"name": "b"}),
    ]
    assert len({engine(values) for values in [BUILD, *others]}) == len(others) + 1


def test_a_new_chart_version_restarts_no_pod_by_itself() -> None:
    labels = spec({})["template"]["metadata"]["labels"]
    assert not {"helm.sh/chart", "app.kubernetes.io/version"} & labels.keys()


def test_a_volume_of_one_node_keeps_its_pods_on_that_node() -> None:
    for found in (pod(BUILD), build_pod(BUILD)):
        (term,) = found["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        assert term["topologyKey"] == "kubernetes.io/hostname"
        for kind in ("Deployment", "Job"):
            labels = the(BUILD, kind)["spec"]["template"]["metadata"]["labels"]
            assert term["labelSelector"]["matchLabels"].items() <= labels.items()
    shared = merged(BUILD, {"build": {"cache": {"accessMode": "ReadWriteMany"}}})
    assert "affinity" not in pod(shared)


def test_as_a_hook_the_job_needs_nothing_of_the_release() -> None:
    values = example("build-on-gpu")
    job = the(values, "Job")
    assert job["metadata"]["annotations"]["helm.sh/hook"] == "pre-install,pre-upgrade"
    assert job["spec"]["template"]["spec"]["serviceAccountName"] == "default"
    assert objects(values, "PersistentVolumeClaim") == []
    (container,) = job["spec"]["template"]["spec"]["containers"]
    token = next(item for item in container["env"] if item["name"] == "HF_TOKEN")
    assert token["valueFrom"] == {"secretKeyRef": {"name": "hub", "key": "token"}}
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 1


def test_gpu_and_priority_of_a_job_are_its_own() -> None:
    alone = pool(engine={"build": {"target": "qwen3-4b", "args": SM90, "gpus": 0}})
    classes = {"priorityClassName": "low", "build": {"priorityClassName": "high"}}
    (container,) = build_pod(alone)["containers"]
    assert "nvidia.com/gpu" not in container["resources"]["limits"]
    assert {"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"} in container["env"]
    assert server(alone)["resources"]["limits"]["nvidia.com/gpu"] == 1
    values = merged(BUILD, classes)
    assert (pod(values)["priorityClassName"], build_pod(values)["priorityClassName"]) == (
        "low",
        "high",
    )


def test_the_object_store_fills_a_volume_of_the_pod() -> None:
    values = example("object-store")
    (init,) = pod(values)["initContainers"]
    assert init["args"][:3] == ["sync", "store:engines/qwen3-4b-l40s", server(values)["args"][1]]
    assert init["envFrom"] == [{"secretRef": {"name": "engines-store"}}]
    assert pod(values)["volumes"][0]["emptyDir"] == {"sizeLimit": "30Gi"}


def fetch_env(values: Values) -> Any:
    (init,) = pod(values)["initContainers"]
    assert "envFrom" not in init
    return {item["name"]: item["value"] for item in init["env"]}


def test_a_workload_identity_needs_no_secret_and_reaches_who_hands_it_out() -> None:
    values = example("workload-identity")
    env = fetch_env(values)
    assert (env["RCLONE_CONFIG_STORE_TYPE"], env["RCLONE_CONFIG_STORE_ENV_AUTH"]) == ("s3", "true")
    (policy,) = objects(values, "NetworkPolicy")
    reached = {
        (peer["ipBlock"]["cidr"], port["port"])
        for rule in policy["spec"]["egress"]
        for peer in rule.get("to", [])
        for port in rule["ports"]
    }
    assert {("169.254.170.23/32", 80), ("169.254.169.254/32", 80), ("169.254.169.252/32", 988)} <= (
        reached
    )


def test_a_remote_that_says_everything_by_itself_needs_nothing_else() -> None:
    store = {"source": ":s3,env_auth,provider=AWS:engines/x", "sizeLimit": "1Gi"}
    assert fetch_env(pool(engine={"objectStore": store})) == {"HOME": "/tmp"}


def threads(values: Values) -> list[Any]:
    return [item for item in server(values)["env"] if item["name"] == "DFLASH_TRT_THREADS"]


def test_a_cpu_pod_computes_with_the_cores_that_it_asked_for() -> None:
    """Without a CPU limit a process sees all cores of its node, and starts a thread for each."""
    (variable,) = threads(pool(gpus=0))
    assert variable["valueFrom"] == {
        "resourceFieldRef": {
            "containerName": server(pool(gpus=0))["name"],
            "resource": "requests.cpu",
            "divisor": "1",  # whole cores, rounded up
        }
    }
    assert threads(pool(gpus=1)) == []  # an engine on a GPU refuses a number of threads


def test_autoscaled_pools_have_no_fixed_replicas() -> None:
    assert "replicas" not in spec(example("production"))
    assert spec(pool(replicas=0))["replicas"] == 0
    assert objects(pool(), "HorizontalPodAutoscaler") == []
    hpa = the(example("ingress-hpa"), "HorizontalPodAutoscaler")["spec"]
    assert (
        hpa["scaleTargetRef"]["name"]
        == the(example("ingress-hpa"), "Deployment")["metadata"]["name"]
    )
    assert {metric["pods"]["metric"]["name"] for metric in hpa["metrics"]} == {
        "dflash_queue_depth",
        "dflash_slots_in_use",
    }


def scaled_object(fallback: Values) -> Any:
    values = merged(example("production"), {"autoscaling": {"keda": {"fallback": fallback}}})
    return the(values, "ScaledObject")["spec"]


def test_an_answer_without_metrics_is_no_load_of_zero() -> None:
    """KEDA reads an empty answer as 0 unless told otherwise, and scales a loaded release down."""
    for trigger in scaled_object({})["triggers"]:
        assert trigger["metadata"]["ignoreNullValues"] == "false"
    assert "fallback" not in scaled_object({})  # KEDA then reports the error, and replicas stay


def test_a_fallback_is_of_a_kind_that_keda_takes() -> None:
    wanted = {"failureThreshold": 9, "replicas": 6, "behavior": "currentReplicasIfHigher"}
    made = scaled_object(wanted)
    assert made["fallback"] == wanted
    assert {trigger["metricType"] for trigger in made["triggers"]} == {"AverageValue"}


def test_a_pool_is_scaled_by_its_own_pods() -> None:
    values = example("production")
    values["pools"].append({**values["pools"][0], "name": "h100-mig"})
    scaled = {
        item["metadata"]["name"]: [
            re.search(r'pod=~"(.+?)"', trigger["metadata"]["query"])
            for trigger in item["spec"]["triggers"]
        ]
        for item in objects(values, "ScaledObject")
    }
    for name, patterns in scaled.items():
        for pattern in patterns:
            assert pattern is not None
            own = [pool for pool in scaled if re.fullmatch(pattern[1], f"{pool}-6d4cf56db6-x2x9k")]
            assert own == [name]


def test_servers_may_reach_nothing_builds_only_downloads() -> None:
    policies = {
        item["metadata"]["name"].split("-")[-1]: item["spec"]
        for item in objects({}, "NetworkPolicy")
    }
    assert policies["server"]["egress"] == []
    assert policies["build"]["ingress"] == []
    ports = {port["port"] for rule in policies["build"]["egress"] for port in rule["ports"]}
    assert ports == {53, 443}
    assert len(objects(example("production"), "NetworkPolicy")) == 1


def test_named_ports_exist() -> None:
    for values in ({}, {"server": {"openai": {"enabled": False}}}):
        ports = {port["name"] for port in server(values)["ports"]}
        for service in objects(values, "Service"):
            assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports
        for policy in objects(values, "NetworkPolicy"):
            named = [port["port"] for rule in policy["spec"]["ingress"] for port in rule["ports"]]
            assert set(named) <= ports
    assert "openai" not in {
        port["name"] for port in server({"server": {"openai": {"enabled": False}}})["ports"]
    }


def test_api_keys_are_a_file_from_a_secret() -> None:
    values = example("production")
    (flag,) = [arg for arg in server(values)["args"] if arg.startswith("--api-key-file=")]
    (volume,) = [volume for volume in pod(values)["volumes"] if volume["name"] == "api-keys"]
    (mount,) = [found for found in server(values)["volumeMounts"] if found["name"] == "api-keys"]
    (item,) = volume["secret"]["items"]
    assert (volume["secret"]["secretName"], item["key"]) == ("api-keys", "keys")
    assert flag == f"--api-key-file={mount['mountPath']}/{item['path']}"
    assert not [arg for arg in server({})["args"] if "api-key" in arg]


def test_clients_know_the_model_by_a_name_that_stays() -> None:
    assert "--model-name=demo-dflash-triton" in server({})["args"]
    assert "--model-name=qwen3-8b" in server(example("production"))["args"]


def test_notes_name_the_build_and_the_addresses() -> None:
    notes = texts({})["NOTES.txt"]
    assert "app.kubernetes.io/component=build,dflash-trt/pool=cpu" in notes
    assert "svc/demo-dflash-triton 8000 9000" in notes
    assert "Scaling is off" in notes
    assert "waits" not in texts(example("production"))["NOTES.txt"]


def test_values_of_a_pool_are_not_shared_with_the_next() -> None:
    values = {
        "pools": [pool(gpus=gpus, name=name)["pools"][0] for name, gpus in (("a", 1), ("b", 0))]
    }
    before = copy.deepcopy(values)
    limits = [
        item["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"]
        for item in objects(values, "Deployment")
    ]
    assert [set(limit) for limit in limits] == [{"memory", "nvidia.com/gpu"}, {"memory"}]
    assert values == before
