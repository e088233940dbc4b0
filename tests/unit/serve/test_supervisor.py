"""The supervisor with a stand-in for tritonserver: what one signal means, and what two."""

from __future__ import annotations

import os
import signal
import socket
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


READY = """
import http.server, os, signal, socket, sys
from dflash_trt.serve.sharing import DEAD
from dflash_trt.serve.wire import packed
line = socket.socket(socket.AF_UNIX)
line.bind(sys.argv[1])
line.listen()
class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *_): pass
server = http.server.HTTPServer(("127.0.0.1", int(sys.argv[2])), Health)
server.timeout = 0.1
def engine():
    other, _ = line.accept()
    other.recv(1)  # told to drain
    other.sendall(packed(DEAD, "a step hangs"))
import threading; threading.Thread(target=engine, daemon=True).start()
signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
while True: server.handle_request()
"""


def test_an_engine_that_dies_while_it_drains_is_no_orderly_end(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = tmp_path / "engine.socket"
    command = [sys.executable, "-c", READY, str(place), str(port)]
    made = Supervisor(command, dict(os.environ), f"http://127.0.0.1:{port}/", place, 60)
    assert made.run(lambda: os.kill(os.getpid(), signal.SIGTERM)) == 1


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
