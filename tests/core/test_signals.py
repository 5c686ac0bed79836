"""What asks a run to stop is heard, what was ignored stays ignored, and a terminal that is gone is left."""

import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fedbench.app import single
from fedbench.core import signals
from fedbench.core.files import read_json
from fedbench.simulation.simulate import recorded
from fedbench.simulation.stop_signals import StopSignals

ROOT = Path(__file__).resolve().parents[2]
ALL = [getattr(signal, name) for name in signals.STOP_SIGNALS]


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


@pytest.mark.parametrize(
    ("name", "stays"), [("SIGHUP", True), ("SIGQUIT", True), ("SIGUSR1", True), ("SIGTERM", False)]
)
def test_a_hangup_that_nohup_ignores_stays_ignored(name: str, stays: bool) -> None:
    number, heard = getattr(signal, name), []
    mine = signal.signal(number, signal.SIG_IGN)
    try:
        with signals.handled(lambda n, frame: heard.append(n)):
            os.kill(os.getpid(), number)
        assert (heard == []) == stays and signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, mine)


def attempt(folder: Path, work: Callable[[], Any]) -> tuple[int, Any]:
    """Do the work of a run as the command line does."""

    def run() -> Any:
        with recorded(folder):
            return work()

    result = single.attempt(folder, run)
    return result.status, result.ended


@pytest.mark.parametrize("name", signals.STOP_SIGNALS)
def test_before_the_rounds_a_signal_is_an_interruption(name: str, tmp_path: Path) -> None:
    number = getattr(signal, name)
    mine = signal.signal(number, signal.SIG_DFL)

    def work() -> Any:
        os.kill(os.getpid(), number)
        pytest.fail("it went on")

    try:
        with pytest.raises(KeyboardInterrupt):
            attempt(tmp_path, work)
    finally:
        signal.signal(number, mine)
    assert (read_json(tmp_path / "status.json") or {})["status"] == "interrupted"


@pytest.fixture
def launcher() -> Iterator[list[int]]:
    """Handlers of a launcher that ask to be started again, and what they were called with."""
    called: list[int] = []

    def start_again(number: int, frame: Any) -> None:
        called.append(number)
        sys.exit(144)

    mine = {number: signal.signal(number, start_again) for number in ALL}
    yield called
    for number, handler in mine.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", ALL)
def test_a_launchers_handler_acts_on_a_run_that_is_saved(number: int, launcher: list[int], tmp_path: Path) -> None:
    def work() -> Any:
        with StopSignals() as stop:
            os.kill(os.getpid(), number)
            (tmp_path / "saved").touch()  # the round is finished first
            stop.raise_if_requested()
        pytest.fail("it went on")

    with pytest.raises(SystemExit) as exited:
        attempt(tmp_path, work)
    assert exited.value.code == 144 and launcher == [number] and (tmp_path / "saved").exists()
    assert read_json(tmp_path / "status.json")["status"] == "interrupted"


def test_what_a_launcher_does_not_end_is_an_interruption(launcher: list[int], tmp_path: Path) -> None:
    """Such as its handler that lets SIGTERM pass."""
    heard: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    with pytest.raises(KeyboardInterrupt):
        attempt(tmp_path, lambda: os.kill(os.getpid(), signal.SIGTERM) or None)
    assert heard == [signal.SIGTERM] and launcher == []


def test_a_launcher_that_gives_up_is_heard(launcher: list[int], tmp_path: Path) -> None:
    def gives_up(number: int, frame: Any) -> None:
        raise RuntimeError("timed-out too many times")

    signal.signal(signal.SIGUSR2, gives_up)
    with pytest.raises(RuntimeError, match="too many times"):
        attempt(tmp_path, lambda: os.kill(os.getpid(), signal.SIGUSR2) or None)
    assert read_json(tmp_path / "status.json")["status"] == "interrupted"


def test_a_methods_own_exit_is_a_failure(launcher: list[int], tmp_path: Path) -> None:
    assert attempt(tmp_path, lambda: sys.exit(3)) == (1, None)
    assert read_json(tmp_path / "status.json")["status"] == "failed" and launcher == []


def test_warnings_may_come_again_and_a_second_request_stops_at_once(launcher: list[int]) -> None:
    """SIGXCPU comes every second; after a warning SIGTERM comes with the limit, while the round is still finished."""
    with pytest.raises(SystemExit), StopSignals() as stop:
        for name in ("SIGXCPU", "SIGXCPU", "SIGUSR1", "SIGTERM", "SIGXCPU"):
            os.kill(os.getpid(), getattr(signal, name))
        assert stop.requested()
        os.kill(os.getpid(), signal.SIGINT)
        pytest.fail("it went on")
    assert launcher == [signal.SIGINT]


def test_a_signal_of_a_run_that_finished_starts_nothing_again(launcher: list[int], tmp_path: Path) -> None:
    def work() -> Any:
        with StopSignals():
            os.kill(os.getpid(), signal.SIGUSR2)  # in the last round
        return "finished"

    assert attempt(tmp_path, work) == (0, "finished") and launcher == []


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
