"""Files that are written whole or not at all, JSON that may be damaged, and nested values."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tiny import on_disk_first

from fedbench.core.files import read_json, replace_text, replacing
from fedbench.core.nested import flatten


def test_a_file_takes_the_place_of_the_old_one_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_text("old")
    with replacing(path) as partial:
        partial.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new" and os.listdir(tmp_path) == ["x"]


@pytest.mark.parametrize("error", [OSError("full"), ValueError(), KeyboardInterrupt()])
def test_a_failure_leaves_the_old_one_and_nothing_else(error: BaseException, tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_text("old")
    with pytest.raises(type(error)), replacing(path) as partial:
        partial.write_text("half")
        raise error
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["x"]


def test_what_failed_first_is_what_is_told(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="first"), replacing(tmp_path / "x") as partial:
        partial.mkdir()  # which unlink refuses
        raise ValueError("first")


def test_processes_do_not_share_a_name(tmp_path: Path) -> None:
    with replacing(tmp_path / "x", many_writers=True) as mine, replacing(tmp_path / "x") as other:
        assert mine.name == f"x.{os.getpid()}.partial" and other.name == "x.partial"
        mine.touch(), other.touch()


def test_a_durable_file_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with on_disk_first(monkeypatch) as names:
        with replacing(tmp_path / "x", durable=True) as partial:
            partial.write_text("x")
        replace_text(tmp_path / "y", ["a\n", "b\r\n"])
    assert names == ["x", "y"] and (tmp_path / "y").read_bytes() == b"a\nb\r\n"


def test_a_file_that_need_not_be_durable_costs_no_synchronization(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda file: pytest.fail("waits for the disk"))
    replace_text(tmp_path / "x", ["x"], durable=False)


@pytest.mark.parametrize("text", ["", "{", "[1]", "3", '{"a": 1', None])
def test_json_that_is_no_object_is_empty(text: str | None, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "x").write_text(text)
    assert read_json(tmp_path / "x") == {}


def test_json_that_is_one_is_read(tmp_path: Path) -> None:
    (tmp_path / "x").write_text('{"a": [1, null]}')
    assert read_json(tmp_path / "x") == {"a": [1, None]}


def test_nested_values_become_flat() -> None:
    values = {"a": 1, "b": {"c": {"d": [{"e": 2}]}, "f": {}}}
    assert flatten(values) == {"a": 1, "b.c.d": [{"e": 2}], "b.f": {}}
    assert flatten(values, "/", drop_empty=True) == {"a": 1, "b/c/d": [{"e": 2}]}
