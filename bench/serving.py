"""What serving costs and what it stands: a real server beside the same engine in this process.

    python bench/serving.py overhead ENGINE  # throughput and first token, server and in-process
    python bench/serving.py overload ENGINE  # 1,000 clients at once against a queue of 64
    python bench/serving.py leave ENGINE     # 2,000 clients that go away, a steady one beside them

The server is `dflash-trt serve` of the environment that `make test` makes (.venv/triton).
"""

from __future__ import annotations

import argparse
import importlib

import script

KINDS = ("overhead", "overload", "leave")


def main() -> None:
    """Parse and run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("what", choices=KINDS)
    parser.add_argument("engine", type=script.engine_folder)
    parser.add_argument("--threads", type=script.count, default=1, help="of the engine")
    options = parser.parse_args()
    measures = importlib.import_module("serving_measures")  # needs what --help does not
    getattr(measures, options.what)(options.engine, options.threads)


if __name__ == "__main__":
    script.run(main)
