"""The Triton models: one that owns the engine, and others that share it under another name.

model.py of the model repository is a shell around these. Triton's module
`triton_python_backend_utils` exists only inside its Python process, so it is passed in.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from dflash_trt.serve.desk import Client, Refusal, refuse
from dflash_trt.serve.from_tensors import Arrays
from dflash_trt.serve.metrics import MetricsMirror
from dflash_trt.serve.options import ServeOptions
from dflash_trt.serve.server import EngineServer
from dflash_trt.serve.sharing import ALIAS_OF, SharedEngine, default_socket

_LOG = logging.getLogger(__name__)
METRICS_PERIOD_S = 1.0
LAST_METRICS_S = 3.0  # for Triton to take them: nothing at its end may wait for metrics for ever
PARENT_PERIOD_S = 0.5


class TritonModel(Protocol):
    """What model.py calls."""

    @property
    def is_ready(self) -> bool:
        """Whether requests are taken."""

    def execute(self, requests: Sequence[Any]) -> None:
        """Take requests in; their responses come later, by their senders."""

    def close(self) -> None:
        """Let running requests end, and stop."""


def load_model(pb_utils: Any, args: Mapping[str, str]) -> TritonModel:
    """The model that Triton's `args` describe; its engine is loaded and tried out.

    Raises what `EngineServer` raises: Triton shows the message, and does not become ready.
    """
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    _end_with(os.getppid())
    config = json.loads(args["model_config"])
    parameters = {k: v["string_value"] for k, v in config.get("parameters", {}).items()}
    owner = parameters.get(ALIAS_OF)
    if owner is not None:
        socket = parameters.get("socket") or default_socket(os.getppid(), owner)
        return AliasModel(pb_utils, Path(socket))
    options = ServeOptions.from_parameters(parameters)
    socket = options.socket or default_socket(os.getppid(), args["model_name"])
    return EngineModel(pb_utils, EngineServer(options, Path(socket)))


def _end_with(tritonserver: int) -> None:
    """End this process at once when tritonserver is killed: it would keep memory and ports."""

    def watch() -> None:
        while os.getppid() == tritonserver:
            time.sleep(PARENT_PERIOD_S)
        os._exit(1)

    threading.Thread(target=watch, name="parent", daemon=True).start()


class SenderClient:
    """One request of Triton.

    After the last response Triton frees what `is_cancelled` asks about, and 2.51 crashes when it is
    asked then or at that moment: so one thread at a time, and not after the end.
    """

    def __init__(self, pb_utils: Any, sender: Any) -> None:
        self._pb = pb_utils
        self._sender = sender
        self._lock = threading.Lock()
        self._is_over = False

    def send(self, arrays: Arrays, refusal: Refusal | None, *, is_last: bool) -> None:
        """See `Client`."""
        pb = self._pb
        error = None
        if refusal is not None:
            error = pb.TritonError(refusal.text, getattr(pb.TritonError, refusal.code))
        tensors = [pb.Tensor(name, array) for name, array in arrays.items()]
        response = pb.InferenceResponse(output_tensors=tensors, error=error)
        flags = pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL if is_last else 0
        with self._lock:
            self._is_over |= is_last
            self._sender.send(response, flags=flags)

    def is_gone(self) -> bool:
        """See `Client`."""
        with self._lock:
            return not self._is_over and bool(self._sender.is_cancelled())


def _arrays(request: Any) -> Arrays:
    return {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}


def _pass_on(
    pb_utils: Any, requests: Sequence[Any], take: Callable[[Arrays, Client], None]
) -> None:
    """Hand each request of Triton to `take`. One that fails is refused, and no other with it."""
    for request in requests:
        client = SenderClient(pb_utils, request.get_response_sender())
        try:
            arrays = _arrays(request)
        except Exception as error:  # whatever Triton's tensors raise
            refuse(client, Refusal("INVALID_ARG", f"inputs: {error}"))
            continue
        try:
            take(arrays, client)
        except OSError as error:
            refuse(client, Refusal("UNAVAILABLE", f"the engine's process does not answer: {error}"))
        except Exception as error:
            refuse(client, Refusal.of(error))


class EngineModel:
    """The model that owns the engine."""

    def __init__(self, pb_utils: Any, server: EngineServer) -> None:
        self._pb = pb_utils
        self._server = server
        self._mirror = MetricsMirror(server.host.telemetry.registry, pb_utils.MetricFamily)
        self._closing = threading.Event()
        self._publisher = threading.Thread(target=self._publish, name="metrics", daemon=True)
        self._publisher.start()

    @property
    def is_ready(self) -> bool:
        """See `TritonModel`."""
        return self._server.host.is_ready

    def execute(self, requests: Sequence[Any]) -> None:
        """See `TritonModel`."""
        _pass_on(self._pb, requests, self._server.take)

    def close(self) -> None:
        """See `TritonModel`."""
        self._server.close()
        self._closing.set()  # where a step hangs, the loop has no end
        self._publisher.join(LAST_METRICS_S)

    def _publish(self) -> None:
        """The only thread that touches Triton's metrics: while the engine runs, and at its end."""
        is_over = is_failing = False
        while not is_over:
            is_over = self._server.host.loop.wait_end(METRICS_PERIOD_S) or self._closing.is_set()
            try:
                self._mirror.publish()
                is_failing = False
            except Exception:
                if not is_failing:  # once: the next try comes in a second
                    _LOG.exception("Triton's metrics cannot be brought up to date")
                is_failing = True


class AliasModel:
    """Another name for a model: passes requests on to the process that has the engine."""

    def __init__(self, pb_utils: Any, socket: Path) -> None:
        self._pb = pb_utils
        self._engine = SharedEngine(socket)

    @property
    def is_ready(self) -> bool:
        """See `TritonModel`."""
        return self._engine.is_ready

    def execute(self, requests: Sequence[Any]) -> None:
        """See `TritonModel`."""
        _pass_on(self._pb, requests, self._engine.take)

    def close(self) -> None:
        """See `TritonModel`."""
        self._engine.close()
