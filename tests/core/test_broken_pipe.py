"""A command whose output nobody reads goes on to its end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SMALL = "model=logistic partition.num_clients=2 rounds=5 local.epochs=1 tracking=disabled hardware.executor=vmap"


def shell(line: str, within: Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PY": sys.executable}
    command = ["bash", "-c", f"set -o pipefail; {line}"]
    return subprocess.run(command, cwd=within, env=env, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_a_run_that_nobody_reads_is_finished_and_drawn(tmp_path: Path) -> None:
    """The reader ends after a line; then both streams are closed from the start."""
    done = shell(f"$PY -m fedbench {SMALL} hydra.run.dir=piped | head -1", tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    done = shell(f"$PY -m fedbench {SMALL} hydra.run.dir=closed >&- 2>&-", tmp_path)
    assert done.returncode == 0
    for name in ("piped", "closed"):
        assert json.loads((tmp_path / name / "summary.json").read_text())["status"] == "finished"
        assert (tmp_path / name / "checkpoint.pt").is_file()
    tables = [(tmp_path / name / "metrics.csv").read_bytes() for name in ("piped", "closed")]
    assert tables[0] == tables[1]
    done = shell("$PY -m fedbench figures piped | true", tmp_path)
    assert (done.returncode, done.stderr) == (0, "")  # the run is not called damaged
    assert (tmp_path / "piped" / "figures" / "run.png").is_file()


PRINTING = """
import os, sys
from fedbench.core.broken_pipe import survive_broken_pipe

@survive_broken_pipe()
def main():
    for _ in range(3):
        print("x" * 100_000, flush=True)
        print("x" * 100_000, file=sys.stderr, flush=True)
    fd = os.open("table", os.O_CREAT | os.O_WRONLY)
    assert fd > 2, "what is printed would be in the file"
    print("not in the table", flush=True)
    os.write(fd, b"table")

main()
print("afterwards")
"""


@pytest.mark.parametrize("end", ["| true", ">&-", ">&- 2>&- <&-", "2>&1 | true", "2>&-"])
def test_streams_end_no_command(end: str, tmp_path: Path) -> None:
    (tmp_path / "printing.py").write_text(PRINTING)
    done = shell(f"$PY printing.py {end}", tmp_path)
    assert done.returncode == 0 and (tmp_path / "table").read_bytes() == b"table"
    assert "Error" not in done.stderr


def test_a_full_disk_is_an_error(tmp_path: Path) -> None:
    """A table that was led into a file must not be cut in silence."""
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    (tmp_path / "printing.py").write_text(PRINTING)
    done = shell("$PY printing.py > /dev/full", tmp_path)
    assert done.returncode != 0 and "No space left on device" in done.stderr
