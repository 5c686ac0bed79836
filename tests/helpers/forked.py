"""Several processes on gloo, forked from one after its imports."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch


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
