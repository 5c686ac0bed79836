"""Several processes on gloo, forked from one after its imports."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from conftest import ROOT

from fedbench.engine import ranks
from fedbench.engine.ranks import Ranks


def rank_pid(process: subprocess.Popen, rank: int) -> int:
    """Return the process id of a rank that torchrun started."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return next(int(c) for c in children if f"\0RANK={rank}\0" in Path(f"/proc/{c}/environ").read_text())


def run_forked(count: int, work: Callable[[], None]) -> int:
    """Call a function in processes that find each other by `ranks.connect`, and return how many failed.

    Args:
        count: Number of processes.
        work: The function.
    """
    torch.set_num_threads(1)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = []
    for rank in range(count):
        if not (child := os.fork()):
            os.environ |= {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(count),
                "LOCAL_WORLD_SIZE": str(count),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
            work()
            sys.exit()
        children.append(child)
    return sum(os.waitpid(child, 0)[1] != 0 for child in children)


def run_driver(file: str, folder: Path, *words: str, timeout: float = 600) -> None:
    """Run a test module as a program: python FILE FOLDER WORD ...

    Args:
        file: The file of the module.
        folder: The folder for its results.
        words: Further arguments.
        timeout: Seconds after which it fails.
    """
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "helpers")])
    done = subprocess.run(
        [sys.executable, file, str(folder), *words],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        timeout=timeout,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def assert_killed(work: Callable[..., None], *args: Any) -> None:
    """Call a function in a child process, and assert that SIGKILL ended it."""
    if not (child := os.fork()):
        work(*args)
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL, args


def save_of_two(folder: Path, results: Callable[[Ranks], Any]) -> None:
    """Save what a function returns in each of two processes that share a run, as 0.pt and 1.pt.

    Args:
        folder: The folder of the files.
        results: The function, which gets the ranks.
    """

    def save() -> None:
        both = ranks.connect()
        torch.save(results(both), folder / f"{both.rank}.pt")
        ranks.disconnect()

    assert run_forked(2, save) == 0
