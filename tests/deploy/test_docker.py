"""The container files: linted by hadolint, and in step with the package and the chart."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import yaml
from charts import CHART, ROOT, server

import dflash_trt

DOCKERFILE = ROOT / "deploy" / "docker" / "Dockerfile"
TEXT = DOCKERFILE.read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_lint() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([hadolint, DOCKERFILE], capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("", 0)


def test_base_image_is_pinned_once() -> None:
    assert re.search(r"^ARG TRITON_VERSION=\d\d\.\d\d-py3$", TEXT, re.MULTILINE)
    bases = set(re.findall(r"^FROM (\S+)", TEXT, re.MULTILINE))
    assert bases == {"${TRITON_IMAGE}:${TRITON_VERSION}", "common"}


def test_images_report_to_nobody() -> None:
    common = TEXT.split(" AS common\n")[1].split("\nFROM ")[0]
    assert "ORT_DISABLE_TELEMETRY=1" in common


def test_versions_agree() -> None:
    assert f"ARG VERSION={dflash_trt.__version__}\n" in TEXT
    assert set(re.findall(r":(\d[\w.]*) \.$", TEXT, re.MULTILINE)) == {dflash_trt.__version__}
    pin = next(p for p in PROJECT["project"]["optional-dependencies"]["demo"] if "smollm2" in p)
    assert pin in TEXT


def test_every_final_stage_drops_root_and_matches_the_chart() -> None:
    stages = dict(
        re.findall(r"^FROM \S+ AS (\w+)\n(.*?)(?=^FROM|\Z)", TEXT, re.DOTALL | re.MULTILINE)
    )
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    for image in ("server", "build"):
        key = "image" if image == "server" else "buildImage"
        assert values[key]["repository"] == f"dflash-trt/{image}"
        user = re.search(r"^USER (\d+):(\d+)$", stages[image], re.MULTILINE)
        assert user is not None
        security = values["podSecurityContext"]
        assert [int(id) for id in user.groups()] == [security["runAsUser"], security["runAsGroup"]]
    exposed = re.search(r"^EXPOSE (.*)$", stages["server"], re.MULTILINE)
    assert exposed is not None
    assert exposed[1].split() == [str(port["containerPort"]) for port in server({})["ports"]]
    assert server({})["readinessProbe"]["httpGet"]["path"] in stages["server"]


def test_what_is_copied_is_not_ignored() -> None:
    ignore = DOCKERFILE.with_name("Dockerfile.dockerignore").read_text().splitlines()
    assert "*" in ignore
    copied = {
        word
        for line in re.findall(r"^COPY (.*)$", TEXT, re.MULTILINE)
        for word in line.split()[:-1]
    }
    assert copied == {line[1:] for line in ignore if line.startswith("!")}
    demo = next(arg for arg in yaml.safe_load((CHART / "values.yaml").read_text())["pools"])[
        "engine"
    ]["build"]["drafter"]
    assert f"COPY demo-drafter {demo}" in TEXT
