"""A default run needs nothing that only Unix, Linux or glibc has."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

WITHOUT = """
import builtins, ctypes, io, os, pathlib, platform, signal, sys

import hydra, numpy, omegaconf, torch  # these may look at the system they are on
platform.platform()

UNIX = {"resource", "fcntl", "pwd", "grp", "termios", "tty", "pty", "posix_ipc", "syslog"}
ours, real_import, real_open, real_cdll = ROOT, builtins.__import__, io.open, ctypes.CDLL.__init__

def called_by_us():
    frame = sys._getframe(2)
    return frame.f_code.co_filename.startswith(ours)

def importing(name, *args, **kwargs):
    if name in UNIX and called_by_us():
        raise ImportError(f"no module named {name!r} here")
    return real_import(name, *args, **kwargs)

def opening(file, *args, **kwargs):
    if str(file).startswith("/proc"):
        raise FileNotFoundError(file)
    return real_open(file, *args, **kwargs)

def loading(self, name, *args, **kwargs):
    if name and "libc" in str(name):
        raise OSError(f"no {name} here")
    real_cdll(self, name, *args, **kwargs)

builtins.__import__, io.open, builtins.open, ctypes.CDLL.__init__ = importing, opening, opening, loading
for name in ("sched_getaffinity", "fork", "getuid", "uname", "nice"):
    delattr(os, name)

for name in ("SIGHUP", "SIGQUIT", "SIGKILL", "SIGUSR1"):
    delattr(signal, name)

from fedbench.commands import main
from fedbench.simulation import environment

status = main(sys.argv[1:])
assert environment.resource is None
sys.exit(status)
"""
ROOT = Path(__file__).resolve().parents[2] / "fedbench"


@pytest.mark.slow
def test_a_default_run_needs_nothing_of_unix(tmp_path: Path) -> None:
    """Without resource, /proc, libc, Unix's signals and os functions a run ends in a table, and resumes."""
    script = tmp_path / "without.py"
    script.write_text(WITHOUT.replace("ROOT", repr(str(ROOT)), 1), encoding="utf-8")
    env = {**os.environ, "PYTHONPATH": str(ROOT.parent), "WANDB_MODE": "disabled"}

    def call(*words: str) -> str:
        command = [sys.executable, str(script), *words]
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    call("+experiment=debug", "rounds=2", "output_dir=here")
    (folder,) = (tmp_path / "here").glob("*/*/*")
    assert "mean personalized accuracy" in call(f"resume={folder}", "rounds=3")
    with (folder / "costs.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["round"] for row in rows] == ["1", "2", "3"] and {row["peak_memory_mb"] for row in rows} == {"nan"}
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"), parse_constant=float.fromhex)
    assert summary["status"] == "finished" and summary["cost"]["peak_memory_mb"] is None
