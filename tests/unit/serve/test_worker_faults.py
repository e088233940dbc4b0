"""Threads and tasks behind a server: one exception is no end of them, nor of other requests."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from toy_loop import Gate
from toy_server import WAIT_S, Brake, FakeClient, ToyServer, eventually, tensors, toy_server

from dflash_trt.serve import triton
from dflash_trt.serve.front import Front
from dflash_trt.serve.host import EngineHost
from dflash_trt.serve.metrics import MetricsMirror
from dflash_trt.serve.sharing import SharedEngine
from dflash_trt.serve.supervisor import Supervisor
from dflash_trt.serve.triton import AliasModel, EngineModel
from dflash_trt.serve.wire import packed

GARBAGE = struct.pack("!Q", 3) + b"{x}"


@contextmanager
def shared(server: ToyServer) -> Iterator[SharedEngine]:
    """The engine as another process sees it."""
    made = SharedEngine(Path(server.inner.host.options.socket))
    try:
        yield made
    finally:
        made.close()


@pytest.mark.parametrize("is_shared", [False, True])
def test_a_client_that_cannot_be_asked_is_served_and_others_may_leave(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    is_shared: bool,
) -> None:
    brake = Brake(0.05)
    with (
        toy_server(monkeypatch, brake, socket=str(tmp_path / "s")) as server,
        shared(server) as other,
    ):
        brake.is_on = True
        take = other.take if is_shared else server.inner.take
        silent, leaving = FakeClient(broken=("is_gone",)), FakeClient(gone=True)
        take(tensors("abc", 40), silent)
        take(tensors("abc", 80), leaving)
        assert leaving.over.wait(WAIT_S)
        assert [r.code for r in leaving.refusals] == ["CANCELLED"]
        assert not silent.over.is_set()
        assert silent.over.wait(WAIT_S)
        assert silent.refusals == []
        assert silent.num_asked == 1
        assert caplog.text.count("cannot be asked") == 1
        late = FakeClient(gone=True)  # whoever comes later is asked too
        take(tensors("abc", 80), late)
        assert late.over.wait(WAIT_S)
        assert [r.code for r in late.refusals] == ["CANCELLED"]


@pytest.mark.parametrize("is_shared", [False, True])
def test_a_client_that_cannot_be_told_leaves_the_others_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_shared: bool
) -> None:
    with toy_server(monkeypatch, socket=str(tmp_path / "s")) as server, shared(server) as other:
        take = other.take if is_shared else server.inner.take
        for _ in range(3):
            deaf, good = FakeClient(broken=("send",)), FakeClient()
            take(tensors("abc"), deaf)
            take(tensors("abc"), good)
            assert good.over.wait(WAIT_S)
            assert good.refusals == []
        assert eventually(lambda: server.loop.num_requests == 0)
        assert other.is_ready


def test_a_message_that_cannot_be_read_ends_its_connection_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        engine = SharedEngine(path)
        clients = [FakeClient(broken=("send",)), FakeClient()]
        for client in clients:
            engine.take(tensors("abc"), client)
        line, _ = listener.accept()
        line.sendall(GARBAGE)
        assert clients[1].over.wait(WAIT_S)
        assert [r.code for r in clients[1].refusals] == ["UNAVAILABLE"]
        line.close()
    path.unlink()
    with toy_server(monkeypatch, socket=str(path)) as server:
        assert engine.is_ready
        with socket.socket(socket.AF_UNIX) as hostile:  # and so at the other end
            hostile.connect(str(path))
            hostile.sendall(GARBAGE)
            assert hostile.recv(1) == b""
        again = FakeClient()
        engine.take(tensors("abc"), again)
        assert again.over.wait(WAIT_S)
        assert again.refusals == []
        assert server.loop.is_healthy
        engine.close()


def test_the_supervisor_takes_nonsense_for_the_engines_end(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    made = Supervisor(["none"], {}, "http://127.0.0.1:1/", tmp_path / "s", 1.0)
    listening = threading.Thread(target=made._listen, args=(ours,))
    listening.start()
    theirs.sendall(packed("drained") + GARBAGE)
    listening.join(WAIT_S)
    assert made._lost.is_set()
    for end in (ours, theirs):
        end.close()


def test_work_that_nobody_waits_for_is_logged_when_it_fails(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def fail() -> None:
        raise ZeroDivisionError("ours")

    async def work() -> None:
        await asyncio.sleep(0)

    front = Front()
    front.spawn(fail())
    front.start(work()).result(WAIT_S)
    front.close()
    assert "ZeroDivisionError: ours" in caplog.text


class Sender:
    """Triton's way back of one request."""

    def __init__(self) -> None:
        self.responses: list[Any] = []
        self.over = threading.Event()

    def send(self, response: Any, flags: int) -> None:
        self.responses.append(response)
        if flags:
            self.over.set()

    def is_cancelled(self) -> bool:
        return False


class Asked:
    """A request as Triton hands it over."""

    def __init__(self, inputs: Any) -> None:
        self.sender, self._inputs = Sender(), inputs

    def get_response_sender(self) -> Sender:
        return self.sender

    def inputs(self) -> list[Any]:
        if isinstance(self._inputs, Exception):
            raise self._inputs
        return [
            SimpleNamespace(name=lambda name=name: name, as_numpy=lambda array=array: array)
            for name, array in self._inputs.items()
        ]


class TritonError:
    """What Triton sends instead of tensors."""

    INVALID_ARG, UNAVAILABLE, INTERNAL, CANCELLED = "INVALID_ARG", "UNAVAILABLE", "INTERNAL", "C"

    def __init__(self, text: str, code: str) -> None:
        self.text, self.code = text, code


class Family:
    """Triton's metrics, of which one is broken."""

    GAUGE, COUNTER = "gauge", "counter"
    values: dict[str, float]
    broken: set[str]

    def __init__(self, name: str, description: str, kind: str) -> None:
        self._name = name

    def Metric(self, labels: dict[str, str]) -> Any:  # noqa: N802
        name = "".join([self._name, *labels.values()])

        def put(value: float, *, more: bool) -> None:
            if self._name in self.broken:
                raise RuntimeError("this metric is broken")
            self.values[name] = value + more * self.values.get(name, 0.0)

        put(0.0, more=True)
        return SimpleNamespace(
            set=lambda value: put(value, more=False), increment=lambda value: put(value, more=True)
        )


@pytest.fixture
def pb_utils() -> Any:
    class Fresh(Family):
        values, broken = {}, set()

    return SimpleNamespace(
        MetricFamily=Fresh, TritonError=TritonError, TRITONSERVER_RESPONSE_COMPLETE_FINAL=1,
        Tensor=lambda name, array: (name, array),
        InferenceResponse=lambda output_tensors, error: SimpleNamespace(
            tensors=dict(output_tensors), error=error
        ),
    )  # fmt: skip


def test_one_bad_request_of_a_batch_is_refused_alone(
    monkeypatch: pytest.MonkeyPatch, pb_utils: Any, tmp_path: Path
) -> None:
    path = tmp_path / "s"
    odd = {"text_input": object()}  # nothing that could go over a socket
    with toy_server(monkeypatch, socket=str(path)) as server:
        models = [EngineModel(pb_utils, server.inner), AliasModel(pb_utils, path)]
        for model in models:
            requests = [Asked(RuntimeError("torn")), Asked(odd), Asked(tensors("abc"))]
            model.execute(requests)
            for request in requests:
                assert request.sender.over.wait(WAIT_S)
                assert len(request.sender.responses) == 1
            errors = [request.sender.responses[0].error for request in requests]
            assert (errors[0].code, errors[0].text) == ("INVALID_ARG", "inputs: torn")
            assert errors[1].code == "INTERNAL"
            assert errors[2] is None
        models[1].close()
        assert models[0].is_ready
        monkeypatch.setattr(server, "close", models[0].close)


def test_metrics_go_on_after_one_that_fails(
    monkeypatch: pytest.MonkeyPatch, pb_utils: Any, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(triton, "METRICS_PERIOD_S", 0.02)
    family = pb_utils.MetricFamily
    family.broken.add("dflash_queue_limit")
    publish, failures = MetricsMirror.publish, [3]

    def sometimes(mirror: MetricsMirror) -> None:
        if failures[0]:
            failures[0] -= 1
            raise RuntimeError("not now")
        publish(mirror)

    monkeypatch.setattr(MetricsMirror, "publish", sometimes)
    with toy_server(monkeypatch) as server:
        model = EngineModel(pb_utils, server.inner)
        assert server.complete(max_tokens=8)[0] == 200
        assert eventually(lambda: family.values.get("dflash_generated_tokens_total") == 8)
        assert "dflash_queue_limit" not in family.values
        assert caplog.text.count("cannot be brought up to date") == 1
        time.sleep(0.1)
        assert caplog.text.count("Triton does not take the metric dflash_queue_limit") == 1
        family.broken.clear()
        assert eventually(lambda: family.values.get("dflash_queue_limit") == 64)
        monkeypatch.setattr(server, "close", model.close)


def test_the_last_metrics_are_those_of_the_end(
    monkeypatch: pytest.MonkeyPatch, pb_utils: Any
) -> None:
    """Without waiting for the next time that they would be copied."""
    monkeypatch.setattr(triton, "METRICS_PERIOD_S", 600.0)
    values, brake = pb_utils.MetricFamily.values, Brake(0.05)
    with toy_server(monkeypatch, brake) as server:
        model = EngineModel(pb_utils, server.inner)
        brake.is_on = True
        client = FakeClient()
        server.inner.take(tensors("abc", 80), client)
        assert eventually(lambda: server.metric("slots_in_use") == 1)
        server.inner.host.close()
        assert client.over.wait(WAIT_S)
        assert eventually(lambda: values.get("dflash_requests_finished_totalshutdown") == 1)
        assert (values["dflash_healthy"], values["dflash_draining"]) == (0, 1)
        monkeypatch.setattr(server, "close", model.close)


def test_a_model_closes_though_a_step_hangs(monkeypatch: pytest.MonkeyPatch, pb_utils: Any) -> None:
    monkeypatch.setattr(triton, "METRICS_PERIOD_S", 0.02)
    monkeypatch.setattr(EngineHost, "close", lambda host: host.loop.close(0.1))
    gate = Gate(is_open=True)
    with toy_server(monkeypatch, gate, step_seconds=0.0, drain_seconds=0.1) as server:
        model = EngineModel(pb_utils, server.inner)
        gate.go_on.clear()
        client = FakeClient()
        server.inner.take(tensors("abc"), client)
        assert eventually(lambda: server.loop.num_requests == 1)
        closing = threading.Thread(target=model.close)
        closing.start()
        closing.join(WAIT_S)
        assert not closing.is_alive()
        assert [refusal.code for refusal in client.refusals] == ["UNAVAILABLE"]
        assert not model._publisher.is_alive()
        gate.go_on.set()
        monkeypatch.setattr(server, "close", lambda: True)
