"""What the scripts here share: arguments that are looked at first, and faults in one line."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn


def run(main: Callable[[], int | None]) -> NoReturn:
    """End the process with what `main` returns; a fault is one line, its hint, and a code."""
    from dflash_trt.errors import DFlashError, GraphError

    try:
        sys.exit(main())
    except GraphError:
        raise  # a bug of ours: show where
    except DFlashError as error:
        fail(error.message, error.hint, error.EXIT_CODE)
    except ModuleNotFoundError as error:
        fail(f"the package {error.name} is not installed", "bench/README.md says what is needed")
    except BrokenPipeError:  # `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(141)
    except OSError as error:
        name = f"{error.filename}: " if error.filename else ""
        fail(f"{name}{error.strerror or error}")
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)


def fail(message: str, hint: str = "", code: int = 2) -> NoReturn:
    """Say what is wrong, as `dflash-trt` does, and end."""
    print(f"error: {message}" + (f"\n\nhint: {hint}" if hint else ""), file=sys.stderr)
    sys.exit(code)


def engine_folder(text: str) -> Path:
    """The type of an argument that names an engine directory."""
    path = Path(text)
    if not os.path.isfile(path / "config.json"):  # never raises: a name may be too long
        raise argparse.ArgumentTypeError(f"{text} is no engine directory: it has no config.json")
    return path


def named_engine(text: str) -> tuple[str, Path]:
    """The type of an argument NAME=DIR."""
    name, equals, folder = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=DIR")
    return name, engine_folder(folder)


def output_file(text: str) -> Path:
    """The type of an argument that names a file to write, hours later."""
    path = Path(text)
    parent = path.absolute().parent
    if not os.path.isdir(parent) or not os.access(parent, os.W_OK) or os.path.isdir(path):
        raise argparse.ArgumentTypeError(f"{text} cannot be written")
    return path


def width(text: str) -> str:
    """The type of an argument that is a verify width, or auto."""
    from dflash_trt.decode.width import parse_width
    from dflash_trt.errors import ConfigError

    try:
        parse_width(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(error.message) from error
    return text


def count(text: str) -> int:
    """The type of an argument that is a whole number from 1."""
    if not text.isdecimal() or not 1 <= int(text) < 1 << 31:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1")
    return int(text)
