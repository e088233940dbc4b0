"""docs/json.md lists the fields of every `--json`, and of the files beside an engine."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from dflash_trt.cli import main
from dflash_trt.decode.engine import Engine
from dflash_trt.doctor.machine import Gpu
from dflash_trt.engine_dir import open_engine
from dflash_trt.inspection import describe
from dflash_trt.lossless.verify import Mismatch, Report
from tiny import TinyEngine, TinyPair
from tiny.builds import sign
from tiny.fake_trt import hollow_directory

TEXT = (Path(__file__).parents[2] / "docs" / "json.md").read_text()
GPU_ONLY = {"network", "warnings"}  # of `inspect`; elsewhere a field is there, and may be null


def table() -> dict[str, set[str]]:
    """Command -> its fields."""
    found: dict[str, set[str]] = {}
    command = ""
    for line in TEXT.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if not line.startswith("| ") or len(cells) != 3 or cells[1] == "field":
            continue
        command = cells[0].strip("`") or command
        found.setdefault(command, set()).update(re.findall(r"`(\S+)`", cells[1]))
    return found


TABLE = table()


def fields(value: Any, told: set[str], at: str = "") -> Iterator[str]:
    """The fields of an object, as deep as the table goes."""
    deeper = [field for field in told if field.startswith((f"{at}.", f"{at}["))] if at else [*told]
    if at and (not deeper or value is None):
        yield from deeper or [at]  # null: the table has its fields
    elif isinstance(value, list):
        for item in value:
            yield from fields(item, told, f"{at}[]")
    else:
        dot = "." if at else ""
        are_names = any(field.startswith(f"{at}{dot}NAME") for field in deeper)
        for key, item in value.items():
            yield from fields(item, told, at + dot + ("NAME" if are_names else key))


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """What one command prints with `--json`."""

    def command(*arguments: Any) -> Any:
        monkeypatch.setattr(sys, "argv", ["dflash-trt", *map(str, arguments), "--json"])
        with pytest.raises(SystemExit) as end:
            main()
        captured = capsys.readouterr()
        assert not end.value.code, captured.err
        return json.loads(captured.out)

    return command


def test_the_table_has_every_command_that_prints_json() -> None:
    import typer.main

    from dflash_trt.cli.app import app

    group: Any = typer.main.get_command(app)
    printing = {
        name
        for name, command in group.commands.items()
        if any("--json" in option.opts for option in command.params)
    }
    assert set(TABLE) == printing | {"verify --certificate"}


def test_fields_of_every_command(
    run: Callable[..., Any], pair: TinyPair, engine: TinyEngine, tmp_path: Path
) -> None:
    folder, prompts = engine.directory.path, tmp_path / "prompts.txt"
    prompts.write_text("one\n")
    short = ("--max-tokens", 4, "--threads", 1)
    verify = ("verify", folder, "--prompts", prompts, *short)
    made = {
        "build": run("build", "--target", pair.target_dir, "--drafter", pair.drafter_dir,
                     "--max-seq-len", 64, "-o", tmp_path / "e"),
        "generate": run("generate", folder, "-p", "x", "--logprobs", 2, "--ignore-eos", *short),
        "inspect": run("inspect", folder) | dict.fromkeys(GPU_ONLY),
        "verify": run(*verify),
        "verify --certificate": run(*verify, "--certificate", tmp_path / "c.json"),
        "doctor": run("doctor"),
        "draft-vocab": run("draft-vocab", prompts, "--target", pair.target_dir, "--size", 9,
                           "-o", tmp_path / "ids.json"),
    }  # fmt: skip
    assert json.loads((tmp_path / "c.json").read_text()) == made["verify --certificate"]
    # What is empty when all is well, or on a machine without a GPU.
    report = Report(2, exact=False, mismatches=[Mismatch(0, 1, 2, 3, 0.5)])
    made["verify"]["mismatches"] = report.to_json()["mismatches"]
    made["doctor"]["gpus"] = [asdict(Gpu("one", (9, 0), 1))]
    made["doctor"]["extras"] = {"serve": ["uvicorn"]}
    made["build"]["warnings"] = made["build"]["warnings"] or ["odd"]
    made["generate"]["accepted_per_position"] = [0.5]
    for command, figures in made.items():
        plain = json.loads(json.dumps(figures))
        assert set(fields(plain, TABLE[command])) == TABLE[command], command


def test_fields_of_an_engine_for_a_gpu(engine: TinyEngine, tmp_path: Path) -> None:
    folder = hollow_directory(engine.facts, tmp_path / "engine").path
    place = {"location": "device", "is_shape": False}
    tensors = [
        {"name": name, "mode": mode, **place} for name, mode in (("x", "input"), ("y", "output"))
    ]
    kernels = [{"type": "gemm", "constants": ["BF16"]}]
    layers = {"engines": 1, "tensors": [*tensors], "layers": kernels}
    (folder / "layers.json").write_text(json.dumps(layers))
    sign(folder, "layers.json")
    profile = {"name": "decode", "dims": {"slots": [1, 2, 3]}}
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest |= {"network": {"layers": 1, "sha256": "ab", "profiles": [profile]}, "warnings": []}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    figures = describe(open_engine(folder))
    figures["tensorrt"]["step"]["on_host"] = ["z"]
    assert set(fields(figures, TABLE["inspect"])) == TABLE["inspect"]


def test_fields_of_step_costs(engine: TinyEngine) -> None:
    Engine.load(engine.directory.path, num_threads=1).auto_width(1, 0.01)
    stored = json.loads((engine.directory.path / "step_costs.json").read_text())
    told = TEXT.partition("**`step_costs.json`**")[2]
    assert set(stored) == {"key", "costs"}
    for name in ("key", *stored["key"], *(f"costs.{name}" for name in stored["costs"])):
        assert f"`{name}" in told
    assert len(stored["costs"]["seconds"]) == len(stored["costs"]["widths"])
    assert len(stored["costs"]["seconds"][0]) == len(stored["costs"]["slots"])
