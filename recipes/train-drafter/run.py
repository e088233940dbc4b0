"""Scripts, responses and training in one call, with the time shared out.

    python run.py -o out/train-drafter --minutes 12

The folder keeps everything, so a second call adds responses and trains again from the drafter that
the first one left. Its scripts stay what they are: another recipe needs another folder.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from command import fail, minutes, positive, run, start
from target import DEVICE, target_file

HERE = Path(__file__).parent
LEAST_MINUTES = 8
"""On two cores; in less, hardly a text ends before the responses' share of the time is over."""
RESPONSES = 0.45
"""Share of the time that goes into responses; the rest trains."""


def main() -> None:
    """Run the three scripts one after another."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, required=True, help="folder for all of it")
    parser.add_argument("--minutes", type=minutes, default=12)
    parser.add_argument(
        "--count", type=positive, default=100_000, help="scripts, more than time allows"
    )
    parser.add_argument("--recipe", default="smollm2-135m", help="whose target is drafted for")
    parser.add_argument(
        "--init", type=start, help="a drafter to start from; default: an earlier call's, or target"
    )
    args = parser.parse_args()
    if DEVICE == "cpu" and args.minutes < LEAST_MINUTES:
        fail(f"--minutes {args.minutes:g} is too short on a CPU, give at least {LEAST_MINUTES}")
    target_file(args.recipe)  # says what is wrong before any time is spent
    args.output.mkdir(parents=True, exist_ok=True)
    scripts, data, drafter = (args.output / name for name in ("scripts.jsonl", "data", "drafter"))
    recipe = f"--recipe={args.recipe}"
    if not scripts.exists():
        _run("scripts.py", "-o", scripts, "--count", args.count, recipe)
    _run("responses.py", scripts, "-o", data, "--minutes", args.minutes * RESPONSES, recipe)
    begin = args.init or (drafter if (drafter / "model.safetensors").exists() else "target")
    rest = args.minutes * (1 - RESPONSES)
    _run("train.py", data, "-o", drafter, "--minutes", rest, "--init", begin, recipe)
    print(f"{drafter}: build it with dflash-trt build --target {args.recipe} --drafter {drafter}")


def _run(script: str, *arguments: object) -> None:
    code = subprocess.call([sys.executable, str(HERE / script), *map(str, arguments)])
    if code:
        raise SystemExit(code)


if __name__ == "__main__":
    run(main)
