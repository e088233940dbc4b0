"""The scripts in the chart's pods, run by a real shell: the lock, the wait."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from charts import pool, the

BUILD = pool(gpus=0, engine={"build": {"target": "qwen3-4b", "args": ["--precision", "int4"]}})
Start = Callable[[list[str]], "subprocess.Popen[str]"]
PROGRAM = """#!/bin/sh
echo "$@" >> "{log}"
sleep 0.5
[ -e "{fail}" ] && exit 3
mkdir "$ENGINE" && touch "$ENGINE/config.json"
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with a program dflash-trt that logs its arguments and makes an engine."""
    if shutil.which("flock") is None:
        pytest.skip("flock is not installed")
    program = tmp_path / "dflash-trt"
    program.write_text(PROGRAM.format(log=tmp_path / "log", fail=tmp_path / "fail"))
    program.chmod(0o755)
    return tmp_path


@pytest.fixture
def start(place: Path) -> Iterator[Start]:
    """Starts a command in a process group of its own that does not outlive the test."""
    env = {"PATH": f"{place}:{os.environ['PATH']}", "ENGINE": str(place / "engine"), "BUILD": "x=y"}
    started: list[subprocess.Popen[str]] = []

    def start(argv: list[str]) -> subprocess.Popen[str]:
        started.append(
            subprocess.Popen(
                argv, env=env, stdout=subprocess.PIPE, text=True, start_new_session=True
            )
        )
        return started[-1]

    yield start
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def build() -> list[str]:
    (container,) = the(BUILD, "Job")["spec"]["template"]["spec"]["containers"]
    return [*container["command"], *container["args"]]


def wait_for_engine() -> list[str]:
    (container,) = the(BUILD, "Deployment")["spec"]["template"]["spec"]["initContainers"]
    return [*container["command"], container["args"][0].replace("sleep 10", "sleep 0.1")]


def test_two_pods_build_once(place: Path, start: Start) -> None:
    pods = [start(build()), start(build())]
    assert [pod.wait(20) for pod in pods] == [0, 0]
    flags = "--target=qwen3-4b --precision int4"
    assert (place / "log").read_text() == f"build --output {place}/engine {flags}\n"


def test_a_failed_build_fails_and_the_next_try_builds(place: Path, start: Start) -> None:
    (place / "fail").touch()
    assert start(build()).wait(20) == 3
    (place / "fail").unlink()
    assert start(build()).wait(20) == 0


def test_a_killed_build_leaves_no_lock(place: Path, start: Start) -> None:
    first = start(build())
    while not (place / "log").exists():
        time.sleep(0.02)
    os.killpg(first.pid, signal.SIGKILL)
    first.wait(20)
    assert start(build()).wait(20) == 0
    assert len((place / "log").read_text().splitlines()) == 2


def test_a_server_waits_until_the_engine_is_whole(place: Path, start: Start) -> None:
    waiting = start(wait_for_engine())
    (place / "engine").mkdir()  # written in part
    time.sleep(0.4)
    assert waiting.poll() is None
    (place / "engine" / "config.json").touch()
    assert waiting.wait(20) == 0
    assert waiting.stdout is not None
    assert "kubectl logs -l x=y" in waiting.stdout.read()


def test_a_waiting_pod_ends_when_told(start: Start) -> None:
    waiting = start(wait_for_engine())
    assert waiting.stdout is not None
    waiting.stdout.readline()
    waiting.send_signal(signal.SIGTERM)
    assert waiting.wait(5) == 143
