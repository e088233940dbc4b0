"""Runs a tritonserver as a child: until it ends, the engine dies, or a signal says so."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import resource
import select
import signal
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

from dflash_trt.serve import wire
from dflash_trt.serve.sharing import DEAD, DRAIN, DRAINED
from dflash_trt.serve.tritonserver import STUB
from dflash_trt.serve.wire import packed

_LOG = logging.getLogger(__name__)
POLL_S = 0.1
PROBE_S = 2.0
LAST_BYTES_S = 0.2  # for Triton to hand over what it has, once nothing runs
EXIT_MARGIN_S = 15  # beyond the drain, for models to unload
SHM = Path("/dev/shm")
SHM_PREFIX = "triton_python_backend_shm_region_"
STACK_BYTES = 256 << 20  # address space, not memory
_PR_SET_PDEATHSIG = 1


def remove_stale_regions(folder: Path = SHM) -> list[str]:
    """Remove shared memory that a killed tritonserver of this user left behind; their names."""
    found = [
        file
        for file in folder.glob(f"{SHM_PREFIX}*")
        if file.is_file() and file.stat().st_uid == os.getuid()
    ]
    if not found:
        return []
    in_use = _mapped_names()
    stale = [file for file in found if file.name not in in_use]
    for file in stale:
        file.unlink(missing_ok=True)
    return [file.name for file in stale]


def _mapped_names() -> set[str]:
    names: set[str] = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # of another user, or it ended
            for line in maps.read_text().splitlines():
                if SHM_PREFIX in line:
                    names.add(Path(line.split(maxsplit=5)[5].removesuffix(" (deleted)")).name)
    return names


class Supervisor:
    """One tritonserver, from its start to its end."""

    def __init__(
        self,
        command: list[str],
        environ: dict[str, str],
        health_url: str,
        engine_socket: Path,
        drain_seconds: float,
    ) -> None:
        self._command = command
        self._environ = environ
        self._health_url = health_url
        self._engine_socket = engine_socket
        self._drain_seconds = drain_seconds
        self._stop_at: float | None = None  # set by the first signal
        self._hurry = False  # set by the second
        self._process: subprocess.Popen[bytes] | None = None
        self._line: socket.socket | None = None
        self._lost = threading.Event()  # the engine's process is gone, or its engine dead
        self._is_dead = False  # the engine said so
        self._is_ready = False
        self._models = select.poll()  # of the Python processes: each ends with its model

    def run(self, on_ready: Callable[[], None]) -> int:
        """Start, wait, and return the exit code: 0 only after a signal and an orderly end."""
        with _signals(self._on_signal):
            process = subprocess.Popen(
                self._command, env=self._environ, start_new_session=True, preexec_fn=_prepare_child
            )
            self._process = process
            if self._stop_at is not None:  # the signal came while it started
                self._end_triton()
            try:
                code = self._watch(process, on_ready)
            finally:
                _kill_group(process)
                process.wait()
        if code is None or self._is_dead:
            return 1
        if self._stop_at is None:
            _LOG.error("tritonserver ended by itself, exit code %d", code)
            return 1
        if not self._is_ready:
            _LOG.info("a signal while the engine was loaded: nothing was served")
            return 0
        return 0 if code == 0 else 1

    def _watch(self, process: subprocess.Popen[bytes], on_ready: Callable[[], None]) -> int | None:
        """The exit code of a tritonserver that ended; None for one that must be killed."""
        next_probe = 0.0
        while (code := process.poll()) is None:
            if self._lost.is_set() and self._stop_at is None:
                _LOG.error("the engine's process is gone: tritonserver is stopped")
                return None
            if self._models.poll(0) and self._stop_at is None:
                is_engine = self._lost.wait(POLL_S)  # its socket says so too
                whose = "the engine's process" if is_engine else "the process of a model"
                _LOG.error("%s is gone: tritonserver is stopped", whose)
                return None
            if self._hurry:
                _LOG.warning("a second signal: tritonserver is killed, with what still runs")
                return None
            if self._stop_at is not None and time.monotonic() > self._stop_at:
                _LOG.error(
                    "tritonserver did not end within %g s of the signal and is killed",
                    self._drain_seconds + EXIT_MARGIN_S,
                )
                return None
            if not self._is_ready and time.monotonic() > next_probe:
                next_probe = time.monotonic() + POLL_S
                if _is_ok(self._health_url):
                    self._is_ready = True
                    self._connect()
                    for pid in _stubs_of(process.pid):
                        with contextlib.suppress(OSError):  # gone, or a kernel without them
                            self._models.register(os.pidfd_open(pid), select.POLLIN)
                    on_ready()
            time.sleep(POLL_S)
        return code

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """The first: drain, then end. The second: end at once.

        The engine drains before Triton hears of it: Triton closes its HTTP port at once, and 2.51
        crashes when a stream of it is cancelled after that.
        """
        if self._stop_at is not None:
            self._hurry = True
            return None
        self._stop_at = time.monotonic() + self._drain_seconds + EXIT_MARGIN_S
        line = self._line
        try:
            if line is not None:
                return line.sendall(packed(DRAIN))
        except OSError:
            pass
        return self._end_triton()  # not ready yet, or no more

    def _end_triton(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)

    def _connect(self) -> None:
        """Hear of the end of the engine's process: a dead one stays "ready" in Triton's eyes."""
        line = socket.socket(socket.AF_UNIX)
        line.connect(str(self._engine_socket))
        self._line = line
        threading.Thread(target=self._listen, args=(line,), daemon=True).start()

    def _listen(self, line: socket.socket) -> None:
        try:
            with line, line.makefile("rb") as stream:
                while message := wire.read(stream):
                    kind, *content = message
                    if kind == DRAINED:
                        time.sleep(LAST_BYTES_S)
                        self._end_triton()
                    elif kind == DEAD:
                        _LOG.error("%s", content[0])
                        self._is_dead = True
                        break
        except OSError:
            pass  # an end like any other
        except Exception:  # nobody is left to hear of the engine's end, so this is one
            _LOG.exception("what the engine's process says cannot be read")
        finally:
            self._lost.set()
            self._end_triton()


@contextlib.contextmanager
def _signals(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.signal(number, handler) for number in numbers]
    try:
        yield
    finally:
        for number, old in zip(numbers, before, strict=True):
            signal.signal(number, old)


def _prepare_child() -> None:
    """In the child: be killed when the supervisor is, so that no port stays taken.

    Triton before 25.07 copies an HTTP body to the stack of a thread, which is as large as this
    limit says: with the usual 8 MB a body of 10 MB kills the server.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    hard = resource.getrlimit(resource.RLIMIT_STACK)[1]
    size = STACK_BYTES if hard == resource.RLIM_INFINITY else min(STACK_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_STACK, (size, hard))


def _stubs_of(tritonserver: int) -> list[int]:
    """Pids of its Python processes. It stays "ready" when one dies, and answers with errors."""
    pids = []
    for listed in Path(f"/proc/{tritonserver}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            pids += listed.read_text().split()
    return [int(pid) for pid in pids if STUB.encode() in _command_line(pid)]


def _command_line(pid: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill what is left of the child's session: a stub may outlive its tritonserver."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _is_ok(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=PROBE_S) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False
