"""Step costs kept in the engine directory: a second start measures nothing."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dflash_trt import swap
from dflash_trt.decode.engine import Engine
from dflash_trt.decode.request import SamplingParams
from dflash_trt.decode.stored_costs import STORED_AS
from dflash_trt.engine_dir import open_engine
from tiny import Recording, TinyEngine


def load(folder: Path, threads: int = 1) -> tuple[Engine, Recording]:
    engine = Engine.load(folder, threads)
    engine.session = Recording(engine.session)
    return engine, engine.session


def measures(folder: Path, slots: int | None = None, threads: int = 1) -> bool:
    """Whether a start runs steps to measure them."""
    engine, session = load(folder, threads)
    costs = engine.auto_width(slots, budget_s=0.2).costs
    assert costs.seconds(1, 1) > 0
    return bool(session.steps)


@pytest.fixture
def folder(engine: TinyEngine, tmp_path: Path) -> Path:
    """The engine as it was built: another test may have measured it."""
    fresh = shutil.ignore_patterns("step_costs.json")
    return shutil.copytree(engine.directory.path, tmp_path / "engine", ignore=fresh)


def test_the_second_start_takes_the_first_ones_table(folder: Path) -> None:
    first = load(folder)[0].auto_width(budget_s=0.2).costs
    engine, session = load(folder)
    with engine.start() as loop:
        assert loop.submit([1, 2], SamplingParams(max_tokens=1)).result(60).token_ids
    assert engine.auto_width().costs.to_json() == first.to_json()
    assert all(step.rows.length[0] < 3 for step in session.steps), "a step that measured"
    open_engine(folder)
    assert sorted(path.name for path in folder.iterdir() if path.name.startswith(".")) == []


def _edit(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    def edit(file: Path) -> None:
        data = json.loads(file.read_text())
        change(data)
        file.write_text(json.dumps(data))

    return edit


@pytest.mark.parametrize(
    "damage",
    [
        lambda file: file.write_text(""),
        lambda file: file.write_text("[" * 100_000),
        lambda file: file.write_bytes(b"\xff\xfe"),
        lambda file: file.write_text("[1]"),
        lambda file: file.write_bytes(file.read_bytes()[:-40]),
        _edit(lambda data: data.pop("costs")),
        _edit(lambda data: data["costs"]["seconds"][0].pop()),
        _edit(lambda data: data["costs"]["seconds"][0].__setitem__(0, -1.0)),
        _edit(lambda data: data["costs"].__setitem__("widths", [1, 3])),
        _edit(lambda data: data["key"].__setitem__("processors", ["another"])),
        _edit(lambda data: data["key"]["backends"].__setitem__("onnxruntime", "0.1")),
        _edit(lambda data: data["costs"]["seconds"][0].__setitem__(0, 10**400)),
        _edit(lambda data: data["costs"]["seconds"][0].__setitem__(0, 1e308)),
        _edit(lambda data: data["costs"]["widths"].__setitem__(-1, 4.0)),
        _edit(lambda data: data["costs"]["slots"].__setitem__(-1, 1e999)),
        lambda file: (file.unlink(), file.symlink_to("/dev/zero")),
        lambda file: (file.unlink(), os.mkfifo(file)),
        lambda file: os.truncate(file, 1 << 40),
        lambda file: (file.unlink(), file.mkdir()),
    ],
)  # fmt: skip
def test_what_is_damaged_or_not_of_here_is_measured_again(
    damage: Callable[[Path], object], folder: Path
) -> None:
    assert measures(folder)
    assert not measures(folder)
    damage(folder / STORED_AS)
    assert measures(folder)
    assert measures(folder) == (folder / STORED_AS).is_dir()


def test_other_threads_and_more_slots_are_measured(folder: Path) -> None:
    assert measures(folder, slots=1)
    assert not measures(folder, slots=1)
    assert measures(folder, threads=2, slots=1)
    assert measures(folder, threads=2, slots=3)
    assert not measures(folder, threads=2, slots=2)


def test_a_folder_that_cannot_be_written_is_measured_each_time(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **kwargs: object) -> object:
        raise PermissionError(30, os.strerror(30))

    monkeypatch.setattr(swap.tempfile, "mkstemp", refuse)
    before = sorted(folder.iterdir())
    assert measures(folder)
    assert measures(folder)
    assert sorted(folder.iterdir()) == before


def test_a_fresh_table_can_be_asked_for(folder: Path) -> None:
    load(folder)[0].auto_width(budget_s=0.2)
    engine, session = load(folder)
    engine.auto_width(budget_s=0.2, fresh=True)
    assert session.steps
