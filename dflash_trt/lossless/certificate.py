"""The lossless certificate: greedy and seeded sampling, alone and side by side, as one report.

It names the engine, the prompts and the settings by hash, so that it can be kept with the engine
and compared with a later one.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dflash_trt import __version__, swap
from dflash_trt.decode.engine import Engine
from dflash_trt.decode.request import SamplingParams
from dflash_trt.engine_dir import MANIFEST, EngineDir, read_extra, sha256
from dflash_trt.errors import BuildError, ConfigError
from dflash_trt.lossless.verify import Report, compare, plain_outputs

FORMAT = "dflash-trt lossless certificate"
FORMAT_VERSION = 1
STORED_AS = "lossless.json"  # in the engine directory, beside the files that its manifest lists
_ANOTHER = "choose another --certificate"


@dataclass(frozen=True)
class Certificate:
    """What was checked and what came out."""

    settings: dict[str, Any]
    engine_sha256: str
    prompts_sha256: str
    num_prompts: int
    runs: dict[str, Report]  # "greedy alone", "greedy together", "sampled alone", ..

    @property
    def lossless(self) -> bool:
        """Whether every run gave the plain tokens."""
        return all(report.lossless for report in self.runs.values())

    def to_json(self) -> dict[str, Any]:
        """Plain types."""
        return {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "lossless": self.lossless,
            "engine_sha256": self.engine_sha256,
            "prompts_sha256": self.prompts_sha256,
            "num_prompts": self.num_prompts,
            "settings": self.settings,
            "dflash_trt": __version__,
            "machine": platform.machine(),
            "runs": {name: report.to_json() for name, report in self.runs.items()},
        }

    def write(self, file: Path) -> None:
        """Write the JSON at once or not at all. Raises `BuildError`: ask `check_place` before."""
        content = json.dumps(self.to_json(), indent=2) + "\n"
        try:
            swap.write_file(file, content.encode())
        except OSError as error:
            raise BuildError(
                f"{file} cannot be written: {error.strerror}", hint=_ANOTHER
            ) from error


def check_place(file: Path) -> None:
    """Refuse a place for a certificate where something else is, or nothing can be written.

    Raises `ConfigError`.
    """
    try:
        if os.path.lexists(file) and (read_extra(file) or {}).get("format") != FORMAT:
            raise ConfigError(
                f"{file} exists and is no lossless certificate: it is not replaced", hint=_ANOTHER
            )
        swap.try_to_write(file)
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error.strerror}", hint=_ANOTHER) from error


def certify(
    engine: Engine,
    directory: EngineDir,
    prompts: Sequence[Sequence[int]],
    greedy: SamplingParams,
    *,
    width: int,
    temperature: float,
    exact: bool = False,
    on_run: Callable[[str], None] = lambda name: None,
) -> Certificate:
    """Compare drafted with plain decoding of every prompt (token ids) in all four settings."""
    runs: dict[str, Report] = {}
    sampled = replace(greedy, temperature=temperature)
    for kind, params in (("greedy", greedy), ("sampled", sampled)):
        plain = plain_outputs(engine, prompts, params, width if exact else None)
        for together in (False, True):
            name = f"{kind} {'together' if together else 'alone'}"
            runs[name] = compare(
                engine, prompts, params, plain, width=width, exact=exact, together=together
            )
            on_run(name)
    ids = json.dumps([list(prompt) for prompt in prompts]).encode()
    return Certificate(
        settings={
            "width": width,
            "exact": exact,
            "max_tokens": greedy.max_tokens,
            "temperature": temperature,
            "seed": greedy.seed,
            "slots": engine.session.limits.max_slots,
        },
        engine_sha256=sha256(directory.path / MANIFEST),
        prompts_sha256=hashlib.sha256(ids).hexdigest(),
        num_prompts=len(prompts),
        runs=runs,
    )
