"""The scripts of bench/: `--help` needs no optional package, and bad input is one line."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BENCH = ROOT / "bench"
MAIN = '__name__ == "__main__"'
FILES = {file.stem: file.read_text() for file in sorted(BENCH.glob("*.py"))}
SCRIPTS = [name for name, text in FILES.items() if MAIN in text]
OPTIONAL = (
    "aiohttp", "cuda", "fastapi", "gguf", "huggingface_hub", "openai", "pydantic", "pytriton",
    "starlette", "tensorrt", "tensorrt_rtx", "torch", "transformers", "tritonclient", "uvicorn",
)  # fmt: skip
RUNNER = """
import runpy, sys
sys.modules.update(dict.fromkeys(sys.argv.pop(1).split(",")))  # None: cannot be imported
sys.argv = sys.argv[1:]
sys.path.insert(0, sys.argv[0].rpartition("/")[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run(name: str, *arguments: str, blocked: tuple[str, ...] = OPTIONAL) -> tuple[int, str, str]:
    """A script in a process that has no optional package."""
    command = [sys.executable, "-c", RUNNER, ",".join(blocked), str(BENCH / f"{name}.py")]
    done = subprocess.run(
        [*command, *arguments], capture_output=True, text=True, timeout=120, check=False
    )
    return done.returncode, done.stdout, done.stderr


def refused(result: tuple[int, str, str], word: str) -> None:
    code, out, error = result
    assert (code, out) == (2, "")
    (line,) = [line for line in error.splitlines() if "error: " in line]
    assert word in line
    assert "Traceback" not in error


def test_every_file_is_a_script_or_part_of_one() -> None:
    parts = FILES.keys() - set(SCRIPTS)
    texts = "\n".join(FILES.values())
    unused = [p for p in parts if f"import {p}" not in texts and f"from {p} " not in texts
              and f'"{p}"' not in texts]  # fmt: skip
    assert not unused
    assert len(SCRIPTS) > 8


@pytest.mark.parametrize("name", SCRIPTS)
def test_help_needs_nothing_that_is_optional(name: str) -> None:
    code, out, error = run(name, "--help")
    assert (code, error) == (0, "")
    assert out.startswith("usage: ")
    assert "--help" in out


ENGINE = ("--engine", "/no/engine", "-o", "{tmp}/o.json")
NAMED = ("--engine", "a=/no/engine", "-o", "{tmp}/o.json")
SHORT = ("--engine", "NAME_ONLY", "-o", "{tmp}/o.json")


@pytest.mark.parametrize(
    ("name", "arguments", "word"),
    [
        ("adaptive", NAMED, "/no/engine"), ("adaptive", SHORT, "NAME=DIR"),
        ("adaptive", ("--engine", "a={tmp}", "-o", "{tmp}/o"), "config.json"),
        ("adaptive", ("--engine", "a={engine}", "-o", "/no/such/o"), "/no/such/o"),
        ("adaptive", ("--engine", "a={engine}", "-o", "{tmp}"), "cannot be written"),
        ("adaptive", ("--engine", "a={engine}", "-o", "{tmp}/o"), "config.json"),
        ("build_trt", ("--output", "/no/such/o"), "/no/such/o"),
        ("build_trt", ("--device", "sm1"), "sm1"),
        ("build_trt", ("--folder", "/no/such"), "/no/such"),
        ("build_trt", ("--layers", "0"), "'0' is not a whole number"),
        ("decode_cpu", NAMED, "/no/engine"), ("decode_cpu", SHORT, "NAME=DIR"),
        ("decode_cpu", ("--engine", "a={engine}", "-o", "{tmp}/o"), "config.json"),
        ("demo_table", ("/no/a", "/no/b", "/no/c"), "/no/a"),
        ("demo_table", (), "required"),
        ("demo_table", ("{json}", "{json}", "{json}"), "has not what the table shows"),
        ("demo_table", ("{bad}", "{json}", "{json}"), "{bad}"),
        ("demo_table", ("{list}", "{json}", "{json}"), "no JSON object"),
        ("gpu", ("-o", "/no/such/o"), "/no/such/o"), ("gpu", ("--precision", "fp3"), "fp3"),
        ("host_overhead", ("-o", "/no/such/o"), "/no/such/o"),
        ("host_overhead", ("--steps", "-1"), "--steps"),
        ("many_requests", ENGINE, "/no/engine"),
        ("many_requests", ("--engine", "{engine}", "-o", "{tmp}/o", "--widths", "two"), "two"),
        ("sampled_acceptance", ENGINE, "/no/engine"), ("sampling_cost", ENGINE, "/no/engine"),
        ("serving", ("overload", "/no/engine"), "/no/engine"),
        ("serving", ("overload", "{engine}"), "package aiohttp is not installed"),
        ("serving", ("nothing", "{engine}"), "nothing"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(
    name: str, arguments: tuple[str, ...], word: str, tmp_path: Path
) -> None:
    places = {"tmp": tmp_path, "engine": tmp_path / "engine"}
    places["engine"].mkdir()
    (places["engine"] / "config.json").write_text("{}")
    for stem, text in (("json", "{}"), ("bad", "[" * 100_000), ("list", "[]")):
        places[stem] = tmp_path / f"{stem}.json"
        places[stem].write_text(text)
    words = {key: str(value) for key, value in places.items()}
    refused(run(name, *(part.format(**words) for part in arguments)), word.format(**words))


# Parses a command of the documents and runs nothing: one command a line on standard input.
PARSER = """
import argparse, contextlib, io, os, runpy, shlex, sys
class Parsed(Exception): pass
parse = argparse.ArgumentParser.parse_args
def parse_only(self, *_):
    parse(self)
    raise Parsed
argparse.ArgumentParser.parse_args = parse_only
for line in sys.stdin:
    sys.argv = shlex.split(line)
    sys.path.insert(0, os.path.dirname(sys.argv[0]))
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            runpy.run_path(sys.argv[0], run_name="__main__")
    except Parsed:
        continue
    except BaseException:
        pass
    print(line.strip(), "->", said.getvalue().strip().splitlines()[-1:])
"""


def commands_of_the_documents() -> list[str]:
    documents = [ROOT / "README.md", BENCH / "README.md", *(ROOT / "docs").glob("*.md")]
    texts = "\n".join(file.read_text() for file in documents).replace("\\\n", " ")
    return [line.split("  #")[0].strip() for line in re.findall(r"python (bench/[^`\n]+)", texts)]


def test_commands_of_the_documents_are_complete(tmp_path: Path) -> None:
    commands = commands_of_the_documents()
    assert {re.sub(r"bench/(\w+)\.py.*", r"\1", line) for line in commands} >= {
        "adaptive", "build_trt", "decode_cpu", "host_overhead", "many_requests",
        "sampled_acceptance", "sampling_cost", "serving",
    }  # fmt: skip
    (tmp_path / "bench").symlink_to(BENCH)
    for engine in re.findall(r"\bout/bench-[\w-]+", BENCH.joinpath("README.md").read_text()):
        (tmp_path / engine).mkdir(parents=True, exist_ok=True)
        (tmp_path / engine / "config.json").write_text("{}")
    done = subprocess.run(
        [sys.executable, "-c", PARSER], cwd=tmp_path, input="\n".join(commands), text=True,
        capture_output=True, timeout=120, check=True,
    )  # fmt: skip
    assert done.stdout == ""


def test_every_script_has_a_bad_input_here() -> None:
    (mark,) = test_bad_input_is_one_line.pytestmark
    assert {case[0] for case in mark.args[1]} == set(SCRIPTS)
