"""Scripts, responses and training in one call, with the time shared out.

    python run.py -o out/train-drafter --minutes 12

The folder keeps everything, so a second call adds responses and trains again from the drafter that
the first one left. Another target, seed or choice of features needs another folder.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from command import TARGET, add_target, fail, features, minutes, positive, run, start
from origin import FEATURES, Origin, choose_layers
from target import DEVICE, find_target, read_facts
from task import make_task

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
    add_target(parser)
    parser.add_argument(
        "--features", type=features, default=FEATURES, help="how many, or of which layers (1,14,27)"
    )
    parser.add_argument("--mask-token", help="token or id; train.py --help says the default")
    parser.add_argument(
        "--init", type=start, help="a drafter to start from; default: an earlier call's, or target"
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if DEVICE == "cpu" and args.minutes < LEAST_MINUTES:
        fail(f"--minutes {args.minutes:g} is too short on a CPU, give at least {LEAST_MINUTES}")
    layer_ids = choose_layers(args.features, read_facts(find_target(args.target)).num_layers)
    scripts, data, drafter = (args.output / name for name in ("scripts.jsonl", "data", "drafter"))
    origin = Origin(args.target, layer_ids, args.seed)
    begin = args.init or (str(drafter) if (drafter / "model.safetensors").exists() else TARGET)
    make_task(origin, begin, mask_token=args.mask_token)  # says here what is wrong, not later
    origin.keep(data)
    target, seed = f"--target={args.target}", f"--seed={args.seed}"
    if not scripts.exists():
        _run("scripts.py", "-o", scripts, "--count", args.count, target, seed)
    layers = f"--features={','.join(map(str, layer_ids))},"
    time = args.minutes * RESPONSES
    _run("responses.py", scripts, "-o", data, "--minutes", time, target, seed, layers)
    mask = [f"--mask-token={args.mask_token}"] if args.mask_token else []
    time = args.minutes * (1 - RESPONSES)
    _run("train.py", data, "-o", drafter, "--minutes", time, "--init", begin, seed, *mask)
    print(f"{drafter}: build it with dflash-trt build --target {args.target} --drafter {drafter}")


def _run(script: str, *arguments: object) -> None:
    code = subprocess.call([sys.executable, str(HERE / script), *map(str, arguments)])
    if code:
        raise SystemExit(code)


if __name__ == "__main__":
    run(main)
