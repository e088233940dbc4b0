"""The command line's frame: runs a verb, and says what an error looks like."""

from __future__ import annotations

import io
import os
import sys
from typing import NoReturn

import typer
from typer.exceptions import TyperException

from dflash_trt.errors import DFlashError, GraphError


def run(app: typer.Typer) -> None:
    """Run a command line. Exit codes: 0 done, 1 check failed or a bug, 2 the user's input."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal may lack a character
    try:
        code = app(standalone_mode=False)
        sys.stdout.flush()
    except GraphError:
        raise  # never the user's fault: show where
    except DFlashError as error:
        _fail(error.message, error.hint)
    except TyperException as error:  # a flag that does not exist or cannot be read
        message = error.format_message() if hasattr(error, "format_message") else str(error)
        _fail(" ".join(message.split()), "dflash-trt COMMAND --help lists the options")
    except (typer.Abort, KeyboardInterrupt):
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        # The reader went away (`| head`): not an error of ours, but do not flush into it again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:
        name = f"{error.filename}: " if error.filename else ""
        _fail(f"{name}{error.strerror or error}")
    sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str, hint: str = "") -> NoReturn:
    print(f"error: {message}", file=sys.stderr)
    if hint:
        print(f"\nhint: {hint}", file=sys.stderr)
    sys.exit(2)
