"""A run's memory is its data and a bounded working set, not what its test samples would take all at once.

Whole processes, since the largest resident memory is the process's: VmHWM of /proc/self/status.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MB = 1 << 20
MEASURED = """
import sys
from fedbench.commands import main
from fedbench.simulation.environment import peak_memory
import torch
assert main(sys.argv[1:]) == 0
print("peak", peak_memory(torch.device("cpu")))
"""
SEGMENTATION = ["dataset.kind=segmentation", "dataset.shape=[1,32,32]", "model=fcn", "optimizer.lr=0.1"]
MULTILABEL = ["dataset.kind=multilabel", "dataset.num_classes=14", "dataset.shape=[100]", "model=mlp"]


def peak(folder: Path, *words: str) -> float:
    """The largest resident memory of one run, in bytes."""
    here = [f"{key}={folder / key}" for key in ("data_dir", "output_dir")]
    plan = ["hardware.device=cpu", "hardware.executor=vmap", "hardware.threads=1", "tracking=disabled"]
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, "dataset=synthetic", "partition=iid", *words, *plan, *here],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return float(done.stdout.split("peak ")[1]) * MB


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
@pytest.mark.parametrize("kind", [SEGMENTATION, MULTILABEL], ids=["segmentation", "multilabel"])
def test_ten_thousand_test_samples_take_less_than_300_mb(kind: list[str], tmp_path: Path) -> None:
    """Beyond a run on 40 samples, which has loaded all libraries."""
    words = [*kind, "partition.num_clients=10", "algorithm=fedper", "rounds=1", "local.epochs=1"]
    few, many = (peak(tmp_path / str(n), *words, f"dataset.n={n}") for n in (40, 40_000))  # a quarter is tested on
    print(f"{few / MB:.0f} MB with 40 samples, {many / MB:.0f} MB with 40,000")
    assert many - few < 300 * MB
