"""`serve` as a function: with tritonserver around the engine, or with OpenAI's API alone."""

from __future__ import annotations

import dataclasses
import logging
import os
import secrets
import signal
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from dflash_trt import swap
from dflash_trt.decode.loop import LoopState
from dflash_trt.engine_dir import open_engine
from dflash_trt.errors import ConfigError
from dflash_trt.serve.addresses import at_triton_http, in_url, to_reach
from dflash_trt.serve.openai_server import FLAG as OPENAI_FLAG
from dflash_trt.serve.openai_server import read_keys
from dflash_trt.serve.options import ServeOptions
from dflash_trt.serve.ports import check_ports, in_figures
from dflash_trt.serve.repository import write_repository
from dflash_trt.serve.server import EngineServer
from dflash_trt.serve.supervisor import EXIT_MARGIN_S, Supervisor, remove_stale_regions
from dflash_trt.serve.tritonserver import (
    TritonServer,
    find_tritonserver,
    write_backends,
    write_environment,
)

_LOG = logging.getLogger(__name__)

# What Triton offers beside inference to whoever reaches its ports: other processes' memory, loading
# and unloading models, writing files. Nothing of it is used here.
CLOSED_APIS = ("shared-memory", "model-repository", "logging", "trace")


@dataclass(frozen=True)
class Ports:
    """Triton's ports."""

    http: int = 8000
    grpc: int = 8001
    metrics: int = 8002

    def by_flag(self, openai: int) -> dict[str, int]:
        """The ports by the flags that choose them; `openai` 0 is none."""
        own = {f"--{name}-port": port for name, port in dataclasses.asdict(self).items()}
        return own | ({OPENAI_FLAG: openai} if openai else {})


Endpoints = list[tuple[str, str]]  # what is there, and its address


def serve_alone(options: ServeOptions, on_ready: Callable[[Endpoints], None]) -> int:
    """Serve OpenAI's API from this process until SIGTERM or SIGINT; the exit code.

    A signal while the engine loads ends the process, a second one what still runs. Raises what
    `EngineServer` raises.
    """
    if not options.openai_port:
        raise ConfigError("without Triton and without OpenAI's API there is nothing to serve")
    stop, hurry = threading.Event(), threading.Event()
    server: EngineServer | None = None

    def on_signal(*_: object) -> None:
        if server is None:
            _LOG.info("a signal while the engine was loaded: nothing was served")
            raise SystemExit(0)
        if stop.is_set() and not hurry.is_set():
            hurry.set()
            server.cut_off()
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    server = EngineServer(options)
    on_ready(_openai_endpoints(options))
    while server.host.loop.is_healthy and not stop.wait(0.2):
        pass
    has_ended = server.close()
    is_dead = server.host.loop.state is LoopState.DEAD
    code = 1 if is_dead or hurry.is_set() else 0
    if not has_ended:
        _LOG.warning("a step %s: the process ends without it", "hangs" if is_dead else "runs on")
        logging.shutdown()
        os._exit(code)  # Python's own end, or the GPU's libraries in it, might wait for that thread
    return code


def serve_with_triton(
    options: ServeOptions,
    ports: Ports,
    on_ready: Callable[[Endpoints], None],
    *,
    repository: Path | None = None,
    verbose: bool = False,
) -> int:
    """Serve with a tritonserver until SIGTERM or SIGINT; the exit code.

    Raises `ConfigError` for what can be seen before Triton starts: no tritonserver, a port that is
    taken, a `repository` that is not ours to replace; `EngineDirError` for the engine.
    """
    open_engine(Path(options.engine), check_hashes=False)
    read_keys(options.api_key_file)
    check_ports(options.address, ports.by_flag(options.openai_port))
    address = in_figures(options.address)
    server = find_tritonserver()
    for name in remove_stale_regions():
        _LOG.info("removed %s, which a killed tritonserver left", name)
    with tempfile.TemporaryDirectory(prefix="dflash-trt-") as scratch:
        folder = Path(scratch)
        # Triton starts the model elsewhere, so paths must not depend on the working directory.
        local = replace(
            options,
            engine=str(Path(options.engine).resolve()),
            address=address,
            api_key_file=str(Path(options.api_key_file).resolve()) if options.api_key_file else "",
            socket=str(folder / "engine.socket"),
        )
        environment = write_environment(server, folder / "python") if server.stub else None
        place = repository or folder / "repository"
        write_repository(place, local, environment, force=True)  # of an earlier start
        supervisor = Supervisor(
            _command(server, local, ports, place, folder, verbose),
            server.environ(),
            f"http://{to_reach(local.address)}:{ports.http}/v2/health/ready",
            Path(local.socket),
            local.drain_seconds,
        )
        with swap.held(place):
            return supervisor.run(lambda: on_ready(_endpoints(local, ports)))


def _command(
    server: TritonServer,
    options: ServeOptions,
    ports: Ports,
    repository: Path,
    folder: Path,
    verbose: bool,
) -> list[str]:
    flags = {
        "model-repository": repository,
        "http-port": ports.http,
        "grpc-port": ports.grpc,
        "metrics-port": ports.metrics,
        "http-address": at_triton_http(options.address),
        "grpc-address": in_url(options.address),
        "metrics-address": at_triton_http(options.address),
        "http-restricted-api": _lock(),
        "grpc-restricted-protocol": _lock(),
        "exit-timeout-secs": int(options.drain_seconds) + EXIT_MARGIN_S - 5,
        "log-info": str(verbose).lower(),
    }
    if server.backends is not None and server.stub is not None:
        flags["backend-directory"] = write_backends(server, folder / "backends")
    return [str(server.binary), *(f"--{name}={value}" for name, value in flags.items())]


def _lock() -> str:
    """Closed to who does not send a header; its value is a secret that is told to nobody."""
    return f"{','.join(CLOSED_APIS)}:dflash-trt-key={secrets.token_hex(32)}"


def _endpoints(options: ServeOptions, ports: Ports) -> Endpoints:
    host = to_reach(options.address)
    return [
        ("Triton HTTP", f"http://{host}:{ports.http}/v2/models/ensemble/generate_stream"),
        ("Triton gRPC", f"{host}:{ports.grpc}"),
        ("metrics", f"http://{host}:{ports.metrics}/metrics"),
        *(_openai_endpoints(options) if options.openai_port else []),
    ]


def _openai_endpoints(options: ServeOptions) -> Endpoints:
    base = f"http://{to_reach(options.address)}:{options.openai_port}"
    return [("OpenAI", f"{base}/v1"), ("metrics", f"{base}/metrics")]
