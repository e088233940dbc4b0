"""Tiny random pairs as real checkpoints, engines built from them, and independent references."""

from collections.abc import Callable

from tiny.builds import TinyEngine, build_engine, sign
from tiny.models import TinyPair, save_drafter, save_pair, save_target, train_drafter
from tiny.probe import Probe
from tiny.reference import (
    DFlashRun,
    close,
    dflash_run,
    draft_choice,
    draft_states,
    greedy,
    greedy_rows,
    target_states,
)
from tiny.sessions import Guarded, Recording, Scripted

# What the fixtures of the same names give.
PairMaker = Callable[..., TinyPair]
EngineMaker = Callable[..., TinyEngine]
ProbeMaker = Callable[..., Probe]
Run = Callable[..., tuple[int, str, str]]

__all__ = [
    "DFlashRun",
    "EngineMaker",
    "Guarded",
    "PairMaker",
    "Probe",
    "ProbeMaker",
    "Recording",
    "Run",
    "Scripted",
    "TinyEngine",
    "TinyPair",
    "build_engine",
    "close",
    "dflash_run",
    "draft_choice",
    "draft_states",
    "greedy",
    "greedy_rows",
    "save_drafter",
    "save_pair",
    "save_target",
    "sign",
    "target_states",
    "train_drafter",
]
