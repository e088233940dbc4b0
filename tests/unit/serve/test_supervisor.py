"""The supervisor with a stand-in for tritonserver: what one signal means, and what two."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from dflash_trt.serve import supervisor
from dflash_trt.serve.supervisor import Supervisor

STUBBORN = (
    "import signal, sys, time\n"
    "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    "open(sys.argv[1], 'w').close()\n"
    "time.sleep(60)\n"
)


def run(tmp_path: Path, signals: int, drain_s: float) -> tuple[int, float]:
    """The exit code and how long it took, for a child that does not end by itself."""
    started = tmp_path / "started"
    started.unlink(missing_ok=True)
    command = [sys.executable, "-c", STUBBORN, str(started)]
    made = Supervisor(command, dict(os.environ), "http://127.0.0.1:1/", tmp_path / "s", drain_s)

    def send() -> None:
        while not started.exists():
            time.sleep(0.02)
        for _ in range(signals):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.3)

    thread = threading.Thread(target=send)
    thread.start()
    begun = time.monotonic()
    code = made.run(lambda: None)
    thread.join()
    return code, time.monotonic() - begun


def test_a_second_signal_is_told_from_a_time_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    code, seconds = run(tmp_path, 2, 60)
    assert (code, seconds < 20) == (1, True)
    assert "a second signal: tritonserver is killed" in caplog.text
    assert "in time" not in caplog.text
    assert "within" not in caplog.text
    caplog.clear()
    monkeypatch.setattr(supervisor, "EXIT_MARGIN_S", 0)
    assert run(tmp_path, 1, 1.0)[0] == 1
    assert "did not end within 1 s of the signal" in caplog.text
    assert "second" not in caplog.text


def test_a_signal_while_the_child_starts_reaches_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = supervisor.subprocess.Popen

    def interrupted(*arguments: Any, **options: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return real(*arguments, **options)

    monkeypatch.setattr(supervisor.subprocess, "Popen", interrupted)
    code = "import signal, time; signal.signal(signal.SIGTERM, lambda *_: exit(0)); time.sleep(60)"
    command = [sys.executable, "-c", code]
    made = Supervisor(command, dict(os.environ), "http://127.0.0.1:1/", tmp_path / "s", 60)
    begun = time.monotonic()
    assert made.run(lambda: None) == 0
    assert time.monotonic() - begun < 10
