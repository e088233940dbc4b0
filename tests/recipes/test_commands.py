"""Every script answers --help, and what is wrong with its arguments in one line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

RECIPE = Path(__file__).parents[2] / "recipes/train-drafter"
SCRIPTS = ("run.py", "scripts.py", "responses.py", "train.py", "measure.py", "plot.py")


def call(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], cwd=RECIPE, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("script", SCRIPTS)
def test_help(script: str) -> None:
    shown = call(script, "--help")
    assert shown.returncode == 0, shown.stderr
    assert "usage" in shown.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("responses.py", "nowhere.jsonl", "-o", "x"), "there is no file nowhere.jsonl"),
        (("train.py", "nowhere", "-o", "x"), "run responses.py first"),
        (("run.py", "-o", "x", "--minutes", "nan"), "nan is no time in minutes"),
        (("run.py", "-o", "x", "--minutes", "0"), "0 is no time in minutes"),
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
def test_bad_arguments_are_one_line(arguments: tuple[str, ...], said: str) -> None:
    shown = call(*arguments)
    assert shown.returncode == 2
    assert said in shown.stderr.splitlines()[-1]
    assert "Traceback" not in shown.stderr
    assert not (RECIPE / "x").exists()
