"""How many cores this process may compute on. Imports no torch."""

import math
import os
from pathlib import Path


def available_cores() -> int:
    """Cores that this process may use: those of its affinity mask, within its cgroup's quota."""
    cores = len(os.sched_getaffinity(0))
    return max(1, math.ceil(min(cores, cgroup_cores(Path("/sys/fs/cgroup")))))


def cgroup_cores(root: Path) -> float:
    """The quota of a container, whose cgroup is mounted as the root: version 2, else version 1; infinite if none."""
    try:
        quota, period = (root / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            quota = (root / "cpu" / "cpu.cfs_quota_us").read_text().strip()
            period = (root / "cpu" / "cpu.cfs_period_us").read_text().strip()
        except OSError:
            return math.inf
    return math.inf if quota in {"max", "-1"} else int(quota) / int(period)
