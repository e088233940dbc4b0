"""A server's life: start, drain, being killed, starting again."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from running import WITH_TRITON, Server, eventually, serving
from tensors import grpc_infer, grpc_input, over_grpc, over_http

LONG_FIELDS: dict[str, Any] = {
    "text_input": "a long story", "max_tokens": 800, "end_id": -1, "stream": True,
    "return_token_ids": True,
}  # fmt: skip


def processes_of(server: Server) -> list[int]:
    """Pids of the server's children and theirs."""
    found, new = [], [server.process.pid]
    while new:
        new = [child for pid in new for child in children_of(pid)]
        found += new
    return found


def children_of(pid: int) -> list[int]:
    """None of a process, or a thread, that ends while it is looked at."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                found += map(int, (task / "children").read_text().split())
    return found


def is_gone(pid: int) -> bool:
    try:
        return "Z" in Path(f"/proc/{pid}/stat").read_text().split(") ")[1][:1]
    except OSError:
        return True


def test_drain_lets_running_requests_end(engine_path: Path) -> None:
    with serving(engine_path) as server:
        results: dict[str, Any] = {}
        work = {
            "grpc": lambda: over_grpc(server, **LONG_FIELDS),
            "alias": lambda: over_grpc(server, "tensorrt_llm_bls", **LONG_FIELDS),
            "http": lambda: over_http(server, **LONG_FIELDS),
            "openai": lambda: _openai_text(server),
        }

        def run(name: str) -> None:
            results[name] = work[name]()

        threads = [threading.Thread(target=run, args=(name,)) for name in work]
        for thread in threads:
            thread.start()
        assert eventually(lambda: server.metrics()["dflash_slots_in_use"] == 4)
        server.process.send_signal(signal.SIGTERM)
        assert eventually(lambda: _status(server.openai_url("/health/ready")) == 503, 5)
        assert _status(server.openai_url("/v1/completions"), b'{"prompt": "x"}') == 503
        late = grpc_infer(server, [grpc_input("text_input", "x")], with_status=True)
        assert late.error.startswith("StatusCode.UNAVAILABLE the engine drains")
        for thread in threads:
            thread.join()
        assert len(results["openai"]) == 800
        for name in ("grpc", "alias", "http"):
            assert results[name].error == ""
            assert len(results[name].ids) == 800
        assert server.wait_end() == 0


def _openai_text(server: Server) -> str:
    body = b'{"prompt": "a long story", "max_tokens": 800, "ignore_eos": true}'
    request = urllib.request.Request(server.openai_url("/v1/completions"), body)
    with urllib.request.urlopen(request, timeout=120) as answer:
        text: str = json.load(answer)["choices"][0]["text"]
        return text


def _status(url: str, body: bytes | None = None) -> int:
    try:
        with urllib.request.urlopen(url, body, timeout=5) as answer:
            status: int = answer.status
            return status
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def test_drain_has_an_end(engine_path: Path) -> None:
    server = Server(engine_path, "--drain-seconds", "1").wait_ready()
    answers: list[Any] = []
    fields = {**LONG_FIELDS, "max_tokens": 4000}
    thread = threading.Thread(target=lambda: answers.append(over_grpc(server, **fields)))
    thread.start()
    assert eventually(lambda: server.metrics()["dflash_slots_in_use"] == 1)
    started = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    thread.join()
    assert server.wait_end() == 0
    assert time.monotonic() - started < 12
    assert "shut down" in answers[0].error


def test_killed_server_starts_again(engine_path: Path) -> None:
    """`kill -9` under load: clients hear of it, nothing lives on, the next start is clean."""
    before = set(_regions())
    server = Server(engine_path).wait_ready()
    answers: list[Any] = []

    def ask() -> None:
        try:
            answers.append(over_http(server, **LONG_FIELDS).error or "short")
        except (OSError, http.client.HTTPException) as error:
            answers.append(repr(error))

    threads = [threading.Thread(target=ask) for _ in range(6)]
    for thread in threads:
        thread.start()
    assert eventually(lambda: server.metrics()["dflash_slots_in_use"] > 0)
    children = processes_of(server)
    assert len(children) >= 3
    server.process.kill()
    for thread in threads:
        thread.join(30)
    assert len(answers) == 6
    assert eventually(lambda: all(is_gone(pid) for pid in children))
    server.wait_end()
    left = set(_regions()) - before
    assert left
    with serving(engine_path) as again:
        assert over_http(again, text_input="x", max_tokens=2).error == ""
        assert not left & set(_regions())
    assert not set(_regions()) & left


def _regions() -> list[str]:
    return [file.name for file in Path("/dev/shm").glob("triton_python_backend_shm_region_*")]


def test_dead_engine_process_ends_the_server(engine_path: Path) -> None:
    """Triton stays "ready" when the Python process dies; the server must not."""
    server = Server(engine_path).wait_ready()
    os.kill(server.engine_pid(), signal.SIGKILL)
    assert server.wait_end(20) == 1
    assert "the engine's process is gone" in server.log


def test_a_dead_process_of_a_model_ends_the_server(engine_path: Path) -> None:
    """Its alias answered every request with an error, and the server was ready all the while."""
    server = Server(engine_path).wait_ready()
    others = [
        pid
        for pid in processes_of(server)
        if b"stub" in Path(f"/proc/{pid}/cmdline").read_bytes() and pid != server.engine_pid()
    ]
    assert len(others) == 1
    os.kill(others[0], signal.SIGKILL)
    assert server.wait_end(20) == 1
    assert "the process of a model is gone" in server.log


def test_a_signal_while_it_loads_ends_it_in_order(engine_path: Path) -> None:
    server = Server(engine_path)
    assert eventually(lambda: any("pinned_memory" in line for line in server.lines), 60)
    children = processes_of(server)
    server.process.send_signal(signal.SIGTERM)
    assert server.wait_end(30) == 0
    assert "ready" not in server.lines
    assert "Traceback" not in server.log
    assert eventually(lambda: all(is_gone(pid) for pid in children))


def run_serve(*arguments: str) -> tuple[int, str]:
    done = subprocess.run(
        [str(WITH_TRITON), "serve", *arguments], capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip
    return done.returncode, done.stderr


def test_taken_port(engine_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        code, text = run_serve(str(engine_path), "--address", "127.0.0.1", "--grpc-port", str(port))
    assert code == 2
    assert f"error: --grpc-port {port}: the port cannot be had at 127.0.0.1" in text
    assert "Traceback" not in text


@pytest.mark.parametrize("arguments", [(), ("--no-triton",)])
def test_no_engine(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    code, text = run_serve(str(tmp_path), *arguments)
    assert code == 2
    assert "has no config.json" in text


def test_broken_engine_does_not_become_ready(engine_path: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(engine_path, broken)
    weights = broken / "weights.bin"
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 1
    weights.write_bytes(content)
    server = Server(broken)
    assert server.wait_end() == 1
    assert "ready" not in server.lines
    assert "its SHA-256 differs" in server.log
