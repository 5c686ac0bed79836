"""One JSON object on standard output, also after a mistake, and nothing else beside it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fedbench.core.command import command
from fedbench.core.json_output import json_text, output_on_stderr, print_json
from fedbench.core.options import ConfigError


def test_values_that_json_lacks() -> None:
    """NaN and infinity become null, arrays lists, paths text; other numbers keep all digits."""
    data = {"nan": float("nan"), "inf": np.inf, "row": np.array([1.5, np.nan]), "n": np.int64(3), "file": Path("a/b")}
    read = json.loads(json_text("example", {**data, "third": 1 / 3, "name": "±"}))
    assert read == {
        "schema": "fedbench/example/1",
        **{"nan": None, "inf": None, "row": [1.5, None], "n": 3, "file": "a/b", "third": 1 / 3, "name": "±"},
    }


@pytest.mark.parametrize(
    ("raised", "message", "status"),
    [
        (ConfigError("rounds must be >= 1, got 0"), "rounds must be >= 1, got 0", 2),
        (PermissionError(13, "Permission denied", "a.csv"), "a.csv: Permission denied", 2),
        (KeyboardInterrupt(), "interrupted", 130),
    ],
)
def test_errors(raised: BaseException, message: str, status: int, capsys: pytest.CaptureFixture) -> None:
    """With --json a failed command prints its error as JSON; without it, standard output is empty."""

    @command
    def main(argv: list[str]) -> int:
        raise raised

    assert main([]) == status
    assert capsys.readouterr().out == ""
    assert main(["--json"]) == status
    assert json.loads(capsys.readouterr().out) == {
        "schema": "fedbench/error/1",
        "error": {"type": type(raised).__name__, "message": message},
        "exit_code": status,
    }


def test_other_output_goes_to_standard_error(tmp_path: Path) -> None:
    """What a block prints, also by file descriptor and in a process of its own, is not on standard output."""
    program = (
        "import os, subprocess, sys\n"
        "from fedbench.core.json_output import output_on_stderr, print_json\n"
        "with output_on_stderr():\n"
        "    print('by print')\n"
        "    os.write(1, b'by descriptor\\n')\n"
        "    subprocess.run([sys.executable, '-c', 'print(\"by a process\")'])\n"
        "print_json('example', {'n': 1})\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env={**os.environ})
    assert json.loads(done.stdout) == {"schema": "fedbench/example/1", "n": 1}
    assert {"by print", "by descriptor", "by a process"} <= set(done.stderr.splitlines())


def test_streams_are_restored_after_an_error(capfd: pytest.CaptureFixture) -> None:
    """A block that raises leaves standard output as it was."""
    with pytest.raises(ValueError), output_on_stderr():
        raise ValueError
    os.write(2, b"on standard error\n")
    print_json("example", {})
    assert json.loads(capfd.readouterr().out) == {"schema": "fedbench/example/1"}
