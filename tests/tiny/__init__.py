"""Tiny random pairs as real checkpoints, engines built from them, and independent references."""

from tiny.builds import TinyEngine, build_engine
from tiny.models import TinyPair, save_drafter, save_pair, save_target, train_drafter
from tiny.probe import Probe
from tiny.reference import (
    DFlashRun,
    dflash_run,
    draft_states,
    greedy,
    greedy_rows,
    target_states,
)
from tiny.sessions import Guarded, Recording, Scripted

__all__ = [
    "DFlashRun",
    "Guarded",
    "Probe",
    "Recording",
    "Scripted",
    "TinyEngine",
    "TinyPair",
    "build_engine",
    "dflash_run",
    "draft_states",
    "greedy",
    "greedy_rows",
    "save_drafter",
    "save_pair",
    "save_target",
    "target_states",
    "train_drafter",
]
