"""The command line's verbs."""

from __future__ import annotations

import typer

from dflash_trt import __version__
from dflash_trt.cli import build, doctor, draft_vocab, generate, inspect, serve, verify

app = typer.Typer(
    name="dflash-trt",
    help="DFlash speculative decoding from one ahead-of-time engine.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("build")(build.build)
app.command("draft-vocab")(draft_vocab.draft_vocab)
app.command("generate")(generate.generate)
app.command("inspect")(inspect.inspect)
app.command("serve")(serve.serve)
app.command("repo")(serve.repo)
app.command("verify")(verify.verify)
app.command("doctor")(doctor.doctor)


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
