"""What a run says of where it happened."""

import shutil
import subprocess

import pytest
import torch
from conftest import ROOT

from fedbench.simulation.environment import CHECKOUT, describe_environment, peak_memory


@pytest.mark.skipif(not (ROOT / ".git").exists() or shutil.which("git") is None, reason="needs a checkout and git")
def test_a_checkout_tells_its_commit() -> None:
    head = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    assert CHECKOUT == ROOT and describe_environment()["commit"] == head.stdout.strip()


def test_versions_and_machine_are_told() -> None:
    environment = describe_environment()
    assert environment["versions"]["torch"] == torch.__version__ and environment["machine"]["cores"] >= 1


def test_the_peak_is_in_mebibytes() -> None:
    before = peak_memory(torch.device("cpu"))
    block = torch.ones(64 << 18)  # 64 MiB
    assert 10 < before <= peak_memory(torch.device("cpu")) < 1e6 and block.numel()
