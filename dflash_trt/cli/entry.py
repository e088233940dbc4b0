"""The entry point: imports the rest late, so that a broken library or Ctrl-C is no traceback.

`doctor` gets a command line of its own: it must work where what the other verbs import does not.
"""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Run the command line."""
    _fill_closed_streams()
    try:
        if sys.argv[1:2] == ["doctor"]:
            from dflash_trt.cli.doctor import alone as app
        else:
            from dflash_trt.cli.app import app
        from dflash_trt.cli.frame import run
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:  # a library that is missing or broken may raise anything
        reason = " ".join(str(error).split())
        print(
            f"error: dflash-trt cannot be loaded: {type(error).__name__}: {reason}", file=sys.stderr
        )
        print("\nhint: dflash-trt doctor says what is missing or broken", file=sys.stderr)
        sys.exit(2)
    run(app)


def _fill_closed_streams() -> None:
    """Let a standard stream that is closed (`>&-`) be /dev/null.

    Python has None in its place. And its number is free: the next file that is opened would get it,
    and be written to by whatever prints.
    """
    if sys.stdin is None:  # stays None: who wants to read from it says that it is closed
        _open_null(os.O_RDONLY)
    if sys.stdout is None:
        sys.stdout = os.fdopen(_open_null(os.O_WRONLY), "w")
    if sys.stderr is None:
        sys.stderr = os.fdopen(_open_null(os.O_WRONLY), "w")


def _open_null(flags: int) -> int:
    """/dev/null at the lowest free number, for programs that are started too."""
    number = os.open(os.devnull, flags)
    os.set_inheritable(number, True)
    return number
