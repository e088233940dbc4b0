"""The script of `helm test`, run against a server that answers like Triton, and not."""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from charts import the

Serve = Callable[[int, dict[str, Any]], str]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Starts a server that answers every POST with a status and a body; its address."""
    servers: list[HTTPServer] = []

    def serve(status: int, body: dict[str, Any]) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                sent = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                answer = json.dumps(body if sent["text_input"] else {}).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_: object) -> None:
                pass

        servers.append(HTTPServer(("127.0.0.1", 0), Handler))
        threading.Thread(target=servers[-1].serve_forever, args=(0.05,)).start()
        return f"http://127.0.0.1:{servers[-1].server_port}"

    yield serve
    for server in servers:
        server.shutdown()
        server.server_close()


def run(address: str) -> subprocess.CompletedProcess[str]:
    (container,) = the({}, "Pod")["spec"]["containers"]
    (url,) = container["args"]
    assert url == "http://demo-dflash-triton:8000/v2/models/ensemble/generate"
    return subprocess.run([*container["command"], address], capture_output=True, text=True)


def test_text_passes(serve: Serve) -> None:
    done = run(serve(200, {"text_output": " there was"}))
    assert (done.returncode, done.stdout) == (0, "' there was'\n")


@pytest.mark.parametrize(
    ("status", "body"), [(200, {"text_output": ""}), (503, {"error": "not ready"}), (200, {})]
)
def test_anything_else_fails(serve: Serve, status: int, body: dict[str, Any]) -> None:
    assert run(serve(status, body)).returncode == 1
