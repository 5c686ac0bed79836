"""The number of processors available to this process, limited by the system, a container, Slurm or Ray."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

SYSTEM = Path("/")


def cores(system: Path = SYSTEM) -> int:
    """Return the number of processors that this process may use, at least 1.

    It is the smallest of several limits, rounded down.  These are the affinity mask, the CPUs that Slurm or Ray
    assigned, and the CPU quotas of control groups (versions 1 and 2).

    Args:
        system: The root folder, with /proc and /sys.
    """
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, int(min([affinity, *_slurm(), *_ray(), *_quotas(system)])))


def _slurm() -> list[float]:
    """Return [CPUs per task] of this process's Slurm job; [] outside of Slurm."""
    count = os.environ.get("SLURM_CPUS_PER_TASK", "")
    return [int(count)] if count.isdecimal() else []


def _ray() -> list[float]:
    """Return [CPUs that Ray assigned to this process]; [] unless this process is a worker of Ray with CPUs."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return []
    try:
        assigned = ray.get_runtime_context().get_assigned_resources()
    except AssertionError:  # raised outside of Ray's workers
        return []
    return [float(assigned["CPU"])] if assigned.get("CPU") else []


def _quotas(system: Path) -> Iterator[float]:
    """Yield the CPU quotas, in processors, of this process's control groups and their parents.

    A line of /proc/self/cgroup is "4:cpu,cpuacct:/group" in version 1, and "0::/group" in version 2.

    Args:
        system: The root folder, with /proc and /sys.
    """
    for line in _text(system / "proc/self/cgroup").splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        mounted = system / "sys/fs/cgroup"
        for root in [mounted / controllers, mounted / "cpu"] if controllers else [mounted, mounted / "unified"]:
            for folder in [root / group.strip("/"), *(root / group.strip("/")).parents]:  # up to root
                quota = _version_1(folder) if controllers else _version_2(folder)
                if quota is not None:
                    yield quota
                if folder == root:
                    break


def _version_2(folder: Path) -> float | None:
    """Return the CPU quota of a control group of version 2, in processors; None if the group has no limit.

    cpu.max has a quota and a period: "200000 100000" means 2 processors, "max 100000" no limit.
    """
    quota, _, period = _text(folder / "cpu.max").strip().partition(" ")
    return int(quota) / int(period) if quota.isdecimal() and period.isdecimal() else None


def _version_1(folder: Path) -> float | None:
    """Return the CPU quota of a control group of version 1, in processors; None if the group has no limit.

    Without a limit, cpu.cfs_quota_us contains -1.
    """
    quota, period = (_text(folder / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period"))
    return int(quota) / int(period) if quota.isdecimal() and period.isdecimal() else None


def _text(path: Path) -> str:
    """Return the content of a file, or "" if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
