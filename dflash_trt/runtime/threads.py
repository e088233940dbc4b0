"""How many CPU threads this process may really use: its allowance, not the host's cores."""

from __future__ import annotations

import math
import os
from pathlib import Path

CGROUP_ROOT = Path("/sys/fs/cgroup")
MAX_THREADS = 256  # that may be asked for


def cpu_allowance(cgroup_root: Path = CGROUP_ROOT) -> int:
    """Threads to run: the smaller of the CPU affinity and the cgroup quota, at least 1.

    A pool sized from the host's cores inside a container's quota spends its time being throttled.
    """
    affinity = len(os.sched_getaffinity(0))
    quota = _cgroup_quota(cgroup_root)
    return affinity if quota is None else max(1, min(affinity, math.ceil(quota)))


def _cgroup_quota(root: Path) -> float | None:
    """CPUs' worth of time per period, from cgroup v2 (`cpu.max`) or v1 (`cpu.cfs_*`).

    A group is bound by its own quota and by those of all groups around it.
    """
    quotas = [_quota_of(folder) for folder in _own_groups(root)]
    found = [quota for quota in quotas if quota is not None]
    if found:
        return min(found)
    try:
        v1 = root / "cpu"
        quota_us = int((v1 / "cpu.cfs_quota_us").read_text())
        period_us = int((v1 / "cpu.cfs_period_us").read_text())
    except (OSError, ValueError):
        return None
    return quota_us / period_us if quota_us > 0 else None


def _quota_of(folder: Path) -> float | None:
    try:
        quota, period = (folder / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return None


def _own_groups(root: Path) -> list[Path]:
    """This process's cgroup and its parents, innermost first; the mount root is the last."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return [root]
    own = next((line.split(":", 2)[2] for line in lines if line.startswith("0::")), "/")
    folder = root / own.lstrip("/")
    return [folder, *(p for p in folder.parents if p.is_relative_to(root))]
