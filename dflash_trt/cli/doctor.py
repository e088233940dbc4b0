"""`dflash-trt doctor`: what this machine has, and which paths of dflash-trt work on it."""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Iterator
from typing import Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dflash_trt import __version__
from dflash_trt.cli.output import JSON_OPTION, print_json
from dflash_trt.doctor.machine import Found, Machine, examine
from dflash_trt.doctor.paths import Road, extra_fix, roads

alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

COLOURS = {"ok": "green", "works": "green", "broken": "red", "no": "yellow"}


def doctor(as_json: bool = JSON_OPTION) -> None:
    """Show what this machine has, which paths work here, and how to mend the others."""
    machine = examine()
    found = roads(machine)
    if as_json:
        print_json(
            {
                "dflash_trt": __version__,
                "python": platform.python_version(),
                "platform": platform.platform(),
                **dataclasses.asdict(machine),
                "paths": [dataclasses.asdict(road) for road in found],
            }
        )
    else:
        _print(machine, found)


@alone.callback()
def _group() -> None:
    """What dflash-trt finds on this machine."""  # a callback keeps `doctor` a verb


alone.command("doctor")(doctor)


def _print(machine: Machine, found: list[Road]) -> None:
    console = Console(highlight=False, markup=False, emoji=False)
    things = _table("what", "state", "details")
    for row in _things(machine):
        _add(things, *row)
    console.print(things)
    ways = _table("path", "state", "details")
    for road in found:
        _add(ways, road.name, "works" if road.works else "no", road.detail)
        if road.fix:
            _add(ways, "", "", f"fix: {road.fix}")
    console.print(ways)


def _things(machine: Machine) -> Iterator[tuple[str, str, str]]:
    yield "python", "ok", f"{platform.python_version()}, dflash-trt {__version__}"
    cuda = f", runs CUDA up to {machine.cuda}" if machine.cuda else ""
    driver = machine.driver or machine.gpu_reason or "of unknown version"
    yield "NVIDIA driver", "ok" if machine.driver or machine.gpus else "missing", driver + cuda
    for gpu in machine.gpus:
        major, minor = gpu.capability
        size = f"{gpu.memory_bytes / 1e9:,.0f} GB"
        yield "GPU", "ok", f"{gpu.name}, compute capability {major}.{minor}, {size}"
    for name, library in (machine.libraries | machine.tools).items():
        yield name, library.state, _details(library)
    for extra, absent in machine.extras.items():
        wanted = f"needs {', '.join(absent)}: {extra_fix(extra)}" if absent else ""
        yield f"extra {extra}", "missing" if absent else "ok", wanted


def _details(found: Found) -> str:
    if found.state == "missing":
        return ""
    parts: list[Any] = [found.version, found.reason, found.facts.get("path")]
    return ", ".join(str(part) for part in parts if part)


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE, show_edge=False, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold", no_wrap=column != "details")
    return table


def _add(table: Table, name: str, state: str, details: str) -> None:
    table.add_row(Text(name), Text(state, style=COLOURS.get(state, "")), Text(details))
