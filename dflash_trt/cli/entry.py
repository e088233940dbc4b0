"""The entry point: imports the rest late, so that Ctrl-C while loading is no traceback."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line."""
    try:
        from dflash_trt.cli.app import main as run
    except KeyboardInterrupt:
        sys.exit(130)
    run()
