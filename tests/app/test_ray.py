"""Sweeps by Ray (hydra/launcher=ray) on this machine: equal bytes, also if a worker is killed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fedbench.core.lock import is_held

ROOT = Path(__file__).resolve().parents[2]
SWEEP = [
    "algorithm=fedavg,pgfed",
    "seed=0",
    "hardware.threads=1",
    "hardware.executor=loop",
    "tracking=disabled",
    "checkpoint.every=1",
]
RAY = ["hydra/launcher=ray", "hydra.launcher.ray.init.num_cpus=2", "hydra.launcher.ray.remote.num_cpus=1"]
TABLES = ("metrics.csv", "clients.csv")
pytestmark = pytest.mark.slow


def command(*words: str) -> list[str]:
    pytest.importorskip("hydra_plugins.hydra_ray_launcher", reason="needs the extra ray")
    return [sys.executable, "-m", "fedbench", "-m", *SWEEP, *words]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "RAY_DEDUP_LOGS": "0"}


def tables(sweep: Path) -> dict[str, bytes]:
    return {str(path.relative_to(sweep)): path.read_bytes() for name in TABLES for path in sweep.glob(f"*/{name}")}


def run(words: list[str], folder: Path) -> str:
    done = subprocess.run(words, cwd=folder, env=environment(), capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_equal_bytes(tmp_path: Path) -> None:
    run(command("rounds=10", "sweep_dir=serial"), tmp_path)
    out = run(command("rounds=10", *RAY, "sweep_dir=ray"), tmp_path)
    assert "2 runs: 2 finished" in out
    assert len(tables(tmp_path / "ray")) == 4 and tables(tmp_path / "ray") == tables(tmp_path / "serial")


def test_a_killed_worker_goes_on(tmp_path: Path) -> None:
    """Ray starts the run of a killed worker again, which resumes from its checkpoint."""
    run(command("rounds=150", "sweep_dir=serial"), tmp_path)
    process = subprocess.Popen(command("rounds=150", *RAY, "sweep_dir=ray"), cwd=tmp_path, env=environment(),
                               text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip
    until = time.monotonic() + 200
    while time.monotonic() < until and not list(tmp_path.glob("ray/algorithm=pgfed*/checkpoint.pt")):
        time.sleep(0.05)
    (mark,) = tmp_path.glob("ray/algorithm=pgfed*/.lock")
    worker = int(mark.read_text().split()[0])
    os.kill(worker, signal.SIGKILL)
    out, _ = process.communicate(timeout=400)
    assert process.returncode == 0 and "2 runs: 2 finished" in out, out
    log = next(tmp_path.glob("ray/algorithm=pgfed*/run.log")).read_text()
    assert "resuming after round" in log
    assert tables(tmp_path / "ray") == tables(tmp_path / "serial")


def test_a_killed_sweep_goes_on(tmp_path: Path) -> None:
    """If the process that started Ray is killed, its workers end, and the same command resumes the runs."""
    run(command("rounds=150", "sweep_dir=serial"), tmp_path)
    words = command("rounds=150", *RAY, "sweep_dir=ray")
    process = subprocess.Popen(words, cwd=tmp_path, env=environment(), stdout=subprocess.DEVNULL)
    until = time.monotonic() + 200
    while time.monotonic() < until and len(list(tmp_path.glob("ray/*/checkpoint.pt"))) < 2:
        time.sleep(0.05)
    process.kill()
    process.wait()
    while time.monotonic() < until and any(is_held(path.parent) for path in tmp_path.glob("ray/*/config.yaml")):
        time.sleep(0.2)
    last_line = next(line for line in run(words, tmp_path).splitlines() if line.startswith("2 runs: "))
    assert re.fullmatch(r"2 runs: (2 finished|1 finished( already)?, 1 finished( already)?)", last_line)
    assert any("resuming after round" in path.read_text() for path in tmp_path.glob("ray/*/run.log"))
    assert tables(tmp_path / "ray") == tables(tmp_path / "serial")
