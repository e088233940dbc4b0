"""The command line's frame: verbs, and what an error looks like."""

from __future__ import annotations

import os
import sys

import typer

from dflash_trt import __version__
from dflash_trt.cli import build, generate, inspect, verify
from dflash_trt.errors import DFlashError

app = typer.Typer(
    name="dflash-trt",
    help="DFlash speculative decoding from one ahead-of-time engine.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("build")(build.build)
app.command("generate")(generate.generate)
app.command("inspect")(inspect.inspect)
app.command("verify")(verify.verify)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"dflash-trt {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(
        False, "--version", help="Print the version.", callback=_print_version, is_eager=True
    ),
) -> None:
    del version


def main() -> None:
    """Run the command line. Exit codes: 0 done, 1 check failed or a bug, 2 the user's input."""
    try:
        app()
    except DFlashError as error:
        print(f"error: {error.message}", file=sys.stderr)
        if error.hint:
            print(f"\nhint: {error.hint}", file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:
        # The reader went away (`| head`): not an error of ours, but do not flush into it again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
