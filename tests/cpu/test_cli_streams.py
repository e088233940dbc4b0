"""Standard streams that are closed, full, or left by their reader: a sane code, no traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tiny import TinyEngine

COMMAND = [sys.executable, "-c", "from dflash_trt.cli import main; main()"]
#: Of every verb something that prints, with its exit code when all is well.
VERBS: dict[str, tuple[tuple[str, ...], int]] = {
    "build": (("--target", "/no/such", "--drafter", "/no/such"), 2),
    "generate": (("ENGINE", "-p", "x", "--max-tokens", "3", "--threads", "1"), 0),
    "inspect": (("ENGINE",), 0),
    "serve": (("/no/such", "--no-triton"), 2),
    "repo": (("ENGINE", "-o", "TMP/repo"), 0),
    "verify": (("ENGINE", "--prompts", "TMP/prompts", "--max-tokens", "3", "--threads", "1"), 0),
    "doctor": ((), 0),
    "--version": ((), 0),
}


def start(redirection: str, *arguments: str, **options: Any) -> tuple[int, str, str]:
    """A command whose streams the shell changes: exit code, what came out, what was said."""
    shell = ["bash", "-c", f'exec "$@" {redirection}', "bash"]
    done = subprocess.run(
        [*shell, *COMMAND, *arguments], capture_output=True, text=True, timeout=120, **options
    )
    return done.returncode, done.stdout, done.stderr


def filled(verb: str, engine: TinyEngine, tmp_path: Path) -> list[str]:
    arguments = list(VERBS[verb][0])
    (tmp_path / "prompts").write_text("one\n")
    places = {"ENGINE": str(engine.directory.path), "TMP": str(tmp_path)}
    for name, place in places.items():
        arguments = [part.replace(name, place) for part in arguments]
    return [verb, *arguments]


@pytest.mark.parametrize("verb", VERBS)
def test_closed_streams(verb: str, engine: TinyEngine, tmp_path: Path) -> None:
    """They are as /dev/null: the work is done, the code is what it is."""
    code, out, said = start("<&- >&-", *filled(verb, engine, tmp_path))
    assert (code, out) == (VERBS[verb][1], "")
    assert "Traceback" not in said
    if verb == "repo":
        (tmp_path / "repo").rename(tmp_path / "other")
    code, out, said = start("2>&-", *filled(verb, engine, tmp_path))
    assert (code, said) == (VERBS[verb][1], "")
    assert bool(out) == (code == 0)


def test_no_file_gets_the_number_of_a_closed_stream() -> None:
    """What a library prints would go into it, or what a program prints that is started."""
    code = """
import os, subprocess, sys
import dflash_trt.cli.frame as frame
from dflash_trt.cli import main
places = lambda: [os.readlink(f"/proc/self/fd/{number}") for number in (0, 1, 2)]
def check(app):
    started = subprocess.run(["readlink", *(f"/proc/self/fd/{number}" for number in (0, 1, 2))])
    sys.exit(places() != ["/dev/null"] * 3 or started.returncode)
frame.run = check
main()
"""
    shell = ["bash", "-c", 'exec "$@" <&- >&- 2>&-', "bash", sys.executable, "-c", code]
    assert subprocess.run(shell, timeout=60, check=False).returncode == 0


@pytest.mark.parametrize("verb", ["doctor", "inspect", "generate", "--help"])
def test_a_reader_that_went_away(verb: str, engine: TinyEngine, tmp_path: Path) -> None:
    arguments = filled(verb, engine, tmp_path) if verb in VERBS else [verb]
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "wb") as stream:
        done = subprocess.run(
            [*COMMAND, *arguments], stdout=stream, stderr=subprocess.PIPE, text=True, timeout=120
        )
    assert (done.returncode, "error" in done.stderr, "Traceback" in done.stderr) == (
        141, False, False,
    )  # fmt: skip
    assert "Exception ignored" not in done.stderr


@pytest.mark.parametrize("verb", ["doctor", "inspect"])
def test_a_full_disk(verb: str, engine: TinyEngine, tmp_path: Path) -> None:
    code, _, said = start(">/dev/full", *filled(verb, engine, tmp_path))
    assert (code, said) == (2, "error: No space left on device\n")
    code, out, _ = start("2>/dev/full", "inspect", "/no/such")
    assert (code, out) == (2, "")
