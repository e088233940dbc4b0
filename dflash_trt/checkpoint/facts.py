"""Typed look-ups in a checkpoint's metadata; every failure names the file and the key."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from dflash_trt.checkpoint.tensors import shown
from dflash_trt.errors import CheckpointError

MAX_JSON_BYTES = 100_000_000
MAX_LAYERS = 4096  # far above any model; keeps a corrupt count from filling the memory
MAX_SIZE = 2**31 - 1
NO_TOKEN = (-1, 2**32 - 1)  # what stands for "no such token", signed and unsigned
LFS_MAGIC = b"version https://git-lfs.github.com/spec/"


class Facts:
    """One object of metadata with the file it came from. JSON null counts as absent.

    `notes` collects what a reader should tell the user although it is no error.
    """

    def __init__(
        self, path: Path, data: Mapping[str, Any], where: str = "", notes: list[str] | None = None
    ) -> None:
        self.path = path
        self.data = data
        self.notes: list[str] = [] if notes is None else notes
        self._where = where

    def get(self, key: str) -> Any:
        """The value as stored, or None."""
        return self.data.get(key)

    def has(self, key: str) -> bool:
        """Whether the key is there and not null."""
        return self.data.get(key) is not None

    def integer(self, key: str, low: int = 1, high: int = MAX_SIZE) -> int:
        """A required whole number in low..high."""
        value = self._need(key)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            self.fail(key, f"is {brief(value)}, expected a whole number in {low}..{high}")
        return value

    def optional_integer(self, key: str, low: int = 0, high: int = MAX_SIZE) -> int | None:
        """A whole number in low..high, or None when absent."""
        return self.integer(key, low, high) if self.has(key) else None

    def token_id(self, key: str, vocab_size: int) -> int | None:
        """The id of a token, or None: absent, or a number that stands for none, which is noted."""
        value = self.get(key)
        if value in NO_TOKEN:
            self.note(f"{self._where}{shown(key)} is {value}, which is read as none")
            return None
        return self.optional_integer(key, high=vocab_size - 1)

    def number(self, key: str, low: float = 0.0) -> float:
        """A required finite number above `low`."""
        value = self._need(key)
        if not isinstance(value, int | float) or isinstance(value, bool):
            self.fail(key, f"is {brief(value)}, expected a number")
        if not (low < value < math.inf and value <= 1e300):
            self.fail(key, f"is {brief(value)}, expected a finite number above {low:g}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """A boolean; `default` is the documented default of the model's config class."""
        if not self.has(key):
            return default
        value = self.get(key)
        if not isinstance(value, bool):
            self.fail(key, f"is {brief(value)}, expected true or false")
        return value

    def text(self, key: str) -> str:
        """A required string."""
        value = self._need(key)
        if not isinstance(value, str):
            self.fail(key, f"is {brief(value)}, expected a string")
        return value

    def integers(self, key: str, high: int = MAX_SIZE) -> tuple[int, ...]:
        """A required non-empty list of whole numbers, each in 0..high."""
        value = self._need(key)
        good = isinstance(value, list) and all(
            isinstance(item, int) and not isinstance(item, bool) and 0 <= item <= high
            for item in value
        )
        if not good or not value:
            self.fail(key, f"is {brief(value)}, expected a list of whole numbers in 0..{high}")
        return tuple(value)

    def strings(self, key: str) -> tuple[str, ...]:
        """A required list of strings."""
        value = self._need(key)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            self.fail(key, f"is {brief(value)}, expected a list of strings")
        return tuple(value)

    def section(self, key: str) -> Facts:
        """A nested object; empty when absent."""
        value = self.data.get(key)
        if value is None:
            value = {}
        if not isinstance(value, dict):
            self.fail(key, f"is {brief(value)}, expected an object")
        return Facts(self.path, value, f"{self._where}{key}.", self.notes)

    def note(self, message: str) -> None:
        """Remember a remark for the user."""
        self.notes.append(f"{self.path}: {message}")

    def error(self, message: str, hint: str = "") -> CheckpointError:
        """A `CheckpointError` about this file."""
        return CheckpointError(f"{self.path}: {message}", hint)

    def fail(self, key: str, message: str, hint: str = "") -> NoReturn:
        """Raise `CheckpointError` about one key."""
        raise self.error(f"{self._where}{shown(key)} {message}", hint)

    def _need(self, key: str) -> Any:
        value = self.data.get(key)
        if value is None:
            self.fail(key, "is missing", "a fact about the model must come from its files")
        return value


def brief(value: object) -> str:
    """A value for an error message: one line, short, whatever it is."""
    try:
        text = ascii(value)
    except (ValueError, RecursionError):  # an int of 5000 digits, or nesting past the limit
        text = f"an unprintable {type(value).__name__}"
    return text if len(text) <= 80 else text[:77] + "..."


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`. Raises `CheckpointError` for anything else, in one line."""
    data = read_bytes(path)
    if data.startswith(LFS_MAGIC):
        raise lfs_pointer(path)
    value = parse_json(data, path, "file")
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def parse_json(data: bytes, path: Path, what: str) -> Any:
    """Parse strictly: UTF-8, no repeated keys, no NaN or Infinity."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            raise ValueError(f"key {shown(twice)} occurs twice")
        return result

    def refuse(text: str) -> NoReturn:
        raise ValueError(f"{text} is not JSON")

    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=unique, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        reason = str(error).splitlines()[0][:120]
        raise CheckpointError(
            f"{path}: {what} is not valid JSON: {reason}", "download the file again"
        ) from error


def lfs_pointer(path: Path) -> CheckpointError:
    """The error for a Git-LFS pointer in place of a file."""
    return CheckpointError(
        f"{path}: is a Git-LFS pointer, not the file itself",
        "run `git lfs pull` in that folder, or download the checkpoint again",
    )


def read_bytes(path: Path) -> bytes:
    """A whole file of metadata. Raises `CheckpointError` for what is none: a folder, a device."""
    try:
        if not os.path.isfile(path):
            what = "is not a file" if os.path.exists(path) else "no such file"
            raise CheckpointError(f"{shown(str(path))}: {what}")
        if path.stat().st_size > MAX_JSON_BYTES:
            raise CheckpointError(f"{path}: is larger than {MAX_JSON_BYTES} bytes, so not metadata")
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
