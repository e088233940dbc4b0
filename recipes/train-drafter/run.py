"""Scripts, responses and training in one call, with the time shared out.

    python run.py -o out/train-drafter --minutes 12

The folder keeps everything, so a second call adds responses and trains again from the drafter that
the first one left. Another target, seed or choice of features needs another folder.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

from command import TARGET, fail, features, minutes, positive, run, start
from options import add_shape, add_target, add_workers, forwarded
from origin import FEATURES, Origin, choose_layers
from target import DEVICE, find_target, read_facts
from task import make_task

HERE = Path(__file__).parent
LEAST_MINUTES = 8
"""On two cores; in less, hardly a text ends before the responses' share of the time is over."""
SCRIPTS_A_MINUTE = 10_000 if DEVICE == "cuda" else 500
"""More than a machine answers, so that later calls have some left."""
RESPONSES = 0.45
"""Share of the time that goes into scripts and responses; the rest trains."""


def main() -> None:
    """Run the three scripts one after another."""
    args = arguments()
    begun = time.monotonic()

    def left(share: float) -> list[str]:
        """Minutes until so much of the time is over, but some in any case."""
        over = (time.monotonic() - begun) / 60
        return ["--minutes", f"{max(share * args.minutes - over, 0.1 * args.minutes):.2f}"]

    if DEVICE == "cpu" and args.minutes < LEAST_MINUTES:
        fail(f"--minutes {args.minutes:g} is too short on a CPU, give at least {LEAST_MINUTES}")
    layer_ids = choose_layers(args.features, read_facts(find_target(args.target)).num_layers)
    scripts, data, drafter = (args.output / name for name in ("scripts.jsonl", "data", "drafter"))
    origin = Origin(args.target, layer_ids, args.seed)
    begin = args.init or (str(drafter) if (drafter / "model.safetensors").exists() else TARGET)
    shape = (args.block, args.layers, args.intermediate)
    make_task(origin, begin, None, args.mask_token, *shape)  # says here what is wrong, not later
    origin.keep(data)
    seed, workers = f"--seed={args.seed}", forwarded(args, add_workers)
    if not scripts.exists():
        target = forwarded(args, add_target)
        count = args.count or round(args.minutes * SCRIPTS_A_MINUTE)
        _run("scripts.py", "-o", scripts, "--count", count, *target, seed)
    layers = f"--features={','.join(map(str, layer_ids))},"
    _run("responses.py", scripts, "-o", data, *left(RESPONSES), *workers, layers)
    options = forwarded(args, add_shape)
    mask = [f"--mask-token={args.mask_token}"] if args.mask_token else []
    _run(
        "train.py", data, "-o", drafter, "--init", begin, *left(1), *workers, *options, seed, *mask
    )
    print(f"{drafter}: build it with dflash-trt build --target {args.target} --drafter {drafter}")


def _run(script: str, *arguments: object) -> None:
    code = subprocess.call([sys.executable, str(HERE / script), *map(str, arguments)])
    if code:
        raise SystemExit(code)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("-o", "--output", type=Path, required=True, help="folder for all of it")
    add("--minutes", type=minutes, default=12)
    add("--count", type=positive, help="of scripts; default: more than time allows")
    add_target(parser)
    add(
        "--features", type=features, default=FEATURES, help="how many, or of which layers (1,14,27)"
    )
    add("--mask-token", help="token or id; train.py --help says the default")
    add("--init", type=start, help="a drafter to start from; default: an earlier call's, or target")
    add_shape(parser)
    add_workers(parser)
    add("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    run(main)
