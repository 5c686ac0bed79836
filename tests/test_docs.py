"""What README, CONTRIBUTING and docs/ say is so: their examples run, their paths exist, their lists are complete."""

import re
from pathlib import Path
from typing import Any

import pytest
from by_hand import COHORTS, six_clients
from conftest import ROOT
from omegaconf import OmegaConf
from tiny import close, compose, deployed, play

from fedbench.algorithms.base import Algorithm
from fedbench.algorithms.fedavg import FedAvg
from fedbench.algorithms.fedrep import FedRep
from fedbench.app.help import SUBCOMMANDS
from fedbench.engine.cohort import Cohort
from fedbench.engine.optim import SGD
from fedbench.engine.step import Step

ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text()
API = (ROOT / "docs" / "api.md").read_text()
CALLS = (ROOT / "docs" / "calls.md").read_text()
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "AGENTS.md", *sorted((ROOT / "docs").glob("*.md"))]


def examples(text: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def files(text: str) -> dict[str, str]:
    """The files that a page shows whole: blocks whose first line is their path, by path."""
    found = re.findall(r"```\w+\n(# ((?:my_\w+|(?:my_)?conf/\w+/\w+)\.(?:py|yaml))\n.*?)```", text, re.DOTALL)
    return {path: source for source, path in found}


def example(source: str) -> type[Algorithm]:
    """The class that an example defines."""
    names: dict[str, Any] = {}
    exec(compile(source, "example", "exec"), names)
    return names["Example"]


EXAMPLES = examples(ARCHITECTURE) + examples(CALLS)


@pytest.mark.parametrize("source", EXAMPLES, ids=lambda s: re.findall(r"Example\((\w+)\)", s)[0])
def test_examples_of_calls_are_the_methods(source: str) -> None:
    """Three rounds of the class in the text and of the one it is derived from: the same rows, to rounding."""
    shown = example(source)
    released = shown.__mro__[1]
    rows = []
    for method in (shown, released):
        e = six_clients(SGD(lr=0.1), epochs=2)
        algorithm = play(e, method(), 3, COHORTS)  # type: ignore[arg-type]
        rows.append((deployed(e, algorithm), algorithm.global_row()))
    close(*(deployed_rows for deployed_rows, _ in rows), 1e-6)
    if released is not FedRep:  # which has no global row
        close(*(global_row for _, global_row in rows), 1e-6)
    assert any(name in vars(shown) for name in ("round", "step", "loss", "upload"))


def test_the_method_of_the_readme_deploys_the_mean_of_two_models() -> None:
    names: dict[str, Any] = {"__name__": "my_method"}
    exec(files((ROOT / "README.md").read_text())["my_method.py"], names)
    rows = {}
    for name, method in (("shown", names["Blend"]()), ("local", FedAvg(deploy="local")), ("global", FedAvg())):
        e = six_clients(SGD(lr=0.1), epochs=2)
        rows[name] = deployed(e, play(e, method, 3, COHORTS))
    close(rows["shown"], (rows["local"] + rows["global"]) / 2, 1e-6)


def public(kind: type) -> set[str]:
    return {name for name, value in vars(kind).items() if not name.startswith("_") and callable(value)}


def test_the_table_of_calls_is_complete() -> None:
    table = API[API.index("### Calls") : API.index("### Attributes")]
    assert set(re.findall(r"\bcohort\.(\w+)", table)) == public(Cohort)
    assert set(re.findall(r"\bs\.(\w+)\(", table)) >= public(Step) - {"begin"}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_paths_in_the_pages_exist(page: Path) -> None:
    """`core/rows.py` is in fedbench/, `conf/algorithm` at the top; x stands for any name."""
    words = re.findall(r"`([\w./-]+)`", page.read_text())
    paths = [w for w in words if "/" in w and re.search(r"\.(py|md|yaml)$|/$", w)]
    paths = [w for w in paths if not re.search(r"/(test_)?x\.", w)]
    gone = [w for w in paths if not any((root / w).exists() for root in (ROOT, ROOT / "fedbench"))]
    assert not gone
    links = re.findall(r"\]\((?!http)([^)#]+)\)", page.read_text())
    assert all((page.parent / link).exists() for link in links)


def test_examples_in_the_table_of_calls_call_it() -> None:
    rows = re.findall(r"^\| (`[^|]*`) \|[^|]*\| `(\w+\.py)` \|$", API, re.MULTILINE)
    assert len(rows) > 20
    for calls, file in rows:
        source = (ROOT / "fedbench" / "algorithms" / file).read_text()
        names = [c.split(".")[1].partition("(")[0] for c in re.findall(r"`([^`]+)`", calls)]
        assert any(re.search(rf"\.{name}\b", source) for name in names), (calls, file)


def test_the_overview_for_language_models_names_pages_and_commands_that_exist() -> None:
    text = (ROOT / "docs" / "llms.txt").read_text()
    pages = re.findall(r"\]\(([\w/]+)\.html\)", text)
    assert len(pages) > 8 and all((ROOT / f"{page}.md").is_file() for page in pages)
    named = re.findall(r"`python -m fedbench ([a-z]+)(?= |`)", text)
    assert {"report", "options", "check"} <= set(named) <= set(SUBCOMMANDS)


def sections_of_equations() -> dict[str, str]:
    """The sections of docs/equations_*.md by the method that their heading names first."""
    texts = [path.read_text() for path in sorted((ROOT / "docs").glob("equations_*.md"))]
    sections = [section for text in texts for section in text.split("\n## ")[1:]]
    return {m[1]: text for text in sections if (m := re.match(r".*\(`(\w+)`", text))}


def test_the_index_of_equations_links_every_section() -> None:
    """A link is the page and the heading in the form of GitHub, and each heading has one."""
    headings = [
        path.name + "#" + re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")
        for path in sorted((ROOT / "docs").glob("equations_*.md"))
        for heading in re.findall(r"^## (.*`.*)$", path.read_text(), re.MULTILINE)
    ]
    index = (ROOT / "docs" / "equations.md").read_text()
    assert set(re.findall(r"\]\((equations_\w+\.md#[\w-]+)\)", index)) == set(headings)
    assert len(headings) == len(set(headings)) == len(sections_of_equations()) > 50


@pytest.mark.parametrize("method", sections_of_equations())
def test_equations_name_options_first_with_their_defaults(method: str) -> None:
    options, text = compose([f"algorithm={method}"]).algorithm, sections_of_equations()[method].partition("**Options**")
    stated: dict[str, Any] = {}
    for key, value in re.findall(r"`algorithm\.(\w+)=([^`]+)`", text[2]):
        stated.setdefault(key, OmegaConf.create(f"value: {value}").value)
    assert stated == {key: options[key] for key in stated}
