"""The environment of a run: commit, versions, machine, memory, time."""

from __future__ import annotations

import functools
import platform
import shutil
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fedbench
from fedbench.core.cores import cores

try:
    import resource
except ImportError:
    resource = None  # only on Unix

CHECKOUT = Path(__file__).resolve().parents[2]  # the repository's root, unless the package is installed


def now() -> str:
    """Return the current UTC time to the second, as in "2025-01-31T12:00:00+00:00"."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has finished all work, so that measured times include it.  Do nothing for other devices."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_memory(device: torch.device) -> float:
    """Return the peak memory of this process since it started, in MiB.

    For a GPU, it is the memory of torch's tensors on it; else the host memory of the process, NaN if it is unknown.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        if line.startswith("VmHWM"):
            return int(line.split()[1]) / 2**10
    if resource is None:
        return float("nan")  # Windows
    # less exact than VmHWM: it includes the peak of the parent process before exec
    scale = 2**20 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / scale


@functools.cache
def describe_environment() -> dict[str, Any]:
    """Return the entries commit, dirty, versions and machine of summary.json.

    commit and dirty (whether tracked files have uncommitted changes) are None if fedbench is an installed package.
    """
    in_checkout = (CHECKOUT / ".git").exists() and shutil.which("git") is not None
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "commit": _git("rev-parse", "HEAD") if in_checkout else None,
        "dirty": bool(_git("status", "--porcelain", "--untracked-files=no")) if in_checkout else None,
        "versions": {
            "fedbench": fedbench.__version__,
            "torch": torch.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
        },
        "machine": {"processor": _processor(), "cores": cores(), "gpu": gpu, "system": platform.platform()},
    }


def _git(*args: str) -> str | None:
    """Return the output of ``git ARGS`` in the repository of fedbench; None if the command fails."""
    process = subprocess.run(["git", "-C", str(CHECKOUT), *args], capture_output=True, text=True, check=False)
    return process.stdout.strip() if process.returncode == 0 else None


def _processor() -> str:
    """Return the model name of the processor, or its architecture if the system does not report it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine())
