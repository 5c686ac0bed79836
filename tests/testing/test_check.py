"""Reports, and the command ``fedbench check``."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT
from torch import nn

from fedbench import commands
from fedbench.algorithms.fedavg import FedAvg
from fedbench.core.options import ConfigError
from fedbench.tasks.classification import Classification
from fedbench.testing import check_partition


class Blocks:
    """Blocks of neighbours, after a shuffle."""

    def assign(self, labels, pools, num_clients, rng, domain=None):
        return [np.array_split(rng.permutation(pool), num_clients) for pool in pools]


class Twice(Blocks):
    """Assigns a sample to two clients."""

    def assign(self, labels, pools, num_clients, rng, domain=None):
        assigned = super().assign(labels, pools, num_clients, rng, domain)
        assigned[0][1] = np.append(assigned[0][1], assigned[0][0][0])
        return assigned


class Asserting(Blocks):
    """Fails by an assertion of its own."""

    def assign(self, labels, pools, num_clients, rng, domain=None):
        raise AssertionError("no labels")


class Mean(FedAvg):
    """A method."""


class Net(nn.Linear):
    """A model."""


class Loss(Classification):
    """A task."""


def path(cls: type) -> str:
    """Return the dotted path of a class."""
    return f"{cls.__module__}.{cls.__qualname__}"


def test_a_class_or_its_path_is_a_target() -> None:
    for target in (Blocks, path(Blocks)):
        report = check_partition(target, only=["every_sample_once"])
        assert report.target == path(Blocks) and report.passed == ["every_sample_once"]


def test_a_report_raises_with_its_table() -> None:
    report = check_partition(Twice, only=["every_sample_once", "inputs_are_unchanged"])
    with pytest.raises(AssertionError, match=r"FAILED  every_sample_once .*\n +1 samples are given away twice"):
        report.raise_if_failed()
    assert str(report).endswith("2 checks: 1 passed, 1 failed, 0 skipped")


def test_an_assertion_of_the_user_is_described_with_its_line() -> None:
    message = check_partition(Asserting, only=["inputs_are_unchanged"]).failed["inputs_are_unchanged"]
    assert message.startswith("it raises AssertionError: no labels (test_check.py, line ")


@pytest.mark.slow
def test_a_python_without_assertions_is_refused() -> None:
    command = [sys.executable, "-O", "-m", "fedbench", "check", "partition=iid"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 2 and "run python without -O" in result.stderr


def test_the_command_prints_a_table_and_returns_a_status(capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main(["check", path(Blocks), "--clients", "5"]) == 0
    assert "for 5 clients on 1,800 samples" in capsys.readouterr().out
    assert commands.main(["check", path(Twice), "--only", "every_sample_once,inputs_are_unchanged"]) == 1
    printed = capsys.readouterr().out
    assert "FAILED  every_sample_once" in printed and "passed  inputs_are_unchanged" in printed


def test_the_page_shows_what_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Values with decimals may differ by rounding."""
    page = (ROOT / "docs" / "checks.md").read_text()
    source, printed = (
        re.search(rf"```{begin}(.*?)```", page, re.DOTALL)[1] for begin in ("python\n", "text\n(?=algorithm )")
    )
    (tmp_path / "my_package.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    assert commands.main(["check", "my_package.MyMethod"]) == 1
    assert re.sub(r"0\.\d+", "x", capsys.readouterr().out) == re.sub(r"0\.\d+", "x", printed)
    monkeypatch.delitem(sys.modules, "my_package")


def test_the_command_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main(["check", "partition=dirichlet", "alpha=0.5", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["kind"] == "partition" and report["ok"] is True
    assert report["passed"] == len(report["checks"]) and report["failed"] == report["skipped"] == 0
    assert {"name", "status", "description", "message"} == set(report["checks"][0])


def test_the_command_lists_all_checks(capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main(["check", "--list"]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in ("padding_is_ignored", "gradients_agree", "subjects_stay_whole"))


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["pgfed"], "did you mean algorithm=pgfed?"),
        (["no.such.Class"], "check: there is no module for 'no.such.Class'"),
        (["pathlib.Path"], "is of no kind that can be checked"),
        (["algorithm=nosuch"], "no option nosuch in conf/algorithm: choose from apfl,"),
        (["data=x"], "there are no checks for the kind data: name a target of the kind algorithm"),
        ([path(Mean), "lam=1"], "unexpected keyword argument 'lam'"),
        ([path(Mean), "lam"], "is not of the form key=value"),
        ([path(Mean), "--only", "nosuch"], "there is no check nosuch for the kind algorithm: choose from"),
        ([path(Blocks), "--model", "mlp"], "--model is only for a target of the kind algorithm"),
        ([path(Net), "--input", "3,x"], "--input 3,x is not the shape of a sample"),
        ([path(Loss), "gamma=2", "--input", "3"], "--input is only for a target of the kind model"),
        ([], "no target is given: name a class or an option"),
    ],
)
def test_mistakes_are_one_sentence(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main(["check", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and error.startswith("fedbench: ") and error.count("\n") == 1


def test_a_class_inside_a_function_is_refused() -> None:
    class Inside:
        pass

    with pytest.raises(ConfigError, match="is defined inside a function"):
        check_partition(Inside)
