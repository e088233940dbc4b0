"""Where a server listens, and what of Triton it keeps closed."""

from __future__ import annotations

import json
import socket
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tritonclient.grpc as grpcclient
from running import Server, serving
from tritonclient.utils import InferenceServerException


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as made:
            made.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.parametrize(
    ("address", "place"), [("::", "[::1]"), ("::1", "[::1]"), ("localhost", "127.0.0.1")]
)
def test_every_way_in_is_at_the_address(engine_path: Path, address: str, place: str) -> None:
    """Triton listens somewhere else, without a word, when it is told an address of another kind."""
    if place == "[::1]" and not has_ipv6():
        pytest.skip("this machine has no IPv6 loopback")
    with serving(engine_path, "--address", address) as server:
        body = json.dumps({"text_input": "x", "max_tokens": 2}).encode()
        places = {
            f"http://{place}:{server.http}/v2/models/ensemble/generate": body,
            f"http://{place}:{server.openai}/v1/completions": b'{"prompt": "x", "max_tokens": 2}',
            f"http://{place}:{server.metrics_port}/metrics": None,
        }
        for url, sent in places.items():
            with urllib.request.urlopen(url, sent, timeout=30) as answer:
                assert answer.status == 200
            assert any(url.rpartition("/v")[0] in line for line in server.lines)
        with grpcclient.InferenceServerClient(f"{place}:{server.grpc}") as client:
            assert client.is_model_ready("ensemble")


CLOSED_PATHS = {
    "/v2/repository/index": b"{}",
    "/v2/repository/models/ensemble/load": b"{}",
    "/v2/repository/models/ensemble/unload": b"{}",
    "/v2/logging": None,
    "/v2/trace/setting": None,
    "/v2/models/ensemble/trace/setting": None,
    "/v2/systemsharedmemory/status": None,
    "/v2/systemsharedmemory/region/a/register": b'{"key": "/a", "offset": 0, "byte_size": 1}',
    "/v2/cudasharedmemory/status": None,
}
CLOSED_CALLS: dict[str, Callable[[Any], Any]] = {
    "index": lambda client: client.get_model_repository_index(),
    "load": lambda client: client.load_model("ensemble"),
    "unload": lambda client: client.unload_model("ensemble"),
    "logging": lambda client: client.update_log_settings({"log_verbose_level": 1}),
    "trace": lambda client: client.get_trace_settings(),
    "memory": lambda client: client.register_system_shared_memory("a", "/a", 1),
    "gpu memory": lambda client: client.get_cuda_shared_memory_status(),
}


def test_what_is_no_inference_is_closed(server: Server) -> None:
    for path, body in CLOSED_PATHS.items():
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(server.url(path), body, timeout=10)
        with refused.value as error:
            assert (path, error.code) == (path, 403)
            assert "restricted" in error.read().decode()
    with grpcclient.InferenceServerClient(f"127.0.0.1:{server.grpc}") as client:
        for name, call in CLOSED_CALLS.items():
            with pytest.raises(InferenceServerException, match="restricted"):
                pytest.fail(f"{name}: {call(client)}")
        # What clients ask for before they send a request.
        assert client.is_server_live()
        assert client.is_model_ready("tensorrt_llm_bls")
        assert client.get_server_metadata().name == "triton"
        assert client.get_model_metadata("ensemble").name == "ensemble"
        assert client.get_model_config("ensemble").config.name == "ensemble"
        assert client.get_inference_statistics("ensemble").model_stats
