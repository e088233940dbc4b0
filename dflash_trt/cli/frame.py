"""The command line's frame: runs a verb, and says what an error looks like."""

from __future__ import annotations

import io
import os
import signal
import sys
from typing import TextIO

import typer
from typer.exceptions import TyperException

from dflash_trt.errors import DFlashError, GraphError

REFUSED = DFlashError.EXIT_CODE
INTERRUPTED = 128 + signal.SIGINT
BROKEN_PIPE = 128 + signal.SIGPIPE  # what a shell says of a program that wrote to nobody


def run(app: typer.Typer) -> None:
    """Run a command line and end the process. README.md says what the exit codes mean."""
    streams = (sys.stdout, sys.stderr)  # the library puts wrappers in their place when a pipe ends
    for stream in streams:
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal may lack a character
    try:
        code = _code_of(app)
    except BrokenPipeError:  # the reader went away (`| head`): there is nobody to tell
        code = BROKEN_PIPE
    except OSError:  # standard error cannot be written
        code = REFUSED
    for stream in streams:
        _empty(stream)
    sys.exit(code)


def _code_of(app: typer.Typer) -> int:
    """Run a command line, and say in one line what went wrong; the exit code."""
    try:
        code = app(standalone_mode=False)
        sys.stdout.flush()
    except GraphError:
        raise  # never the user's fault: show where
    except DFlashError as error:
        return _failed(error.message, error.hint, error.EXIT_CODE)
    except TyperException as error:  # a flag that does not exist or cannot be read
        message = error.format_message() if hasattr(error, "format_message") else str(error)
        return _failed(" ".join(message.split()), "dflash-trt COMMAND --help lists the options")
    except (typer.Abort, KeyboardInterrupt):
        code = INTERRUPTED
    except SystemExit as end:
        # The libraries that print make a broken pipe an exit of their own, with the code of a bug.
        if isinstance(end.__context__, BrokenPipeError):
            raise end.__context__ from None
        raise
    except BrokenPipeError:
        raise
    except OSError as error:
        name = f"{error.filename}: " if error.filename else ""
        return _failed(f"{name}{error.strerror or error}")
    if code == INTERRUPTED:
        print("interrupted", file=sys.stderr)
    return code if isinstance(code, int) else 0


def _failed(message: str, hint: str = "", code: int = REFUSED) -> int:
    print(f"error: {message}", file=sys.stderr)
    if hint:
        print(f"\nhint: {hint}", file=sys.stderr)
    return code


def _empty(stream: TextIO) -> None:
    """Write what a stream still holds; if it cannot be, Python shall not try again at its end."""
    try:
        stream.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
