"""A server as a process: `dflash-trt serve` on loopback, on ports that were free a moment ago."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

# `make test` makes this environment: the tritonserver of its wheel needs NumPy 1.
WITH_TRITON = Path(sys.prefix) / "triton" / "bin" / "dflash-trt"
ALONE = Path(sys.prefix) / "bin" / "dflash-trt"
START_S = 120.0
END_S = 60.0


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for made in sockets:
        made.bind(("127.0.0.1", 0))
    ports = [made.getsockname()[1] for made in sockets]
    for made in sockets:
        made.close()
    return ports


def eventually(check: Callable[[], bool], seconds: float = 20.0) -> bool:
    """Whether it becomes true in time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if check():
            return True
        time.sleep(0.05)
    return check()


class Server:
    """A running `dflash-trt serve`."""

    def __init__(self, engine: Path, *flags: str, triton: bool = True) -> None:
        assert WITH_TRITON.exists(), "run `make test`: it installs a tritonserver"
        self.http, self.grpc, self.metrics_port, self.openai = free_ports(4)
        command = [
            str(WITH_TRITON if triton else ALONE), "serve", str(engine), "--address", "127.0.0.1",
            "--openai-port", str(self.openai), "--threads", "1", *flags,
        ]  # fmt: skip
        if triton:
            ports = {"http": self.http, "grpc": self.grpc, "metrics": self.metrics_port}
            for name, port in ports.items():
                command += [f"--{name}-port", str(port)]
        else:
            command.append("--no-triton")
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.lines: list[str] = []
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())
            if line.strip() == "ready":
                self._ready.set()
        self._ready.set()

    @property
    def log(self) -> str:
        return "\n".join(self.lines)

    def wait_ready(self) -> Server:
        assert self._ready.wait(START_S), self.log
        assert "ready" in self.lines, self.log
        return self

    def wait_end(self, seconds: float = END_S) -> int:
        code = self.process.wait(seconds)
        self._reader.join(10)
        if self.process.stdout is not None:
            self.process.stdout.close()
        return code

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.wait_end()

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.http}{path}"

    def openai_url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.openai}{path}"

    def metrics(self) -> dict[str, float]:
        """What the engine's process says of itself, as of now."""
        with urllib.request.urlopen(self.openai_url("/metrics"), timeout=10) as answer:
            return read_metrics(answer.read().decode())

    def is_idle(self) -> bool:
        found = self.metrics()
        return found["dflash_slots_in_use"] == 0 and found["dflash_queue_depth"] == 0

    def engine_pid(self) -> int:
        """The process that has the engine: Triton's stub, or the server itself."""
        return _listener(self.openai)


def _listener(port: int) -> int:
    """The pid that listens at a TCP port of 127.0.0.1."""
    inode = None
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        cells = line.split()
        if cells[3] == "0A" and int(cells[1].split(":")[1], 16) == port:
            inode = cells[9]
    assert inode is not None
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            links = [os.readlink(link) for link in (folder / "fd").iterdir()]
        except OSError:
            continue
        if f"socket:[{inode}]" in links:
            return int(folder.name)
    raise AssertionError("nobody listens")


def read_metrics(text: str) -> dict[str, float]:
    """Samples by name and labels."""
    lines = (line for line in text.splitlines() if line and not line.startswith("#"))
    found = (re.fullmatch(r"(\S+(?:\{.*\})?) (\S+)", line) for line in lines)
    return {match[1]: float(match[2]) for match in found if match}


@contextmanager
def serving(engine: Path, *flags: str, triton: bool = True) -> Iterator[Server]:
    """A server that is ready; afterwards it must end well."""
    server = Server(engine, *flags, triton=triton)
    try:
        yield server.wait_ready()
        assert server.stop() == 0, server.log
        assert "Traceback" not in server.log, server.log
    finally:
        if server.process.poll() is None:
            server.process.kill()
            server.wait_end()
