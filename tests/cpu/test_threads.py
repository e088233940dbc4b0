"""The CPU allowance: affinity and cgroup quotas, from fake cgroup trees."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dflash_trt.runtime import threads
from dflash_trt.runtime.threads import cpu_allowance


@pytest.fixture
def many_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host with 64 cores, all of them allowed."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))


def put(root: Path, group: str, name: str, content: str) -> None:
    folder = root / group
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(content)


def own_group(monkeypatch: pytest.MonkeyPatch, content: str) -> None:
    """Make /proc/self/cgroup say `content`."""
    read_text = Path.read_text

    def fake(self: Path, *args: object, **kwargs: object) -> str:
        return content if str(self) == "/proc/self/cgroup" else read_text(self)

    monkeypatch.setattr(Path, "read_text", fake)


@pytest.mark.parametrize(
    ("quota", "wanted"),
    [
        ("max 100000", 64), ("200000 100000", 2), ("150000 100000", 2), ("50000 100000", 1),
        ("1000 100000", 1), ("9900000 100000", 64), ("garbage", 64), ("", 64),
        ("a few", 64),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("many_cores")
def test_quota_of_the_mounted_group(quota: str, wanted: int, tmp_path: Path) -> None:
    put(tmp_path, "", "cpu.max", quota)
    assert cpu_allowance(tmp_path) == wanted


@pytest.mark.usefixtures("many_cores")
def test_no_cgroup_at_all_leaves_the_affinity(tmp_path: Path) -> None:
    assert cpu_allowance(tmp_path / "absent") == 64


@pytest.mark.usefixtures("many_cores")
def test_quota_of_the_processs_own_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own_group(monkeypatch, "0::/pod/box\n")
    put(tmp_path, "pod/box", "cpu.max", "300000 100000")
    assert cpu_allowance(tmp_path) == 3


@pytest.mark.usefixtures("many_cores")
def test_quota_of_a_parent_binds_where_the_own_group_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_group(monkeypatch, "0::/pod/box\n")
    put(tmp_path, "pod/box", "cpu.max", "max 100000")
    put(tmp_path, "pod", "cpu.max", "400000 100000")
    assert cpu_allowance(tmp_path) == 4


@pytest.mark.usefixtures("many_cores")
def test_the_tightest_quota_on_the_way_up_binds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_group(monkeypatch, "0::/pod/box\n")
    put(tmp_path, "pod/box", "cpu.max", "800000 100000")
    put(tmp_path, "pod", "cpu.max", "200000 100000")
    assert cpu_allowance(tmp_path) == 2


@pytest.mark.parametrize(("quota", "wanted"), [("250000", 3), ("-1", 64), ("0", 64)])
@pytest.mark.usefixtures("many_cores")
def test_quota_of_cgroup_v1(quota: str, wanted: int, tmp_path: Path) -> None:
    put(tmp_path, "cpu", "cpu.cfs_quota_us", quota)
    put(tmp_path, "cpu", "cpu.cfs_period_us", "100000")
    assert cpu_allowance(tmp_path) == wanted


def test_affinity_binds_when_it_is_smaller_than_the_quota(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3})
    put(tmp_path, "", "cpu.max", "800000 100000")
    assert cpu_allowance(tmp_path) == 1


def test_the_real_machine_has_an_allowance() -> None:
    assert 1 <= threads.cpu_allowance() <= (os.cpu_count() or 1)
