"""Every curl of the documents, against a server."""

from __future__ import annotations

import re
import urllib.request
from pathlib import Path

import pytest
from running import Server

ROOT = Path(__file__).parents[2]
CURL = re.compile(r"curl [^']*?localhost:(\d+)(/\S+)[\s\\]+-d '([^']*)'")
FOUND = [
    match.groups()
    for name in ("README.md", "docs/serving.md")
    for match in CURL.finditer((ROOT / name).read_text())
]


def test_there_are_examples() -> None:
    assert len(FOUND) >= 3


@pytest.mark.parametrize(("port", "path", "body"), FOUND)
def test_curl(server: Server, port: str, path: str, body: str) -> None:
    real = {"8000": server.http, "9000": server.openai}[port]
    # An answer to its end takes the tiny model long; that it streams is what counts.
    with urllib.request.urlopen(f"http://127.0.0.1:{real}{path}", body.encode(), 30) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.readline().startswith(b"data: {")
