"""Scripts, responses, training and a draft vocabulary in one call, with the time shared out.

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

from command import TARGET, alone, fail, features, minutes, positive, run, start
from options import add_shape, add_slots, add_target, add_workers, forwarded
from origin import FEATURES, Origin, choose_layers
from scripts import read_scripts
from shards import ORIGIN, WEIGHTS
from target import DEVICE, find_target, read_facts
from task import make_task

from dflash_trt.checkpoint import open_drafter

HERE = Path(__file__).parent
VOCABULARY = "draft_vocab.json"
LEAST_MINUTES = 8
"""SmolLM2 on two cores; in less, hardly an answer is begun before the responses' share is over."""
SCRIPTS_A_MINUTE = 10_000 if DEVICE == "cuda" else 500
"""More than a small target answers in the responses' share of it."""
RESPONSES = 0.45
"""Share of the time that goes into scripts and responses; the rest trains."""


def main() -> None:
    """Run the scripts one after another."""
    args = arguments()
    if DEVICE == "cpu" and args.minutes < LEAST_MINUTES:
        fail(f"--minutes {args.minutes:g} is too short on a CPU, give at least {LEAST_MINUTES}")
    data, drafter = args.output / "data", args.output / "drafter"
    begin = args.init or (str(drafter) if (drafter / WEIGHTS).exists() else TARGET)
    origin = Origin(args.target, _layers(args, begin, data), args.seed)
    origin.check(data)
    # Says here, not when half of the time is over, what is wrong.
    trained = {"init": begin, "output": drafter, "features": origin.target_layer_ids}
    make_task(origin, argparse.Namespace(**(vars(args) | trained)))
    args.output.mkdir(parents=True, exist_ok=True)
    with alone(args.output):
        _run_all(args, origin, data, drafter, begin)
    print(
        f"{drafter}: build it with dflash-trt build --target {args.target} --drafter {drafter} "
        f"--draft-vocab {drafter / VOCABULARY}"
    )


def _layers(args: argparse.Namespace, begin: str, data: Path) -> tuple[int, ...]:
    """Layers of the features: those asked for, the texts', the drafter's that it begins with."""
    if args.features is None and (data / ORIGIN).exists():
        return Origin.read(data).target_layer_ids
    if args.features is None and begin != TARGET:
        return open_drafter(Path(begin)).config.target_layer_ids
    return choose_layers(args.features or FEATURES, read_facts(find_target(args.target)).num_layers)


def _run_all(
    args: argparse.Namespace, origin: Origin, data: Path, drafter: Path, begin: str
) -> None:
    begun = time.monotonic()

    def until(share: float) -> list[str]:
        """Minutes until so much of the time is over, but some in any case."""
        over = (time.monotonic() - begun) / 60
        return ["--minutes", f"{max(share * args.minutes - over, 0.1 * args.minutes):.2f}"]

    seed, workers = f"--seed={args.seed}", forwarded(args, add_workers)
    layers = f"--features={','.join(map(str, origin.target_layer_ids))},"
    scripts = args.output / "scripts.jsonl"
    count = args.count or round(args.minutes * SCRIPTS_A_MINUTE)
    # A longer file starts as a shorter one does.
    if not scripts.exists() or len(read_scripts(scripts)[1]) < count:
        _run("scripts.py", "-o", scripts, "--count", count, *forwarded(args, add_target), seed)
    slots = forwarded(args, add_slots)
    _run("responses.py", scripts, "-o", data, *until(RESPONSES), *workers, *slots, layers)
    mask = [f"--mask-token={args.mask_token}"] if args.mask_token else []
    shape = [*forwarded(args, add_shape), *mask, layers]
    _run("train.py", data, "-o", drafter, "--init", begin, *until(1), *workers, *shape, seed)
    _run("vocabulary.py", data, "-o", drafter / VOCABULARY)


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
        "--features",
        type=features,
        help=f"how many, or of which layers (1,14,27); default: those of --init, or {FEATURES}",
    )
    add("--mask-token", help="token or id; train.py --help says the default")
    add("--init", type=start, help="a drafter to start from; default: an earlier call's, or target")
    add_shape(parser)
    add_slots(parser)
    add_workers(parser)
    add("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    run(main)
