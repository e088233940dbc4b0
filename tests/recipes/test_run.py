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
import vocabulary
from origin import Origin
from scripts import Script, Source, read_scripts, write_scripts
from shards import PREFIX, shard_files, write_file


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> dict[str, Namespace]:
    """What each script gets, in order; files stand for its work."""
    given: dict[str, Namespace] = {}

    def call(command: list[str]) -> int:
        modules = {m.__name__: m for m in (scripts, responses, train, vocabulary)}
        module = modules[Path(command[1]).stem]
        monkeypatch.setattr(sys, "argv", command[1:])
        args = given[module.__name__] = module.arguments()
        if module is train:
            args.output.mkdir(exist_ok=True)
        if module is scripts:
            rows = [Script(i, (), True, 0.0) for i in range(args.count)]
            write_scripts(args.output, Source(args.target, args.seed), rows)
        if module is responses:
            source, _ = read_scripts(args.scripts)
            if not shard_files(args.output):
                Origin(source.target, args.features, source.seed).keep(args.output)
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
        "--lr", 1e-4, "--workers", 3, "--threads", 3, "--slots", 7,
    )  # fmt: skip
    assert list(told) == ["scripts", "responses", "train", "vocabulary"]
    assert told["vocabulary"].data == told["responses"].output
    assert told["vocabulary"].output == told["train"].output / "draft_vocab.json"
    assert (told["scripts"].target, told["scripts"].seed) == (str(target_folder), 3)
    assert told["responses"].scripts == told["scripts"].output
    assert told["responses"].features == (0, 2)
    trained = told["train"]
    assert trained.data == told["responses"].output
    assert (trained.widths, trained.block, trained.layers, trained.lr) == ([6, 3], 6, 2, 1e-4)
    assert (trained.mask_token, trained.seed, trained.init) == ("5", 3, "target")
    for args in (told["responses"], trained):
        assert (args.workers, args.threads) == (3, 3)
    assert told["responses"].slots == 7
    assert told["scripts"].count == 20 * run.SCRIPTS_A_MINUTE
    assert trained.features == (0, 2)
    assert 8 < told["responses"].minutes <= 9
    assert 19 < trained.minutes <= 20  # here the responses took no time


def test_defaults_are_each_scripts_own(
    told: dict[str, Namespace], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_with(monkeypatch, "-o", tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py", str(tmp_path / "data"), "-o", "x"])
    alone = vars(train.arguments())
    apart = {"output", "minutes", "data", "features"}
    assert vars(told["train"]) | dict.fromkeys(apart) == alone | dict.fromkeys(apart)


def test_a_drafter_to_start_from_says_which_features(
    told: dict[str, Namespace], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    demo = Path(__file__).parents[2] / "demo-drafter"
    run_with(monkeypatch, "-o", tmp_path / "all", "--init", demo)
    assert told["responses"].features == told["train"].features == (1, 8, 14, 20, 27)
    run_with(monkeypatch, "-o", tmp_path / "some", "--init", demo, "--features", "1,27")
    assert told["responses"].features == told["train"].features == (1, 27)


def test_a_second_call_goes_on(
    told: dict[str, Namespace], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_with(monkeypatch, "-o", tmp_path, "--features", "1,27", "--count", 50)
    told.clear()
    run_with(monkeypatch, "-o", tmp_path, "--count", 50)
    assert list(told) == ["responses", "train", "vocabulary"]
    assert told["train"].features == (1, 27)
    told.clear()
    run_with(monkeypatch, "-o", tmp_path, "--count", 60)
    assert told["scripts"].count == 60
    with pytest.raises(SystemExit):
        run_with(monkeypatch, "-o", tmp_path, "--features", "1,8")


def test_a_script_that_fails_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "call", lambda _: 3)
    with pytest.raises(SystemExit) as ended:
        run_with(monkeypatch, "-o", tmp_path)
    assert ended.value.code == 3
