"""Options that run.py has as other scripts do, and passes on to them."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path

import torch
from command import block, positive, rate
from target import DEVICE

from dflash_trt.build.recipe import recipe_names


def add_target(parser: argparse.ArgumentParser) -> None:
    """The option that says whose drafter it is."""
    parser.add_argument(
        "--target",
        type=full_name,
        default="smollm2-135m",
        help="recipe, folder, .gguf file or hf:ORG/NAME, as `dflash-trt build` takes",
    )


def most_workers(most: int = 1024) -> int:
    """One on a GPU; else as many as cores, but not more than `most`."""
    return 1 if DEVICE == "cuda" else min(torch.get_num_threads(), most)


def add_workers(parser: argparse.ArgumentParser, default: int | None = None) -> None:
    """Options of what works in processes; without a default each script has its own."""
    cores = torch.get_num_threads()
    parser.add_argument(
        "--workers",
        type=positive,
        default=default,
        help="processes, each with a copy of the target",
    )
    parser.add_argument("--threads", type=positive, default=cores, help="of all workers together")


def add_slots(parser: argparse.ArgumentParser) -> None:
    """The option of how wide responses.py works."""
    parser.add_argument(
        "--slots", type=positive, help="texts at once, of a worker; default: what memory allows"
    )


def add_shape(parser: argparse.ArgumentParser) -> None:
    """Options of the drafter that is trained."""
    add = parser.add_argument
    add("--block", type=block, help="block size, anchor counted; default: that of --init, or 8")
    add("--layers", type=positive, help="default: all of --init's, or the target's last 4")
    add("--intermediate", type=positive, help="width of an MLP; default: that of what it starts as")
    add(
        "--widths",
        type=block,
        nargs="+",
        help="of blocks in training, drawn by batch; default: --block",
    )
    add("--lr", type=rate, default=6e-4, help="highest learning rate")


def forwarded(
    args: argparse.Namespace, add: Callable[[argparse.ArgumentParser], None]
) -> list[str]:
    """The options that `add` defines, as arguments of another script that has them too."""
    parser = argparse.ArgumentParser(add_help=False)
    add(parser)
    words: list[str] = []
    for name in vars(parser.parse_args([])):
        value = getattr(args, name)
        if value is not None:
            values = value if isinstance(value, list) else [value]
            words += [f"--{name.replace('_', '-')}", *map(str, values)]
    return words


def full_name(target: str) -> str:
    """A target's name that means the same in any working directory."""
    path = Path(os.path.expanduser(target))
    is_path = target not in recipe_names() and os.path.exists(path)
    return str(path.absolute()) if is_path else target
