"""What a search may try: every declared range is readable, has the default or a range around it, and a source."""

from pathlib import Path

import pytest

from fedbench.app.compose import Composer
from fedbench.config.conf_tree import group_options, read_option
from fedbench.core.options import ConfigError
from fedbench.tune.space import (
    COMMENT,
    SEARCHED_GROUPS,
    Dimension,
    declared,
    default_point,
    dimension,
    grid,
    search_space,
)

CONF = Path(__file__).parents[2] / "conf"
COMPOSER = Composer()
OPTIONS = [(group, option) for group in SEARCHED_GROUPS for option in group_options(group)]


def parsed(text: str) -> Dimension:
    return dimension(COMPOSER.parse([text])[0])


@pytest.mark.parametrize("group, option", OPTIONS, ids=lambda value: value)
def test_declared_ranges_are_of_options_and_contain_their_defaults(group: str, option: str) -> None:
    ranges = declared(group, option, COMPOSER.folders)
    values = read_option(f"{group}/{option}")
    for key, text in ranges.items():
        name = key.removeprefix(f"{group}.")
        assert name in values, f"{group}={option} has no option {name}"
        assert values[name] is None or parsed(f"{key}={text}").contains(values[name]), f"{key}: the default is outside"
    lines = (CONF / group / f"{option}.yaml").read_text().splitlines()
    assert len([line for line in lines if "# search" in line]) == len(ranges), "a comment that is not read"


def test_a_comment_has_a_key_values_and_a_source() -> None:
    assert COMMENT.findall("# search: mu=choice(0.1,1); paper, table 3\n") == [
        ("mu", "choice(0.1,1)", "paper, table 3")
    ]
    assert COMMENT.findall("# search: mu=choice(0.1,1)\n") == []


def test_kinds_of_values() -> None:
    assert parsed("a.b=1,2").values == parsed("a.b=choice(1,2)").values == ("1", "2")
    assert parsed("a.b=range(1,4)").values == ("1", "2", "3")
    assert parsed("a.b=interval(0.5,2)") == Dimension("a.b", low=0.5, high=2)
    assert parsed("a.b=tag(log,interval(0.1,10))").log
    assert parsed("a.b=tag(log,int(interval(1,64)))") == Dimension("a.b", low=1, high=64, log=True, integer=True)


@pytest.mark.parametrize("text", ["a.b=3", "a.b=interval(2,1)", "a.b=tag(log,interval(0,1))"])
def test_no_search_in_one_value_or_an_empty_interval(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^a\.b="):
        parsed(text)


@pytest.mark.parametrize("value, rounded", [(0.0123456, 0.01235), (1234.56, 1235.0), (0.100001, 0.1), (0.0999, 0.1)])
def test_drawn_numbers_are_short_and_stay_inside(value: float, rounded: float) -> None:
    assert Dimension("a", low=0.1 if rounded == 0.1 else 0.001, high=5000).rounded(value) == rounded


def test_the_command_replaces_declared_ranges_and_fixes_options() -> None:
    composed = COMPOSER.compose(["algorithm=fedprox"])
    space = search_space(composed, [], COMPOSER, [])
    assert list(space) == ["algorithm.mu", "optimizer.lr"]
    given = COMPOSER.parse(["algorithm.mu=0.1,0.2", "algorithm.lam=1,2", "local.epochs=1,5"])
    space = search_space(composed, given, COMPOSER, ["optimizer.lr"])
    assert {key: item.values for key, item in space.items()} == {
        "algorithm.mu": ("0.1", "0.2"),
        "local.epochs": ("1", "5"),
    }
    assert default_point(space, composed) == {}  # mu=0.01 and two epochs are not among the values
    assert grid(space)[1] == {"algorithm.mu": "0.1", "local.epochs": "5"} and len(grid(space)) == 4


def test_a_null_default_can_be_searched() -> None:
    given = COMPOSER.parse(["algorithm.personal_epochs=1,2"])
    assert "algorithm.personal_epochs" in search_space(COMPOSER.compose(["algorithm=ditto"]), given, COMPOSER, [])


def test_a_grid_needs_listed_values() -> None:
    with pytest.raises(ConfigError, match=r"^--search grid needs listed values, and a\.b has an interval"):
        grid({"a.b": Dimension("a.b", low=0, high=1)})
