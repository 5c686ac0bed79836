"""What a time limit or a killed process stops goes on by itself, to the bytes of an uninterrupted run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fedbench.core.files import read_json

ROOT = Path(__file__).resolve().parents[2]
WORDS = [
    "algorithm=pgfed",
    "seed=0",
    "rounds=150",
    "hardware.threads=1",
    "hardware.executor=loop",
    "tracking=disabled",
    "checkpoint.every=0",
]


def workers(sweep: Path) -> list[int]:
    """The processes that compute the sweep's jobs: children of the controllers after which folders are named."""
    controllers = [path.name for path in (sweep / ".submitit").glob("*") if path.name.isdecimal()]
    listed = subprocess.run(["ps", "-eo", "pid,ppid"], capture_output=True, text=True, check=True).stdout
    pairs = [line.split() for line in listed.splitlines()[1:]]
    return [int(pid) for pid, parent in pairs if parent in controllers]


@pytest.mark.slow
def test_a_cell_at_its_time_limit_goes_on(tmp_path: Path) -> None:
    """submitit sends SIGUSR2 at the limit; here it is sent after the first rounds."""
    pytest.importorskip("submitit")
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "fedbench"]
    sweep = [*command, "-m", *WORDS, "sweep_dir=s", "hydra/launcher=submitit_local", "hydra.launcher.timeout_min=5"]
    process = subprocess.Popen(sweep, cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    until = time.monotonic() + 250
    while time.monotonic() < until and not list(tmp_path.glob("s/*/metrics.csv")):
        time.sleep(0.1)
    (cell,) = (path.parent for path in tmp_path.glob("s/*/metrics.csv"))
    (worker,) = workers(tmp_path / "s")
    os.kill(worker, signal.SIGUSR2)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, out + err
    logs = "".join(path.read_text() for path in tmp_path.glob("s/.submitit/*/*_log.out"))
    assert "Requeued job" in logs and "resuming after round" in (cell / "run.log").read_text()
    assert read_json(cell / "status.json")["status"] == "finished"
    subprocess.run([*command, *WORDS, "hydra.run.dir=whole"], cwd=tmp_path, env=env, capture_output=True, check=True)
    for name in ("metrics.csv", "clients.csv"):
        assert (cell / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


@pytest.mark.slow
def test_processes_that_torchrun_starts_again_go_on(tmp_path: Path) -> None:
    """The first process is killed; the second attempt finds the folder by torchrun's id."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=1"]
    words = ["algorithm=fedavg", "model=logistic", "partition.num_clients=4", "tracking=disabled", "checkpoint.every=1"]
    words += ["rounds=200", "hardware=ddp", "hardware.device=cpu", "output_dir=runs"]
    process = subprocess.Popen([*command, "-m", "fedbench", *words], cwd=tmp_path, env=env, text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE)  # fmt: skip
    until = time.monotonic() + 250
    while time.monotonic() < until and not list(tmp_path.glob("runs/*/*/*/checkpoint.pt")):
        time.sleep(0.1)
    listed = subprocess.run(["ps", "-eo", "pid,ppid"], capture_output=True, text=True, check=True).stdout
    ranks = [int(pid) for pid, parent in map(str.split, listed.splitlines()[1:]) if parent == str(process.pid)]
    os.kill(min(ranks), signal.SIGKILL)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, out + err
    (folder,) = tmp_path.glob("runs/*/*/*")
    assert "resuming after round" in out and read_json(folder / "summary.json")["rounds"] == 200
