"""``fedbench options``: every key of every option, with the type that it is checked against."""

import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from schemas import validated

from fedbench.app.compose import compose
from fedbench.app.options_command import _top_level, rows_of
from fedbench.commands import main
from fedbench.config.check import check
from fedbench.config.conf_tree import GROUPS, conf_dirs, group_options
from fedbench.core.nested import flatten

KEYED = [group for group in GROUPS if group != "experiment"]


@cache
def all_rows() -> list[dict[str, Any]]:
    return [row for name in (*_top_level(), *KEYED) for row in rows_of(name, conf_dirs())]


def test_every_key_of_a_default_run_is_listed_with_its_default() -> None:
    config = compose([])
    values, chosen = flatten(check(config)), dict(config.choices)
    rows = {row["key"]: row for row in all_rows() if row["option"] == chosen.get(row["group"])}
    keys = {
        key for key in values if not key.startswith(("choices", "paper", "callbacks")) and not key.endswith("_target_")
    }
    assert {key for key in keys if not key.startswith("model.columns.")} <= {*rows}
    different = {key for key in keys & {*rows} if rows[key]["default"] != values[key]}
    assert all("${" in str(rows[key]["default"]) for key in different)


def test_every_key_has_a_type_and_a_meaning_and_a_default_within_them() -> None:
    compare = {"gt": lambda a, b: a > b, "ge": lambda a, b: a >= b, "lt": lambda a, b: a < b, "le": lambda a, b: a <= b}
    for row in all_rows():
        assert row["type"] and row["meaning"], row
        default = row["default"]
        if isinstance(default, int | float) and not isinstance(default, bool):
            assert all(compare[name](default, bound) for name, bound in row["bounds"].items()), row
            assert all(math.isfinite(bound) for bound in row["bounds"].values())
        if isinstance(default, str) and row["choices"] and row["type"].startswith("one of"):
            assert default in row["choices"], row
    assert {(row["group"], row["option"]) for row in all_rows() if row["group"]} == {
        (group, option)
        for group in KEYED
        for option in group_options(group)
        if rows_of(f"{group}={option}", conf_dirs())
    }


def test_a_key_of_a_method_a_group_and_the_top_level(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["options", "algorithm=pgfed", "callbacks", "stop", "--json"]) == 0
    read = validated(capsys.readouterr().out, "options")
    keys = {row["key"]: row for row in read["keys"]}
    assert keys["algorithm.mu"] == {
        "key": "algorithm.mu",
        "group": "algorithm",
        "option": "pgfed",
        "type": "a number >= 0 or a list, each entry a number >= 0",
        "choices": [],
        "bounds": {"ge": 0},
        "default": 0.1,
        "meaning": "weight of the auxiliary risks",
        "source": "PGFed: Luo et al., ICCV 2023; values of the released script",
    }
    assert keys["callbacks.tensorboard.folder"]["default"] == "tensorboard"
    assert keys["stop.patience"]["group"] is None and "validation score" in keys["stop.patience"]["meaning"]
    assert [*read["groups"]] == ["algorithm", "callbacks"] and "ditto" in read["groups"]["algorithm"]
    assert main(["options", "optimizer=sgd", "experiment"]) == 0
    text = capsys.readouterr().out
    assert "  optimizer.lr=0.02  (a number > 0 or a list, each entry a number > 0)  or a list with one per" in text
    assert "  optimizer.schedule.per='round'  (one of round, step)  When the learning rate changes" in text


def test_options_of_the_user_and_unknown_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "optimizer").mkdir()
    (tmp_path / "optimizer" / "mine.yaml").write_text(
        "# Mine: a test\ndefaults: [sgd, _self_]\nlr: 0.5  # larger\n", encoding="utf-8"
    )
    assert main(["options", "optimizer=mine", "--config-dir", str(tmp_path), "--json"]) == 0
    keys = {row["key"]: row for row in validated(capsys.readouterr().out, "options")["keys"]}
    assert keys["optimizer.lr"]["default"] == 0.5 and keys["optimizer.lr"]["meaning"] == "larger"
    assert keys["optimizer.lr"]["source"] == "Mine: a test" and keys["optimizer.momentum"]["bounds"] == {
        "ge": 0,
        "le": 1,
    }
    for name, hint in (("optimiser", "did you mean optimizer?"), ("algorithm=pgfet", "did you mean pgfed")):
        assert main(["options", name]) == 2
        assert hint in capsys.readouterr().err
