"""What asks a run to stop is heard, what was ignored stays ignored, and a terminal that is gone is left."""

import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fedbench.cli import jobs
from fedbench.core import signals
from fedbench.core.files import read_json

ROOT = Path(__file__).resolve().parents[2]
ALL = [getattr(signal, name) for name in signals.STOPPING]


@pytest.mark.parametrize("number", ALL)
def test_a_signal_calls_the_handler_and_what_was_there_comes_back(number: int) -> None:
    """A job in the background begins with SIGINT and SIGQUIT ignored, so here they are as in a terminal."""
    mine, heard = signal.signal(number, signal.SIG_DFL), []
    try:
        with signals.handled(lambda n, frame: heard.append(n)):
            os.kill(os.getpid(), number)
        assert heard == [number] and signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, mine)


@pytest.mark.parametrize(("name", "stays"), [("SIGHUP", True), ("SIGQUIT", True), ("SIGTERM", False)])
def test_a_hangup_that_nohup_ignores_stays_ignored(name: str, stays: bool) -> None:
    number, heard = getattr(signal, name), []
    mine = signal.signal(number, signal.SIG_IGN)
    try:
        with signals.handled(lambda n, frame: heard.append(n)):
            os.kill(os.getpid(), number)
        assert (heard == []) is stays and signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, mine)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGQUIT"])
def test_before_the_rounds_a_signal_is_an_interruption(name: str, tmp_path: Path) -> None:
    number = getattr(signal, name)
    mine = signal.signal(number, signal.SIG_DFL)

    def work() -> tuple[str, float]:
        os.kill(os.getpid(), number)
        pytest.fail("it went on")

    try:
        with pytest.raises(KeyboardInterrupt):
            jobs.attempt(tmp_path, work)
    finally:
        signal.signal(number, mine)
    assert (read_json(tmp_path / "status.json") or {})["status"] == "interrupted"


CLOSED = """
import os, sys, time
from fedbench.core.signals import handled

def hung_up(number, frame):
    print("still printing", flush=True)
    os.write(report, b"printed")
    os._exit(0)

report = int(sys.argv[1])
with handled(hung_up):
    os.write(1, b"ready")  # print could still be at work when the signal comes, and cannot be entered twice
    while True:
        time.sleep(0.05)  # a pause would wait for ever for a signal that came just before it
"""


def test_a_closed_terminal_does_not_make_printing_fail() -> None:
    """The window of a run is closed: SIGHUP comes, and every write to the terminal would raise."""
    ours, theirs = pty.openpty()
    read, write = os.pipe()
    begin = "import fcntl, signal, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0)"  # it is its session's terminal
    begin += f"; signal.signal(signal.SIGHUP, signal.SIG_DFL)\n{CLOSED}"  # where the tests run under nohup, too
    process = subprocess.Popen(
        [sys.executable, "-c", begin, str(write)],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        pass_fds=[write],
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    os.close(theirs), os.close(write)
    assert b"ready" in os.read(ours, 100)
    os.close(ours)
    assert os.read(read, 100) == b"printed"
    assert process.wait(timeout=120) == 0
    os.close(read)
