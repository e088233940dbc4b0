"""What the verbs share: where data and messages go, progress bars, JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

#: Progress and warnings; what was asked for goes to standard output through typer.echo.
# No markup: paths and text may hold brackets.
messages = Console(stderr=True, highlight=False, markup=False, emoji=False)

JSON_OPTION = typer.Option(False, "--json", help="Print the figures as JSON on standard output.")


def print_json(data: dict[str, Any]) -> None:
    """One JSON object on standard output."""
    typer.echo(json.dumps(data, indent=2, ensure_ascii=False))


def print_rows(rows: Iterable[tuple[str, object]]) -> None:
    """Names and values in two columns; a long value is never cut or wrapped."""
    pairs = list(rows)
    width = max(len(name) for name, _ in pairs)
    for name, value in pairs:
        typer.echo(f"{name:{width}}  {value}")


def draft_vocab_rows(size: int | None) -> list[tuple[str, object]]:
    """What a table says of a draft vocabulary; nothing for a drafter that drafts every token."""
    return [] if size is None else [("draft vocab", f"{size:,} tokens")]


def progress_bar() -> Progress:
    """A bar on standard error; nothing where that is not a terminal."""
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        console=messages,
        transient=True,
        disable=not messages.is_terminal,
    )
