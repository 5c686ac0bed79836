"""What every test shares: one intra-op thread, and the folder of real data where there is one.

Makers of small federations and problems that can be solved by hand are in tiny.py.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session", autouse=True)
def not_by_uv() -> None:
    """Suggested commands are the same ones, whoever starts the tests."""
    os.environ.pop("UV", None)


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Threads that spin while others run make small operations up to 100 times slower."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Real data beside the checkout (cifar10_jpeg.npz, mnist.npz, ...)."""
    folder = ROOT.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("needs ../shared/data, which is not there")
    return folder
