"""Every script answers --help, and what is wrong with its arguments in one line."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import command
import pytest

RECIPE = Path(__file__).parents[2] / "recipes/train-drafter"
SCRIPTS = ("run.py", "scripts.py", "responses.py", "train.py", "measure.py", "plot.py")


@pytest.mark.parametrize("script", SCRIPTS)
def test_help(script: str) -> None:
    shown = subprocess.run(
        [sys.executable, script, "--help"], cwd=RECIPE, capture_output=True, text=True, check=False
    )
    assert shown.returncode == 0, shown.stderr
    assert "usage" in shown.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("responses.py", "nowhere.jsonl", "-o", "x"), "there is no file nowhere.jsonl"),
        (("train.py", "nowhere", "-o", "x"), "run responses.py first"),
        (("run.py", "-o", "x", "--minutes", "nan"), "nan is not a time in minutes"),
        (("run.py", "-o", "x", "--minutes", "0"), "0 is not a time in minutes"),
        (("run.py", "-o", "x", "--lr", "nan"), "nan is not a learning rate"),
        (("run.py", "-o", "x", "--block", "2000"), "a block has 2 to 1024 rows"),
        (("run.py", "-o", "x", "--widths", "16"), "--widths 16 is above the block, 8"),
        (("run.py", "-o", "x", "--layers", "31"), "--layers 31: target has 30"),
        (("scripts.py", "-o", "x", "--code", "nan"), "nan is not a share, 0 to 1"),
        (("run.py", "-o", "x", "--minutes", "1"), "too short on a CPU"),
        (("run.py", "-o", "x", "--init", "nowhere"), "neither target nor a drafter's folder"),
        (("run.py", "-o", "x", "--target", "nowhere"), "nowhere: no such file or folder"),
        (("run.py", "-o", "x", "--features", "1,a"), "neither a number nor layers"),
        (("run.py", "-o", "x", "--features", "1,29"), "must ascend and be of 0 to 28"),
        (("scripts.py", "-o", "no/where"), "no/where cannot be written"),
        (("scripts.py", "-o", "x", "--count", "-3"), "-3 is no whole number"),
        (("measure.py", "one=nowhere", "-o", "x"), "one=nowhere is not NAME=DIR"),
        (("plot.py", "nowhere.json", "-o", "x"), "there is no file nowhere.json"),
    ],
)
def test_bad_arguments_are_one_line(
    arguments: tuple[str, ...], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", list(arguments))
    module = importlib.import_module(arguments[0].removesuffix(".py"))
    with pytest.raises(SystemExit) as ended:
        command.run(module.main)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err.splitlines()[-1]
    assert not list(tmp_path.iterdir())
