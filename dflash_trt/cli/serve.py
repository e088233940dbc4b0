"""`dflash-trt serve` and `dflash-trt repo`: an engine behind Triton and OpenAI's API."""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
from pathlib import Path
from typing import Any

import typer

from dflash_trt.errors import ConfigError
from dflash_trt.serve.launch import Endpoints, Ports, serve_alone, serve_with_triton
from dflash_trt.serve.options import ENV_PREFIX, ServeOptions
from dflash_trt.serve.repository import write_repository

_FIELDS = {field.name: field for field in dataclasses.fields(ServeOptions)}
_PORTS = Ports()
OPENAI_PORT = 9000


def _option(name: str, text: str, default: Any = None) -> Any:
    """The flag of a field of `ServeOptions`, with its default and its variable."""
    if default is None:
        default = _FIELDS[name].default
    return typer.Option(default, envvar=ENV_PREFIX + name.upper(), help=text)


ENGINE = typer.Argument(help="Engine directory.", envvar=ENV_PREFIX + "ENGINE")
NAME = _option("model_name", "The model's name in OpenAI's API. Default: the engine's folder.")
QUEUE = _option("queue", "Requests that may wait for a slot; more are refused at once.")
WIDTH = _option("width", "Tokens that a step verifies, or auto, which measures at the start.")
THREADS = _option("threads", "CPU threads; 0: this process's CPU allowance.")
MAX_PROMPT = _option("max_prompt_tokens", "Of one request; 0: what the engine holds.")
MAX_OUTPUT = _option("max_output_tokens", "Of one request, and the default; 0: what it holds.")
SECONDS = _option("request_seconds", "The longest that a request may take; 0: no limit.")
STEP = _option("step_seconds", "A step that takes longer hangs: the server ends. 0: no limit.")
DRAIN = _option("drain_seconds", "How long running requests may go on after SIGTERM.")
ADDRESS = _option("address", "Address to listen at.")
KEYS = _option("api_key_file", "File of API keys, one a line, for OpenAI's API.")
CONNECTIONS = _option("max_connections", "HTTP requests open at a time in OpenAI's API.")
BODY = _option("max_body_bytes", "The longest body of one.")


def serve(
    engine: Path = ENGINE,
    http_port: int = typer.Option(_PORTS.http, envvar=ENV_PREFIX + "HTTP_PORT", help="Triton's."),
    grpc_port: int = typer.Option(_PORTS.grpc, envvar=ENV_PREFIX + "GRPC_PORT", help="Triton's."),
    metrics_port: int = typer.Option(
        _PORTS.metrics, envvar=ENV_PREFIX + "METRICS_PORT", help="Triton's."
    ),
    openai_port: int = _option("openai_port", "Port of OpenAI's API; 0: none.", OPENAI_PORT),
    address: str = ADDRESS,
    model_name: str = NAME,
    queue: int = QUEUE,
    width: str = WIDTH,
    threads: int = THREADS,
    max_prompt_tokens: int = MAX_PROMPT,
    max_output_tokens: int = MAX_OUTPUT,
    request_seconds: float = SECONDS,
    step_seconds: float = STEP,
    drain_seconds: float = DRAIN,
    api_key_file: str = KEYS,
    max_connections: int = CONNECTIONS,
    max_body_bytes: int = BODY,
    no_triton: bool = typer.Option(
        False, "--no-triton", envvar=ENV_PREFIX + "NO_TRITON", help="OpenAI's API alone."
    ),
    repo: Path | None = typer.Option(
        None,
        envvar=ENV_PREFIX + "REPO",
        help="Keep the model repository here; one of ours is replaced.",
    ),
    verbose: bool = typer.Option(False, "--verbose", help="Triton's own messages too."),
) -> None:
    """Serve an engine until SIGTERM. Exit code 0 after an orderly end, 1 if the engine died."""
    options = ServeOptions(
        engine=str(engine), model_name=model_name, queue=queue, width=width, threads=threads,
        max_prompt_tokens=max_prompt_tokens, max_output_tokens=max_output_tokens,
        request_seconds=request_seconds, step_seconds=step_seconds, drain_seconds=drain_seconds,
        address=address, openai_port=openai_port, api_key_file=api_key_file,
        max_connections=max_connections, max_body_bytes=max_body_bytes,
    )  # fmt: skip
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )  # fmt: skip
    if no_triton:
        if repo is not None:
            raise ConfigError("--repo and --no-triton contradict each other")
        code = serve_alone(options, _print_endpoints)
    else:
        ports = Ports(http_port, grpc_port, metrics_port)
        code = serve_with_triton(options, ports, _print_endpoints, repository=repo, verbose=verbose)
    raise typer.Exit(code)


def _print_endpoints(endpoints: Endpoints) -> None:
    width = max(len(name) for name, _ in endpoints)
    lines = [f"{name:{width}}  {place}" for name, place in endpoints]
    try:
        typer.echo("\n".join([*lines, "ready"]))
        sys.stdout.flush()
    except OSError as error:  # a full disk, or a reader that went away: no reason not to serve
        logging.getLogger(__name__).warning("the endpoints cannot be printed: %s", error)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def repo(
    engine: str = typer.Argument(help="Engine directory, as Triton will find it."),
    output: Path = typer.Option(..., "--output", "-o", help="The repository's folder."),
    environment: Path | None = typer.Option(
        None, help="Virtual environment with dflash-trt, for Triton's Python processes."
    ),
    openai_port: int = _option("openai_port", "Port of OpenAI's API; 0: none.", 0),
    queue: int = QUEUE,
    width: str = WIDTH,
    drain_seconds: float = DRAIN,
    force: bool = typer.Option(False, "--force", help="Replace a repository of ours."),
) -> None:
    """Write a model repository for a tritonserver that runs elsewhere."""
    options = ServeOptions(
        engine=engine, openai_port=openai_port, queue=queue, width=width,
        drain_seconds=drain_seconds,
    )  # fmt: skip
    write_repository(output, options, environment, force=force)
    typer.echo(f"tritonserver --model-repository={output}")
