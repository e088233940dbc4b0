"""Ports and addresses that a server cannot have: one line that names the flag, before any load."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import pytest

from dflash_trt.errors import ConfigError, EngineDirError
from dflash_trt.serve import server
from dflash_trt.serve.addresses import at_triton_http, in_url, to_reach
from dflash_trt.serve.launch import Ports, serve_with_triton
from dflash_trt.serve.options import ServeOptions
from dflash_trt.serve.ports import bind, check_ports, in_figures

FLAGS = ("--http-port", "--grpc-port", "--metrics-port", "--openai-port")


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        yield other.getsockname()[1]


def free_ports(count: int) -> list[int]:
    made = [bind("127.0.0.1", 0, "--port") for _ in range(count)]
    ports = [each.getsockname()[1] for each in made]
    for each in made:
        each.close()
    return ports


@pytest.mark.parametrize("flag", FLAGS)
def test_every_port_that_is_taken_is_named_with_its_flag(flag: str, taken: int) -> None:
    ports = dict(zip(FLAGS, free_ports(4), strict=True))
    check_ports("127.0.0.1", ports)
    with pytest.raises(ConfigError, match=f"^{flag} {taken}: .*127.0.0.1.*in use") as caught:
        check_ports("127.0.0.1", {**ports, flag: taken})
    assert flag in caught.value.hint


def test_the_flags_are_those_of_all_ports() -> None:
    assert Ports(1, 2, 3).by_flag(4) == dict(zip(FLAGS, (1, 2, 3, 4), strict=True))
    assert Ports(1, 2, 3).by_flag(0) == dict(zip(FLAGS[:3], (1, 2, 3), strict=True))


@pytest.mark.parametrize("port", [-1, 0, 65536, 10**30])
def test_numbers_that_are_no_port(port: int) -> None:
    with pytest.raises(ConfigError, match=rf"^--grpc-port is {port}, allowed are 1 to 65535"):
        check_ports("127.0.0.1", {"--http-port": 8000, "--grpc-port": port})


def test_one_port_for_two() -> None:
    with pytest.raises(ConfigError, match=r"^--http-port and --openai-port are both 8000"):
        check_ports("127.0.0.1", {"--http-port": 8000, "--grpc-port": 1, "--openai-port": 8000})


@pytest.mark.parametrize(
    "address", ["no such host", "256.0.0.1", "a" * 300, "a\0b", "::zz", "8.8.8.8"]
)
def test_addresses_that_are_none_of_ours(address: str) -> None:
    with pytest.raises(ConfigError, match=r"^--address ") as caught:
        bind(address, 0, "--http-port")
    assert "\n" not in caught.value.message
    assert "127.0.0.1" in caught.value.hint


@pytest.mark.parametrize(
    ("address", "http", "grpc", "reached"),
    [
        ("0.0.0.0", "0.0.0.0", "0.0.0.0", "127.0.0.1"),
        ("10.1.2.3", "10.1.2.3", "10.1.2.3", "10.1.2.3"),
        ("::", "ipv6:::", "[::]", "[::1]"),
        ("::1", "ipv6:::1", "[::1]", "[::1]"),
        ("fd00::5", "ipv6:fd00::5", "[fd00::5]", "[fd00::5]"),
    ],
)
def test_each_who_listens_has_its_own_spelling(
    address: str, http: str, grpc: str, reached: str
) -> None:
    assert (at_triton_http(address), in_url(address), to_reach(address)) == (http, grpc, reached)


def test_names_become_figures() -> None:
    assert in_figures("localhost") == "127.0.0.1"
    assert in_figures("0.0.0.0") == "0.0.0.0"
    if socket.has_ipv6:
        with contextlib.suppress(ConfigError):  # a machine without the address
            assert in_figures("0:0::1%lo") == "::1"
    with pytest.raises(ConfigError, match="--address 'nowhere' is not one to listen at"):
        in_figures("nowhere")


def test_nothing_is_loaded_before_the_port_is_had(
    taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "EngineHost", lambda *_: pytest.fail("an engine was loaded"))
    options = ServeOptions(engine="some", openai_port=taken, address="127.0.0.1")
    with pytest.raises(ConfigError, match=f"^--openai-port {taken}: "):
        server.EngineServer(options)
    monkeypatch.setattr("dflash_trt.serve.launch.open_engine", lambda *_, **__: None)
    triton = lambda: pytest.fail("a tritonserver was looked for")  # noqa: E731
    monkeypatch.setattr("dflash_trt.serve.launch.find_tritonserver", triton)
    options = ServeOptions(engine="some", address="127.0.0.1")
    ports = Ports(*free_ports(2), taken)
    with pytest.raises(ConfigError, match=f"^--metrics-port {taken}: "):
        serve_with_triton(options, ports, lambda _: None)


def test_an_engine_that_cannot_be_loaded_lets_the_port_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (port,) = free_ports(1)
    options = ServeOptions(engine="/nowhere", openai_port=port, address="127.0.0.1")
    with pytest.raises(EngineDirError, match="nowhere"):
        server.EngineServer(options)
    bind("127.0.0.1", port, "--openai-port").close()
