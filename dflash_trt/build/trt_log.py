"""What TensorRT says during a build: its errors in one line, and its own list of kernels."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any

from dflash_trt.flavor import make_logger

# Without a driver every call of TensorRT ends in one of these.
_NO_DRIVER = re.compile(r"cudaError 35|CUDA driver version is insufficient|CUDA initialization")
_BRACKETS = re.compile(r"^\[[\w.:/]+\] ?")  # [optimizer.cpp::operator()::42]
_SOURCE = re.compile(r"\(?In \S+ at /\S+\)?|\bat /\S+:\d+")
_LAYERS = "Layers:\n"
MAX_KEPT = 50


class Messages:
    """Errors, warnings and the two reports that a build is asked for, in the order they came."""

    def __init__(self, *, needs_driver: bool) -> None:
        """`needs_driver`: whether a missing driver is a reason to fail, and not a remark."""
        self._needs_driver = needs_driver
        self.errors: list[str] = []
        self.warnings: list[str] = []
        self.layers = ""  # the engine inspector's text, which TensorRT logs when it has built
        self.num_engines = 0
        self._are_muted = False

    @contextlib.contextmanager
    def muted(self) -> Iterator[None]:
        """Keep nothing meanwhile: reading what a layer does not have is an error to TensorRT."""
        self._are_muted = True
        try:
            yield
        finally:
            self._are_muted = False

    def add(self, is_error: bool, is_warning: bool, text: str) -> None:
        """Take one message."""
        if self._are_muted:
            return
        if text.startswith(_LAYERS):
            self.layers = text
        elif text.startswith("Adding ") and text.endswith(" engine(s) to plan file."):
            self.num_engines = int(text.split()[1])
        elif not (is_error or is_warning):
            return
        elif self._needs_driver or not _NO_DRIVER.search(text):
            kept = self.errors if is_error else self.warnings
            if len(kept) < MAX_KEPT:
                kept.append(text)

    @property
    def cause(self) -> str:
        """The first error in one line, without TensorRT's own file names."""
        return one_line(self.errors[0]) if self.errors else "no reason was given"


def one_line(text: str) -> str:
    """A message of TensorRT in one line of at most 300 characters."""
    text = _SOURCE.sub("", _BRACKETS.sub("", text.strip()))
    text = re.sub(r"\s+", " ", text).replace(" )", ")").replace("()", "").strip(" .:")
    return text if len(text) <= 300 else text[:297] + "..."


def logger_into(trt: Any, messages: Messages) -> Any:
    """A logger of TensorRT's that fills `messages`; it must outlive what is made with it."""
    severity = trt.ILogger.Severity

    def log(level: Any, text: str) -> None:
        is_error = level in (severity.ERROR, severity.INTERNAL_ERROR)
        messages.add(is_error, level == severity.WARNING, text)

    return make_logger(trt, log)


def make_monitor(
    trt: Any, report: Callable[[str, float], None], is_cancelled: Callable[[], bool]
) -> Any:
    """TensorRT's progress monitor: `report(phase, fraction)`; a cancelled build ends at a step."""

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]  # trt is a value: Any
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self._phases: dict[str, tuple[str | None, int, int]] = {}  # parent, done, steps
            self._most = 0.0

        def phase_start(self, phase: str, parent: str | None, num_steps: int) -> None:
            self._phases[phase] = (parent, 0, max(1, num_steps))
            self._tell(phase)

        def step_complete(self, phase: str, step: int) -> bool:
            if phase in self._phases:
                parent, _, num_steps = self._phases[phase]
                self._phases[phase] = (parent, step + 1, num_steps)
                self._tell(phase)
            return not is_cancelled()

        def phase_finish(self, phase: str) -> None:
            self._phases.pop(phase, None)

        def _tell(self, phase: str) -> None:
            """The fraction of the whole: a phase counts as one step of its parent."""
            fraction, name = 0.0, phase
            while name in self._phases:
                parent, done, num_steps = self._phases[name]
                fraction = min(1.0, (done + fraction) / num_steps)
                if parent is None:
                    break
                name = parent
            self._most = max(self._most, fraction)
            report(phase, self._most)

    return Monitor()
