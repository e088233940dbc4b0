"""A server with the flags of the Helm chart answers the chart's probes and its `helm test`."""

from __future__ import annotations

import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from running import Server, serving

GOLDEN = Path(__file__).parents[1] / "deploy" / "golden" / "default.yaml"
KINDS: dict[str, Any] = {item["kind"]: item for item in yaml.safe_load_all(GOLDEN.read_text())}
(CONTAINER,) = KINDS["Deployment"]["spec"]["template"]["spec"]["containers"]
MOVED = ("--address", "--http-port", "--grpc-port", "--metrics-port", "--openai-port")


@pytest.fixture(scope="module")
def server(engine_path: Path) -> Iterator[Server]:
    """The container's command, on other ports."""
    flags = [flag for flag in CONTAINER["args"][2:] if not flag.startswith(MOVED)]
    with serving(engine_path, *flags) as made:
        yield made


@pytest.mark.parametrize("kind", ["startupProbe", "readinessProbe", "livenessProbe"])
def test_probes(server: Server, kind: str) -> None:
    probe = CONTAINER[kind]["httpGet"]
    assert probe["port"] == "http"
    url = f"http://127.0.0.1:{server.http}{probe['path']}"
    with urllib.request.urlopen(url, timeout=CONTAINER[kind]["timeoutSeconds"]) as answer:
        assert answer.status == 200


def test_helm_test(server: Server) -> None:
    (container,) = KINDS["Pod"]["spec"]["containers"]
    (url,) = container["args"]
    here = url.replace("demo-dflash-triton:8000", f"127.0.0.1:{server.http}")
    done = subprocess.run([*container["command"], here], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
