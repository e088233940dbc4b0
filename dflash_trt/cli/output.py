"""What the verbs share: where data and messages go, progress bars, JSON."""

from __future__ import annotations

import json
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

#: Messages, tables and progress; data alone goes to standard output.
messages = Console(stderr=True, highlight=False)

JSON_OPTION = typer.Option(False, "--json", help="Print the figures as JSON on standard output.")


def print_json(data: dict[str, Any]) -> None:
    """One JSON object on standard output."""
    typer.echo(json.dumps(data, indent=2, ensure_ascii=False))


def progress_bar() -> Progress:
    """A bar on standard error; nothing where that is not a terminal."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        console=messages,
        transient=True,
        disable=not messages.is_terminal,
    )
