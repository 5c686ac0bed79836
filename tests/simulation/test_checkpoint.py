"""A checkpoint is whole or is not there; reading one runs nothing."""

import os
import pickle
import re
from pathlib import Path

import pytest
import torch
from tiny import equal, on_disk_first

from fedbench.core.options import ConfigError
from fedbench.simulation import checkpoint
from fedbench.simulation.checkpoint import NAME, PREVIOUS


def state(round: int) -> dict:
    """What a simulation saves: numbers, text, tensors in dicts."""
    return {
        "round": round,
        "config_hash": "c",
        "partition_hash": "p",
        "algorithm": {"w": torch.full((50,), float(round))},
        "rows": {"theta": {"ids": torch.arange(3), "rows": torch.randn(3, 4)}},
        "record": "{}",
        "executor": "{}",
    }


def test_what_is_saved_is_read(tmp_path: Path) -> None:
    saved = state(3)
    checkpoint.save(tmp_path, saved)
    read = checkpoint.load(tmp_path)
    assert read["round"] == 3 and read.keys() == saved.keys() | {"digest", "file"}
    equal(read["rows"]["theta"], saved["rows"]["theta"])
    assert sorted(os.listdir(tmp_path)) == [NAME]


def test_the_one_before_is_kept(tmp_path: Path) -> None:
    for r in (1, 2, 3):
        checkpoint.save(tmp_path, state(r))
    assert sorted(os.listdir(tmp_path)) == sorted([NAME, PREVIOUS])
    assert checkpoint.load(tmp_path)["round"] == 3
    (tmp_path / NAME).unlink()  # killed between the two renames
    assert checkpoint.load(tmp_path)["round"] == 2


@pytest.mark.parametrize("keep", [0, 1, 100, 0.5, 0.99])
def test_a_truncated_one_is_passed_over(tmp_path: Path, keep: float, caplog) -> None:
    for r in (1, 2):
        checkpoint.save(tmp_path, state(r))
    whole = (tmp_path / NAME).read_bytes()
    (tmp_path / NAME).write_bytes(whole[: int(keep * len(whole)) if isinstance(keep, float) else keep])
    assert checkpoint.load(tmp_path)["round"] == 1
    assert NAME in caplog.text and "trying the previous one" in caplog.text


def test_a_partial_file_of_a_crash_is_ignored(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, state(1))
    (tmp_path / f"{NAME}.partial").write_bytes(b"half")
    assert checkpoint.load(tmp_path)["round"] == 1
    checkpoint.save(tmp_path, state(2))
    assert checkpoint.load(tmp_path)["round"] == 2
    assert sorted(os.listdir(tmp_path)) == sorted([NAME, PREVIOUS])


def test_a_crash_while_writing_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint.save(tmp_path, state(1))

    def half(values: dict, file) -> None:
        file.write(b"half of it")
        raise OSError("No space left on device")

    monkeypatch.setattr(torch, "save", half)
    with pytest.raises(OSError, match=r"No space"):
        checkpoint.save(tmp_path, state(2))
    assert checkpoint.load(tmp_path)["round"] == 1


def test_a_file_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a power cut leaves the name on a file that is empty."""
    with on_disk_first(monkeypatch) as renamed:
        for r in (1, 2):
            checkpoint.save(tmp_path, state(r))
    assert renamed.count(NAME) == 2


def test_none_and_none_readable_are_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"resume={tmp_path}: there is no {NAME}")):
        checkpoint.load(tmp_path)
    for name in (NAME, PREVIOUS):
        (tmp_path / name).write_bytes(b"PK\x03\x04 not a checkpoint")
    with pytest.raises(ConfigError, match=re.escape(f"resume={tmp_path}: no checkpoint can be used")) as error:
        checkpoint.load(tmp_path)
    assert "\n" not in str(error.value) and PREVIOUS in str(error.value)


class Payload:
    """Pickles as a call that leaves a file behind."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("how", ["torch.save", "pickle"])
def test_a_checkpoint_that_carries_code_is_refused_and_not_run(tmp_path: Path, how: str) -> None:
    payload = {**state(1), "algorithm": Payload(tmp_path / "ran")}
    if how == "torch.save":
        torch.save(payload, tmp_path / NAME)
    else:
        (tmp_path / NAME).write_bytes(pickle.dumps(payload, protocol=2))
    with pytest.raises(ConfigError, match=r"no checkpoint can be used"):
        checkpoint.load(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_something_else_under_the_name_is_no_checkpoint(tmp_path: Path) -> None:
    torch.save({"model": torch.zeros(3)}, tmp_path / NAME)
    with pytest.raises(ConfigError, match=r"no checkpoint can be used.*not a checkpoint of fedbench"):
        checkpoint.load(tmp_path)
