"""Skips that are failures: on a machine that has to have everything, as CI's, nothing is missing.

A test that skips for what is not there would hide that it is not there any more.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

VARIABLE = "DFLASH_TRT_NO_SKIPS"  # .ci/run sets it
#: What CI cannot have, as the start of a reason; tests marked `gpu` have a variable of their own.
ALLOWED = (
    "TensorRT's headers are not here",  # a part of its SDK that no package has
    "promtool is not on PATH",  # a part of Prometheus that pip does not have
    "there is a CUDA driver",
    "not a git checkout",
)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[Any]:
    """A test that skips."""
    report = yield
    if item.get_closest_marker("gpu") is None and not hasattr(report, "wasxfail"):
        _fail_if_skipped(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Iterator[Any]:
    """A file that skips as a whole."""
    report = yield
    _fail_if_skipped(report)
    return report


def _fail_if_skipped(report: pytest.TestReport | pytest.CollectReport) -> None:
    if not os.environ.get(VARIABLE) or report.outcome != "skipped":
        return
    _, _, reason = report.longrepr  # type: ignore[misc]
    reason = reason.removeprefix("Skipped: ")
    if not reason.startswith(ALLOWED):
        report.outcome = "failed"
        report.longrepr = f"skipped, but {VARIABLE} is set: {reason}"
