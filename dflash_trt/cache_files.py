"""Where TensorRT's timing and runtime caches lie: in the user's cache folder, one file per key."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dflash_trt import swap

FOLDER = "dflash-trt"
_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class CacheKey:
    """What a cache is valid for. Two keys never share a file: every part is in its name.

    `sha256` is that of the engine file for a runtime cache, of the network for a timing cache;
    `device` names the GPU (`sm120`, or a UUID).
    """

    kind: Literal["timing", "runtime"]
    sha256: str
    device: str
    version: str  # TensorRT's

    def __post_init__(self) -> None:
        for part in (self.sha256, self.device, self.version):
            assert _PLAIN.fullmatch(part), f"{part!r} cannot be part of a file name"
        assert len(self.sha256) == 64

    @property
    def path(self) -> Path:
        """The file, which may not exist."""
        return cache_home() / self.kind / self.version / self.device / f"{self.sha256}.cache"


def cache_home() -> Path:
    """The user's cache folder by the XDG rules: a relative XDG_CACHE_HOME does not count."""
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (named if named.is_absolute() else Path.home() / ".cache") / FOLDER


def read_cache(path: Path) -> bytes:
    """The bytes of a cache; none where there is no file or it cannot be read."""
    try:
        return path.read_bytes()
    except OSError:
        return b""


def write_cache(path: Path, content: bytes) -> bool:
    """Replace a cache in one step; False where the folder cannot be written: no harm."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        swap.write_file(path, content, mode=0o600)
    except OSError:
        return False
    return True
