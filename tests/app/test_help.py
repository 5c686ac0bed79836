"""Help of the command line: everything in it is read from the conf folder."""

import re
from pathlib import Path

import pytest

from fedbench.app.compose import compose
from fedbench.app.help import requested_help
from fedbench.commands import main
from fedbench.config.check import check
from fedbench.config.conf_tree import GROUPS, group_options
from fedbench.core.nested import flatten


def test_help_is_a_page_of_subcommands_groups_keys_and_examples(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert len(text.splitlines()) <= 90 and max(map(len, text.splitlines())) <= 110
    for group in ("dataset", "partition", "model", "algorithm", "optimizer", "experiment"):
        for name in group_options(group):
            folder = name.split("/")[0]
            shown = rf"({folder}|{folder.split('_')[0]}_\*/\*)" if "/" in name else folder
            assert re.search(rf"(?<![\w/]){shown}(?![\w])", text), f"{group}={name}"
    keys = flatten(check(compose([])))
    assert all(key in keys for key in re.findall(r"^  ([\w.]+)=\S", text, re.MULTILINE))
    assert text.count("python -m fedbench ") >= 6
    assert "pgfed*" in text and re.search(r"  rounds=\d", text) and "optimizer.lr=" in text


def test_help_of_an_option_is_its_source_and_its_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help", "algorithm=pgfed"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "algorithm=pgfed",
        "  PGFed: Luo et al., ICCV 2023; values of the released script",
        "  mu, eta2, beta, alpha_max: a number, or a list with one per client",
        "  search: mu=tag(log,interval(0.01,0.5)); our range; the released script has 0.1",
        "  search: eta2=tag(log,interval(0.001,0.1)); our range; the released script has 0.01",
        "  class fedbench.algorithms.pgfed.PGFed",
        "  algorithm.mu=0.1           weight of the auxiliary risks",
        "  algorithm.eta2=0.01        learning rate of their coefficients a_ij",
        "  algorithm.beta=0.0         momentum of the auxiliary gradient; > 0: PGFedMo",
        "  algorithm.alpha_max=null   upper bound of a_ij",
        "  algorithm.drop_last=false  true: g_j leaves out the last incomplete batch, as the released code",
    ]
    assert main(["algorithm=fedpro", "--help"]) == 2
    said = "algorithm=fedpro is not an option: did you mean fedprox or fedproto or fedrod?"
    assert capsys.readouterr().err == f"fedbench: {said}\n"


def test_help_of_an_option_has_the_keys_of_those_it_stands_on() -> None:
    text = requested_help(["dataset=bloodmnist"])
    assert text.splitlines()[1].startswith("  BloodMNIST: ") and "  from dataset=medmnist: " in text
    assert text.count("dataset.flag=") == 2 and "\n  dataset.flag=bloodmnist  " in text  # in the header, and as a key
    assert re.search(r"^  dataset.resize=null +side in pixels$", text, re.MULTILINE)


def test_help_of_an_option_of_the_users(tmp_path: Path) -> None:
    (tmp_path / "algorithm").mkdir()
    (tmp_path / "algorithm" / "mine.yaml").write_text(
        "# Mine: after nobody\n_target_: mine.Mine\nnu: 3  # a number\n        # of two lines\n"
        "rates: {first: 0.000001, second: [1, 2, 3], third: a text of some length}  # long\nlist:\n  - 1  # one\n"
    )
    assert requested_help(["--config-dir", str(tmp_path), "algorithm=mine"]).splitlines() == [
        "algorithm=mine",
        "  Mine: after nobody",
        "  class mine.Mine",
        "  algorithm.nu=3      a number of two lines",
        "  algorithm.rates={first: 1.0e-06, second: [1, 2, 3], third: a text of some length}",
        "                      long",
        "  algorithm.list=[1]  one",
    ]


NET_YAML = """
_target_: nets.Net
width: 3
depth: 2  # of layers
heads: 4
x: 1
columns: {}
"""
NETS = """
raise ImportError

class Base:
    '''A base.

    Args:
        width: Of a layer,
            in units.
        depth: Not this.
    '''

class Net(Base):
    '''A net.

    Attributes:
        heads: Of attention.
    '''
"""


def test_a_key_without_a_comment_has_the_meaning_of_the_docstring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of the class or of a base in its file, which is read and not imported; else that of all options."""
    monkeypatch.chdir(tmp_path)
    Path("model").mkdir()
    Path("model/net.yaml").write_text(NET_YAML)
    Path("nets.py").write_text(NETS)
    assert requested_help(["--config-dir", ".", "model=net"]).splitlines()[2:] == [
        "  model.width=3     Of a layer, in units",
        "  model.depth=2     of layers",
        "  model.heads=4     Of attention",
        "  model.x=1",
        "  model.columns={}  Column groups by name, each a list of patterns of parameter names",
    ]


def test_nearly_all_keys_have_a_meaning() -> None:
    groups = [group for group in GROUPS if group not in ("experiment", "callbacks")]
    shown = "\n".join(requested_help([f"{g}={option}"]) for g in groups for option in group_options(g))
    keys = re.findall(rf"^  (?:{'|'.join(groups)})\.[\w.]+=\S.*(?:\n    .*)?", shown, re.MULTILINE)
    explained = [key for key in keys if re.search(r"\S(  +|\n +)\S", key.strip())]
    assert len(explained) > 0.9 * len(keys) > 1000


@pytest.mark.parametrize("group", GROUPS)
def test_every_option_has_help(group: str) -> None:
    for option in group_options(group)[:60]:
        text = requested_help([f"{group}={option}"])
        assert text.startswith(f"{group}={option}\n") or group == "experiment", text


def test_help_of_a_group_is_all_of_its_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help", "experiment", "adapter"]) == 0
    told = capsys.readouterr().out.split()
    assert told == ["experiment", *group_options("experiment"), "adapter", *group_options("adapter")]
