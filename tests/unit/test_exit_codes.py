"""Exit codes of the command line, by what ended it: README.md has the table."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import typer

from dflash_trt import errors
from dflash_trt.cli.frame import run
from dflash_trt.errors import DFlashError, GraphError

RUN_TIME = {"GpuError", "GpuMemoryError", "StepError", "EngineStopped", "NoLowering", "GraphError"}
KINDS = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, DFlashError)
]


def end(error: BaseException | None, monkeypatch: pytest.MonkeyPatch) -> int:
    app = typer.Typer(pretty_exceptions_enable=False)

    @app.command()
    def verb() -> None:
        if error is not None:
            raise error

    monkeypatch.setattr(sys, "argv", ["dflash-trt"])
    with pytest.raises(SystemExit) as caught:
        run(app)
    return int(caught.value.code or 0)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind is not GraphError])
def test_a_failure_of_ours_is_not_told_as_a_fault_of_the_input(
    kind: type[DFlashError], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    assert end(kind("it went wrong", "mend it"), monkeypatch) == (
        1 if kind.__name__ in RUN_TIME else 2
    )
    assert capsys.readouterr().err == "error: it went wrong\n\nhint: mend it\n"


def test_a_bug_shows_where(monkeypatch: pytest.MonkeyPatch) -> None:
    for error in (GraphError("a net broke a rule"), ZeroDivisionError()):
        with pytest.raises(type(error)):
            end(error, monkeypatch)


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (None, 0, ""),
        (typer.Exit(1), 1, ""),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (BrokenPipeError(), 141, ""),
        (FileNotFoundError(2, "No such file", "x"), 2, "error: x: No such file\n"),
    ],
)
def test_other_ends(
    error: BaseException | None, code: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(sys, "stdout", sys.stdout)  # typer changes them when a pipe ends
    monkeypatch.setattr(sys, "stderr", sys.stderr)
    assert end(error, monkeypatch) == code
    assert capsys.readouterr().err == said
