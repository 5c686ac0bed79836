"""Names of the package are terms of the field: a vague word may not be the whole name of anything."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ROOT

PACKAGE = ROOT / "fedbench"

# Former names without a clear meaning.
VAGUE = set(
    """
    Chain Damped Interior Keyed Natural Operator Pair Program Sent Share
    alone announce box caller captures cell continuing contracts counted drawn due faults follow form heard held house
    kept known leaks longest lost mass memory menu newcomer newcomer_row numbered outputs own pace pack
    place plain printed purpose recorder replaces reporting resting rules said say seen sent silo sites some_samples
    stopping surroundings survivors tally taps tell telling told tuned_at_end twins units unpack waits whereabouts
    whole_split wing words
    """.split()  # noqa: SIM905
)

# Where a word has its usual meaning or is stored: beginnings of paths in the package, "" for all of it.
ALLOWED = {
    "cell": "data nn/client_random pages report testing/_probes",  # of a table, recurrent network or closure
    "Chain": "compression/chain",  # an option: a chain of compressors
    "form": "report/drawing",  # hashed in the figures of pages
    "held": "algorithms/_core_exchange",  # stored in checkpoints
    "mass": "algorithms/_transport",  # of a transport plan
    "memory": "core/memory",  # of the machine
    "Operator": "nn/batched_operators",  # of a traced graph
    "outputs": "",  # of a layer or model
    "own": "models/clip_prompt models/tabnet",  # a stored parameter; an option
    "place": "algorithms/lc_fed",  # an option
    "printed": "pages/template",  # a function of page templates
    "purpose": "engine/cohort models/clip_prompt nn/flat testing/_probes",  # a part of random keys
    "seen": "algorithms/_core_exchange compression/dadaquant",  # stored in checkpoints
    "silo": "data",  # of cross-silo learning, as in the option dataset.silos
    "sites": "data partition tools",  # clinical sites
    "told": "models/noise_predictor",  # a stored parameter
    "units": "models/tabnet",  # a stored parameter
    "words": "data models",  # of a text
}


def names(path: Path) -> Iterator[tuple[int, str]]:
    """The names that a module defines, with their lines, and its own name."""
    yield 1, path.stem
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.lineno, node.name
            case ast.arg():
                yield node.lineno, node.arg
            case ast.Name(ctx=ast.Store()):
                yield node.lineno, node.id
            case ast.Attribute(ctx=ast.Store()):
                yield node.lineno, node.attr


@pytest.fixture(scope="module")
def uses() -> dict[str, list[str]]:
    """Where each vague word is a name, as "core/memory.py:1"."""
    found = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        for line, name in names(path):
            word = name.strip("_")
            word = word.lower() if word.isupper() else word
            if word in VAGUE:
                found[word].append(f"{path.relative_to(PACKAGE).as_posix()}:{line}")
    return found


def test_names_are_not_vague(uses: dict[str, list[str]]) -> None:
    allowed = {word: tuple(paths.split()) or ("",) for word, paths in ALLOWED.items()}
    vague = [f"{place} {word}" for word in uses for place in uses[word] if not place.startswith(allowed.get(word, ()))]
    assert not vague, "\n".join(["name what it is, in terms of the field:", *vague])


@pytest.mark.parametrize("word", ALLOWED)
def test_exceptions_are_in_use(word: str, uses: dict[str, list[str]]) -> None:
    assert word in VAGUE
    assert [path for path in ALLOWED[word].split() or [""] if not any(p.startswith(path) for p in uses[word])] == []
