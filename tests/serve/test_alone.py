"""`serve --no-triton` and its signals: while it loads, while requests run, and a second one."""

from __future__ import annotations

import signal
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from running import Server, eventually

LONG = b'{"prompt": "x", "max_tokens": 4000, "ignore_eos": true}'


def test_a_second_signal_cuts_off_what_runs(engine_path: Path) -> None:
    server = Server(engine_path, "--drain-seconds", "300", triton=False).wait_ready()
    answers: list[Any] = []

    def ask() -> None:
        request = urllib.request.Request(server.openai_url("/v1/completions"), LONG)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                answers.append(answer.status)
        except urllib.error.HTTPError as error:
            with error:
                answers.append((error.code, error.read().decode()))

    thread = threading.Thread(target=ask)
    thread.start()
    assert eventually(lambda: server.metrics()["dflash_slots_in_use"] == 1)
    server.process.send_signal(signal.SIGTERM)
    assert eventually(lambda: "draining 1 requests" in server.log)
    started = time.monotonic()
    server.process.send_signal(signal.SIGINT)
    assert server.wait_end() == 1
    assert time.monotonic() - started < 12
    thread.join()
    assert "a second signal: 1 requests are cut off" in server.log
    assert "Traceback" not in server.log
    ((code, text),) = answers
    assert (code, "shut down" in text) == (503, True)


def test_a_signal_while_it_loads_ends_it(engine_path: Path) -> None:
    server = Server(engine_path, triton=False)
    children = Path(f"/proc/{server.process.pid}/task")

    def loads() -> bool:  # it has its handler once the port is bound and threads are started
        return len(list(children.iterdir())) > 1

    assert eventually(loads)
    server.process.send_signal(signal.SIGTERM)
    assert server.wait_end() in (0, -signal.SIGTERM)
    assert "Traceback" not in server.log
