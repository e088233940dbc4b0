"""A step that hangs in a running server: clients hear of it, and the server ends."""

from __future__ import annotations

import signal
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from running import Server, eventually
from tensors import over_grpc

# Steps hang while the file is there. Python reads it at the start of `serve`, which writes it into
# the model that Triton loads: Triton's own Python processes read no such file.
SITE = """
import pathlib, time
HANG = '''
import pathlib, time
from dflash_trt.runtime.ort import OrtSession
step = OrtSession.step
def hang(self, *arguments, **options):
    while pathlib.Path({file!r}).exists():
        time.sleep(0.05)
    return step(self, *arguments, **options)
OrtSession.step = hang
'''
try:
    from dflash_trt.serve import repository
except ImportError:  # some other Python that is started on the way
    pass
else:
    exec(HANG)
    model = repository.model_py()
    repository.model_py = lambda: model + HANG
"""


@pytest.fixture
def stop_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file; while it is there, steps hang."""
    file = tmp_path / "hang"
    (tmp_path / "sitecustomize.py").write_text(SITE.format(file=str(file)))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return file


@contextmanager
def started(engine: Path, *flags: str, triton: bool = True) -> Iterator[Server]:
    """A server that is ready and ends by itself; killed if it does not."""
    server = Server(engine, *flags, triton=triton)
    try:
        yield server.wait_ready()
    finally:
        if server.process.poll() is None:
            server.process.kill()
            server.wait_end()


def test_behind_triton(engine_path: Path, stop_steps: Path) -> None:
    with started(engine_path, "--step-seconds", "1") as server:
        check_triton(server, stop_steps)


def check_triton(server: Server, stop_steps: Path) -> None:
    assert over_grpc(server, text_input="x", max_tokens=2).error == ""
    stop_steps.touch()
    answer = over_grpc(server, text_input="x", max_tokens=2)
    assert "a step has not ended for 1 s" in answer.error
    assert server.wait_end(20) == 1
    assert "a step has not ended for 1 s: the engine is given up" in server.log
    assert "the engine's process is gone: tritonserver is stopped" in server.log


@pytest.mark.parametrize("is_draining", [False, True])
def test_alone(engine_path: Path, stop_steps: Path, is_draining: bool) -> None:
    with started(engine_path, "--step-seconds", "2", triton=False) as server:
        check_alone(server, stop_steps, is_draining)


def check_alone(server: Server, stop_steps: Path, is_draining: bool) -> None:
    stop_steps.touch()
    answers: list[tuple[int, str]] = []

    def ask() -> None:
        body = b'{"prompt": "x", "max_tokens": 2}'
        try:
            with urllib.request.urlopen(server.openai_url("/v1/completions"), body, timeout=30):
                pytest.fail("it was answered")
        except urllib.error.HTTPError as error:
            with error:
                answers.append((error.code, error.read().decode()))

    asking = threading.Thread(target=ask)
    asking.start()
    assert eventually(lambda: server.metrics()["dflash_requests_queued_total"] == 1)
    started = time.monotonic()
    if is_draining:
        server.process.send_signal(signal.SIGTERM)
    asking.join()
    ((code, text),) = answers
    assert code == 500
    assert "a step has not ended for 2 s" in text
    assert server.wait_end(20) == 1
    assert time.monotonic() - started < 15
    assert "a step hangs: the process ends without it" in server.log
