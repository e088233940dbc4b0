"""The command line: `dflash-trt VERB`. One file per verb: parse, one library call, print."""

from __future__ import annotations

import sys


def main() -> None:
    """Entry point: imports late, so that Ctrl-C while loading is no traceback."""
    try:
        from dflash_trt.cli.app import main as run
    except KeyboardInterrupt:
        sys.exit(130)
    run()


__all__ = ["main"]
