"""The entry point: imports the rest late, so that a broken library or Ctrl-C is no traceback.

`doctor` gets a command line of its own: it must work where what the other verbs import does not.
"""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line."""
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
