"""The lock of a run folder: one holder, gone with its process, and what stands in for it."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

from fedbench.core.lock import LOCK_FILE, LOCK_MARK, Busy, is_held, writing
from fedbench.core.options import ConfigError

HOLD = """
import sys, time
from pathlib import Path
from fedbench.core.lock import writing
with writing(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


def test_who_has_it_is_told_and_a_kill_frees_it(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        with pytest.raises(Busy) as error, writing(tmp_path):
            pass
        said = f"{tmp_path} is in use by process {process.pid} on {socket.gethostname()}"
        assert str(error.value).startswith(said) and is_held(tmp_path)
        process.send_signal(signal.SIGKILL)
        process.wait()
    with writing(tmp_path):
        assert (tmp_path / LOCK_FILE).read_text() == f"{os.getpid()}\n{socket.gethostname()}\n"
        assert is_held(tmp_path)
    assert not is_held(tmp_path)


def no_locks(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def refuse(*args: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    """A mark is said, keeps others out while its process lives, and is taken over from a dead one."""
    no_locks(monkeypatch, errno.ENOLCK)
    with caplog.at_level(logging.WARNING), writing(tmp_path):
        assert "this file system has no locks (No locks available)" in caplog.text
        with pytest.raises(Busy, match=rf"process {os.getpid()} on "), writing(tmp_path):
            pass
    assert not list(tmp_path.iterdir())
    gone = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True)
    (tmp_path / LOCK_MARK).write_text(f"{gone.stdout.strip()}\n{socket.gethostname()}\n")
    assert not is_held(tmp_path)
    (tmp_path / LOCK_MARK).write_text("1\nanother.host\n")
    with pytest.raises(Busy, match=r"process 1 on another\.host"), writing(tmp_path):
        pass


def test_a_lock_that_cannot_be_opened_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / LOCK_FILE).mkdir()
    with pytest.raises(ConfigError, match=r"\.lock cannot be locked \("), writing(tmp_path):
        pass


def test_a_folder_that_nobody_can_write_needs_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *args: False)
    with writing(tmp_path):
        assert not list(tmp_path.iterdir())
