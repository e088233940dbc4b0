"""Engines of tiny pairs, built by the real pipeline into a folder."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_trt.build.pipeline import build, plan
from dflash_trt.config import PairConfig
from dflash_trt.decode.engine import Engine, Generation
from dflash_trt.decode.request import SamplingParams
from dflash_trt.decode.scheduler import Scheduler
from dflash_trt.engine_dir import EngineDir
from dflash_trt.runtime.open import limits_of
from dflash_trt.runtime.ort import OrtSession
from dflash_trt.runtime.session import Session, SessionLimits
from dflash_trt.text import Tokenizer
from tiny.models import TinyPair

CHOICES: dict[str, Any] = {"max_seq_len": 96, "max_slots": 3, "prefill_chunk": 8}


@dataclass(frozen=True)
class TinyEngine:
    """A built engine directory; sessions of it run on one thread."""

    pair: TinyPair
    directory: EngineDir
    tokenizer: Tokenizer

    @property
    def facts(self) -> PairConfig:
        """What was read from the two checkpoints."""
        return self.directory.config.pair

    def limits(self, **changes: Any) -> SessionLimits:
        """The engine's limits; `changes` may shrink chunks, slots or lengths."""
        return dataclasses.replace(limits_of(self.directory.config), **changes)

    def session(self, kind: type[OrtSession] = OrtSession, **changes: Any) -> OrtSession:
        """A fresh session with caches of its own."""
        return kind(self.directory.model, self.facts, self.limits(**changes), num_threads=1)

    def engine(self, session: Session | None = None, eos: Sequence[int] = ()) -> Engine:
        """An engine around `session` (default: a fresh one) that stops at `eos` ids only."""
        return Engine(session or self.session(), self.tokenizer, eos)

    def generate(
        self, prompt: Sequence[int], max_tokens: int | None, *, session: Session | None = None,
        width: int | None = None, eos: Sequence[int] = (), **params: Any,
    ) -> Generation:  # fmt: skip
        """One request, alone."""
        wanted = SamplingParams(max_tokens=max_tokens, **params)
        return self.engine(session, eos).generate(list(prompt), wanted, width=width)

    def scheduler(
        self, session: Session | None = None, width: int | None = None, eos: Sequence[int] = ()
    ) -> Scheduler:
        """A scheduler around `session` (default: a fresh one)."""
        return self.engine(session, eos).scheduler(width)


def build_engine(pair: TinyPair, output: Path, **choices: Any) -> TinyEngine:
    """Plan and build as the command line does; missing choices are `CHOICES`."""
    planned = plan(str(pair.target_dir), str(pair.drafter_dir), {**CHOICES, **choices})
    directory = build(planned, output, force=False, progress=lambda stage, done, total: None)
    return TinyEngine(pair, directory, Tokenizer.load(directory.path))


def sign(folder: Path, name: str) -> None:
    """Make the manifest of an engine directory agree with a file as it is now."""
    manifest = json.loads((folder / "manifest.json").read_text())
    content = (folder / name).read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    manifest["files"][name] = {"bytes": len(content), "sha256": digest}
    (folder / "manifest.json").write_text(json.dumps(manifest))
