"""What the scripts here share: arguments are looked at before work starts, faults are one line."""

from __future__ import annotations

import argparse
import fcntl
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from shards import ORIGIN, PREFIX, shard_files

from dflash_trt.checkpoint.drafter import MAX_BLOCK
from dflash_trt.errors import DFlashError

TARGET = "target"
"""What `--init` says for a start from the target's own layers."""


def run(main: Callable[[], None]) -> None:
    """Run a script; what a user can cause is said in one line, with code 2."""
    try:
        main()
    except DFlashError as error:
        fail(f"{error.message}" + (f" ({error.hint})" if error.hint else ""))
    except OSError as error:
        fail(f"{error.filename}: {error.strerror}" if error.filename else str(error))
    except KeyboardInterrupt:
        sys.exit(130)


def fail(message: str) -> NoReturn:
    """End with a line."""
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Keep a second run out of a folder, for as long as this process and block last."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fail(f"another run is at work in {folder}")
        yield
    finally:
        os.close(handle)


def existing_file(text: str) -> Path:
    """The type of an argument that names a file to read."""
    if not Path(text).is_file():
        raise argparse.ArgumentTypeError(f"there is no file {text}")
    return Path(text)


def output_file(text: str) -> Path:
    """The type of an argument that names a file to write, maybe hours later."""
    if not Path(text).absolute().parent.is_dir() or Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"{text} cannot be written")
    return Path(text)


def texts_folder(text: str) -> Path:
    """The type of an argument that names what responses.py wrote."""
    folder = Path(text)
    if not all((folder / name).is_file() for name in (ORIGIN, PREFIX)) or not shard_files(folder):
        raise argparse.ArgumentTypeError(
            f"{text} has no texts, or no {ORIGIN}: run responses.py first"
        )
    return folder


def start(text: str) -> str:
    """The type of what training starts from: the word target, or a drafter's folder."""
    if text != TARGET and not (Path(text) / "model.safetensors").is_file():
        raise argparse.ArgumentTypeError(f"{text} is neither target nor a drafter's folder")
    return text


def named_engine(text: str) -> tuple[str, Path]:
    """The type of an argument NAME=DIR."""
    name, _, folder = text.partition("=")
    if not name or not (Path(folder) / "config.json").is_file():
        raise argparse.ArgumentTypeError(f"{text} is not NAME=DIR with an engine directory")
    return name, Path(folder)


def positive(text: str) -> int:
    """The type of a count."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is no whole number of at least 1")
    return int(text)


def features(text: str) -> int | tuple[int, ...]:
    """The type of context features: how many, or of which layers, with a comma even behind one."""
    if "," not in text:
        return positive(text)
    names = text.removesuffix(",").split(",")
    if not all(name.isdecimal() for name in names):
        raise argparse.ArgumentTypeError(f"{text} is neither a number nor layers like 1,14,27")
    return tuple(map(int, names))


def block(text: str) -> int:
    """The type of a block size: at least an anchor and a draft."""
    size = positive(text)
    if not 2 <= size <= MAX_BLOCK:
        raise argparse.ArgumentTypeError(f"a block has 2 to {MAX_BLOCK} rows")
    return size


def rate(text: str) -> float:
    """The type of a learning rate."""
    return _number(text, "a learning rate, above 0 and below 1", lambda value: 0 < value < 1)


def share(text: str) -> float:
    """The type of a part of something."""
    return _number(text, "a share, 0 to 1", lambda value: 0 <= value <= 1)


def minutes(text: str) -> float:
    """The type of a time."""
    return _number(text, "a time in minutes", lambda value: 0 < value < float("inf"))


def _number(text: str, what: str, fits: Callable[[float], bool]) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not fits(value):  # a NaN fits nothing
        raise argparse.ArgumentTypeError(f"{text} is not {what}")
    return value
