"""run.py: what it tells each of the scripts, as these understand it."""

from __future__ import annotations

import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import responses
import run
import scripts
import torch
import train
from scripts import Source, write_scripts
from shards import PREFIX, write_file


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> dict[str, Namespace]:
    """What each script gets, in order; files stand for its work."""
    given: dict[str, Namespace] = {}

    def call(command: list[str]) -> int:
        module = {"scripts": scripts, "responses": responses, "train": train}[Path(command[1]).stem]
        monkeypatch.setattr(sys, "argv", command[1:])
        args = given[module.__name__] = module.arguments()
        if module is scripts:
            write_scripts(args.output, Source(args.target, args.seed), [])
        if module is responses:
            write_file(args.output / PREFIX, {"tokens": torch.zeros(1)})
            (args.output / "shard-00-000000-000001.safetensors").touch()
        return 0

    monkeypatch.setattr(subprocess, "call", call)
    return given


def run_with(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["run.py", *map(str, arguments)])
    run.main()


def test_options_reach_the_script_that_has_them(
    told: dict[str, Namespace], target_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_with(
        monkeypatch, "-o", tmp_path, "--target", target_folder, "--minutes", 20, "--seed", 3,
        "--mask-token", 5, "--features", "0,2", "--widths", 6, 3, "--block", 6, "--layers", 2,
        "--lr", 1e-4, "--workers", 3, "--threads", 3,
    )  # fmt: skip
    assert list(told) == ["scripts", "responses", "train"]
    assert (told["scripts"].target, told["scripts"].seed) == (str(target_folder), 3)
    assert told["responses"].scripts == told["scripts"].output
    assert told["responses"].features == (0, 2)
    trained = told["train"]
    assert trained.data == told["responses"].output
    assert (trained.widths, trained.block, trained.layers, trained.lr) == ([6, 3], 6, 2, 1e-4)
    assert (trained.mask_token, trained.seed, trained.init) == ("5", 3, "target")
    for args in (told["responses"], trained):
        assert (args.workers, args.threads) == (3, 3)
    assert 8 < told["responses"].minutes <= 9
    assert 19 < trained.minutes <= 20  # here the responses took no time


def test_defaults_are_each_scripts_own(
    told: dict[str, Namespace], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_with(monkeypatch, "-o", tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py", str(tmp_path / "data"), "-o", "x"])
    alone = vars(train.arguments())
    apart = {"output", "minutes", "data", "init"}
    assert vars(told["train"]) | dict.fromkeys(apart) == alone | dict.fromkeys(apart)


def test_a_script_that_fails_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "call", lambda _: 3)
    with pytest.raises(SystemExit) as ended:
        run_with(monkeypatch, "-o", tmp_path)
    assert ended.value.code == 3
