"""Fixtures of all tests: tiny pairs and engines, made once and shared."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_trt.cli import main
from skips import pytest_make_collect_report, pytest_runtest_makereport
from tiny import (
    EngineMaker,
    PairMaker,
    Probe,
    ProbeMaker,
    Run,
    TinyEngine,
    TinyPair,
    build_engine,
    greedy_rows,
    save_pair,
    train_drafter,
)

__all__ = ["pytest_make_collect_report", "pytest_runtest_makereport"]  # hooks: pytest finds them

torch.set_num_threads(1)


def _key(*values: Any) -> str:
    return json.dumps(values, sort_keys=True, default=str)


@pytest.fixture(scope="session")
def make_pair(tmp_path_factory: pytest.TempPathFactory) -> PairMaker:
    """`save_pair`, once per set of options."""
    made: dict[str, TinyPair] = {}

    def make(family: str = "qwen3", **options: Any) -> TinyPair:
        key = _key(family, options)
        if key not in made:
            made[key] = save_pair(tmp_path_factory.mktemp("pair"), family, **options)
        return made[key]

    return make


@pytest.fixture(scope="session")
def make_engine(tmp_path_factory: pytest.TempPathFactory) -> EngineMaker:
    """`build_engine`, once per pair and choices; give sessions to requests, not engines."""
    made: dict[str, TinyEngine] = {}

    def make(pair: TinyPair, **choices: Any) -> TinyEngine:
        key = _key(pair.target_dir, pair.drafter_dir, choices)
        if key not in made:
            made[key] = build_engine(pair, tmp_path_factory.mktemp("engine") / "tiny", **choices)
        return made[key]

    return make


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Exit code, standard output and standard error of one command."""

    def command(*arguments: Any) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["dflash-trt", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            main()
        captured = capsys.readouterr()
        return int(end.value.code or 0), captured.out, captured.err

    return command


@pytest.fixture
def interruptible() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt, also in a run that a shell's `&` made deaf to it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def make_probe(tmp_path: Path) -> ProbeMaker:
    """A probe of a pair, in this test's own folder."""

    def make(pair: TinyPair, **options: Any) -> Probe:
        return Probe(pair, tmp_path / f"probe{len(list(tmp_path.iterdir()))}", **options)

    return make


@pytest.fixture(scope="session")
def pair(make_pair: PairMaker) -> TinyPair:
    """A random pair: its drafts are nearly always wrong."""
    return make_pair()


@pytest.fixture(scope="session")
def engine(pair: TinyPair, make_engine: EngineMaker) -> TinyEngine:
    """The engine of `pair`: block 4, 3 slots, 96 tokens, chunks of 8."""
    return make_engine(pair)


@pytest.fixture(scope="session")
def trained_pair(make_pair: PairMaker) -> TinyPair:
    """A pair whose drafter was trained a little: it drafts several right tokens, and wrong ones."""
    return _trained(make_pair(seed=40, block=6), steps=250)


@pytest.fixture(scope="session")
def dflash2_pair(make_pair: PairMaker) -> TinyPair:
    """The same of DFlash 2, its selector trained too."""
    return _trained(make_pair(seed=40, block=6, dflash2={}), steps=400)


def _trained(made: TinyPair, steps: int) -> TinyPair:
    generator = torch.Generator().manual_seed(3)
    prompts = torch.randint(0, 150, (24, 12), generator=generator)
    outputs = torch.tensor(greedy_rows(made.target, prompts.tolist(), 60))
    train_drafter(made, torch.cat([prompts, outputs], dim=1), prompt=12, steps=steps)
    return made


@pytest.fixture(scope="session")
def trained_engine(trained_pair: TinyPair, make_engine: EngineMaker) -> TinyEngine:
    """The engine of `trained_pair`: block 6."""
    return make_engine(trained_pair)


@pytest.fixture(scope="session")
def dflash2_engine(dflash2_pair: TinyPair, make_engine: EngineMaker) -> TinyEngine:
    """The engine of `dflash2_pair`: block 6."""
    return make_engine(dflash2_pair)


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    """Prompts of many lengths; the first 24 are those that `trained_pair` was trained on."""
    generator = torch.Generator().manual_seed(3)
    known = torch.randint(0, 150, (24, 12), generator=generator).tolist()
    lengths = [1, 2, 3, 5, 8, 9, 17, 30]
    new = [torch.randint(0, 150, (n,), generator=generator).tolist() for n in lengths]
    return [*known, *new]
