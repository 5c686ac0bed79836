"""Threads are as many as the processors that a launcher or a container has given."""

from __future__ import annotations

import os
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from fedbench.core.cores import cores
from fedbench.engine.executor import candidate_plans

NOWHERE = Path("/nowhere")


@pytest.fixture(autouse=True)
def eight(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system's affinity mask has eight processors, and nothing else is given."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    monkeypatch.delenv("SLURM_CPUS_PER_TASK", raising=False)
    monkeypatch.delitem(sys.modules, "ray", raising=False)


def test_without_more_it_is_the_affinity_mask() -> None:
    assert cores(NOWHERE) == 8


@pytest.mark.parametrize(("given", "expected"), [("2", 2), ("16", 8), ("", 8), ("many", 8), ("0", 1)])
def test_slurms_share_of_a_task(given: str, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", given)
    assert cores(NOWHERE) == expected


@pytest.mark.parametrize(("assigned", "expected"), [({"CPU": 3.0}, 3), ({"CPU": 0.5}, 1), ({"GPU": 1.0}, 8), (None, 8)])
def test_rays_share_of_a_worker(assigned: Any, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """None: the process that starts Ray's workers, which Ray's own assertion refuses."""

    def resources() -> Any:
        assert assigned is not None
        return assigned

    context = types.SimpleNamespace(get_assigned_resources=resources)
    fake = types.SimpleNamespace(is_initialized=lambda: True, get_runtime_context=lambda: context)
    monkeypatch.setitem(sys.modules, "ray", fake)  # type: ignore[arg-type]
    assert cores(NOWHERE) == expected


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("0::/\n", {"cpu.max": "200000 100000\n"}, 2),  # version 2, as a container sees it
        ("0::/job/step\n", {"job/cpu.max": "350000 100000\n", "job/step/cpu.max": "max 100000\n"}, 3),
        ("0::/job\n", {"cpu.max": "max 100000\n"}, 8),
        ("0::/\n", {"cpu.max": "50000 100000\n"}, 1),
        (
            "5:memory:/x\n4:cpu,cpuacct:/job\n0::/\n",
            {"cpu,cpuacct/job/cpu.cfs_quota_us": "400000\n", "cpu,cpuacct/job/cpu.cfs_period_us": "100000\n"},
            4,
        ),
        ("4:cpu,cpuacct:/job\n", {"cpu/cpu.cfs_quota_us": "400000\n", "cpu/cpu.cfs_period_us": "200000\n"}, 2),
        ("1:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 8),
        ("2:cpuacct:/\n", {"cpuacct/cpu.cfs_quota_us": "100000\n", "cpuacct/cpu.cfs_period_us": "100000\n"}, 8),
    ],
)
def test_the_quota_of_a_container(groups: str, files: dict[str, str], expected: int, tmp_path: Path) -> None:
    texts = {"proc/self/cgroup": groups, **{f"sys/fs/cgroup/{name}": text for name, text in files.items()}}
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert cores(tmp_path) == expected


def test_an_executor_has_so_many_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "1")
    assert candidate_plans("threads", None, None, torch.device("cpu"), 10)[0].workers == 1
