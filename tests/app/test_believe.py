"""Resume believes nothing: what is read again is compared with what was written, and a finished run is looked at."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest
from tiny import compose

from fedbench.config.check import check
from fedbench.core.options import ConfigError
from fedbench.core.settings import save_config
from fedbench.core.split import Split
from fedbench.data import _stored_digest as stored_digest
from fedbench.data.base import Arrays
from fedbench.simulation import build, checkpoint
from fedbench.simulation.run_folder import is_finished
from fedbench.simulation.simulator import run

OPTIONS = [
    "algorithm=pgfed",
    "model=logistic",
    "partition.num_clients=6",
    "rounds=4",
    "local.epochs=1",
    "tracking=disabled",
    "hardware.device=cpu",
    "hardware.executor=loop",
    "checkpoint.every=1",
]
TABLES = ("metrics.csv", "clients.csv")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run on a file."""
    folder = tmp_path_factory.mktemp("whole")
    arrays = build.load(compose(OPTIONS))
    np.savez(folder / "data.npz", X=arrays.inputs, y=arrays.targets)
    (folder / "run").mkdir()
    run(config(folder), folder / "run")
    save_config(check(config(folder)), folder / "run" / "config.yaml")
    return folder


def config(folder: Path, *more: str):
    return compose([*OPTIONS, "dataset=npz", f"dataset.path={folder / 'data.npz'}", f"data_dir={folder}", *more])


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    shutil.copytree(whole / "run", tmp_path / "run")
    return tmp_path / "run"


def as_the_whole(folder: Path, whole: Path) -> bool:
    return all((folder / name).read_bytes() == (whole / "run" / name).read_bytes() for name in TABLES)


def finished(folder: Path, whole: Path) -> bool:
    return is_finished(folder, check(config(whole)))


# -- tables ----------------------------------------------------------------------------------------------
def last_row(text: bytes) -> bytes:
    return text[: text[:-1].rindex(b"\n") + 1]


@pytest.mark.parametrize("name", ["metrics.csv", "clients.csv", "costs.csv"])
@pytest.mark.parametrize(
    "damage",
    [
        last_row,
        lambda text: text[:-3],
        lambda text: text[:-20] + b"9" + text[-19:],
        lambda text: text[:-20] + b"\xff" + text[-19:],
    ],
)
def test_a_table_that_is_damaged_at_its_end_is_written_again(
    name: str, damage: Callable[[bytes], bytes], copy: Path, whole: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The checkpoint before is older than the damage."""
    (copy / name).write_bytes(damage((copy / name).read_bytes()))
    with caplog.at_level(logging.WARNING):
        run(config(whole), copy, resume=True)
    expected = f"{name} was shortened or changed after this checkpoint was written: restore {name}"
    assert f"checkpoint.pt cannot be used ({expected}); trying the previous one" in caplog.text
    assert as_the_whole(copy, whole) and finished(copy, whole)


@pytest.mark.parametrize("name", ["metrics.csv", "clients.csv", "costs.csv"])
@pytest.mark.parametrize(
    "damage",
    [lambda text: b"", lambda text: text[1:], lambda text: text[:60], lambda text: text.replace(b"\n1,", b"\n2,", 1)],
)
def test_a_table_that_is_damaged_from_early_on_is_refused(
    name: str, damage: Callable[[bytes], bytes], copy: Path, whole: Path
) -> None:
    (copy / name).write_bytes(damaged := damage((copy / name).read_bytes()))
    with pytest.raises(ConfigError, match=rf"no checkpoint can be used .*{name} was shortened or changed") as error:
        run(config(whole), copy, resume=True)
    assert "\n" not in str(error.value) and (copy / name).read_bytes() == damaged


def test_what_follows_the_checkpoint_may_be_anything(copy: Path, whole: Path) -> None:
    """Rows that a crash left torn behind the checkpoint's are cut off by their place, whatever they hold."""
    for name in TABLES:
        with open(copy / name, "ab") as file:
            file.write(b"\xff\xfe,not a row\n\x00")
    run(config(whole), copy, resume=True)
    assert as_the_whole(copy, whole)


# -- tensors ---------------------------------------------------------------------------------------------
def test_every_byte_of_a_tensor_counts(copy: Path, whole: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Zeroed and flipped bytes in the middle of a tensor, which torch reads without a word."""
    path = copy / checkpoint.NAME
    good = path.read_bytes()
    w = checkpoint.load(copy)["algorithm"]["w"].numpy().tobytes()
    start = good.index(w)
    for place, byte in ((start, good[start] ^ 1), (start + len(w) - 1, good[start + len(w) - 1] ^ 64)):
        path.write_bytes(good[:place] + bytes([byte]) + good[place + 1 :])
        with caplog.at_level(logging.WARNING):
            assert checkpoint.load(copy)["round"] == 3
        assert "checkpoint.pt cannot be used (the file was changed or damaged: restore it)" in caplog.text
    path.write_bytes(good[:start] + bytes(64) + good[start + 64 :])
    run(config(whole), copy, resume=True)
    assert as_the_whole(copy, whole)


def test_the_one_before_outlives_the_next_save(copy: Path) -> None:
    """A damaged checkpoint.pt must not take its place."""
    state = deepcopy(checkpoint.load(copy))  # else it would be read from the file, when needed
    (copy / checkpoint.NAME).write_bytes(b"damaged")
    checkpoint.save(copy, state, rotate=False)
    (copy / checkpoint.NAME).write_bytes(b"damaged")
    assert checkpoint.load(copy)["round"] == 3


def test_a_run_that_fell_back_keeps_the_sound_one(copy: Path, whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (copy / checkpoint.NAME).write_bytes(b"damaged")
    kept = []
    real = checkpoint.save

    def save(folder: Path, state: dict, rotate: bool) -> None:
        real(folder, state, rotate)
        (folder / checkpoint.NAME).rename(folder / "mine")
        kept.append(checkpoint.load(folder)["round"])
        (folder / "mine").rename(folder / checkpoint.NAME)

    monkeypatch.setattr(checkpoint, "save", save)
    run(config(whole, "rounds=6"), copy, resume=True)
    assert kept == [3, 4, 5]


# -- other files -----------------------------------------------------------------------------------------
def test_matrices_are_what_they_were(copy: Path, whole: Path) -> None:
    path = copy / "matrices.npz"
    good = path.read_bytes()
    with np.load(path) as file:
        arrays = dict(file)
    arrays["A"] = arrays["A"] + np.float32(1)
    np.savez(path, **arrays)
    with pytest.raises(ConfigError, match=r"matrices\.npz was changed or damaged after round 4"):
        run(config(whole), copy, resume=True)
    path.unlink()
    with pytest.raises(ConfigError, match=r"matrices\.npz was changed or damaged after round 4"):
        run(config(whole), copy, resume=True)
    path.write_bytes(good)
    run(config(whole, "rounds=5"), copy, resume=True)
    run(config(whole, "rounds=5"), copy, resume=True)


@pytest.mark.parametrize("name", ["partition.npz", "partition.json"])
def test_the_partitions_files_are_mended(name: str, copy: Path, whole: Path, caplog: pytest.LogCaptureFixture) -> None:
    good = (copy / name).read_bytes()
    for damage in (good[:100], good[:200] + b"123" + good[203:], b""):
        (copy / name).write_bytes(damage)
        with caplog.at_level(logging.WARNING):
            run(config(whole), copy, resume=True)
        assert "both are written again" in caplog.text and (copy / name).read_bytes() == good
        assert Split.load(copy / "partition.npz").hash == json.loads((copy / "partition.json").read_text())["hash"]
        caplog.clear()


# -- finished already ------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["metrics.csv", "clients.csv", "costs.csv", "matrices.npz", "partition.json"])
def test_a_finished_run_is_looked_at(name: str, copy: Path, whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert finished(copy, whole) and capsys.readouterr().err == ""
    text = (copy / name).read_bytes()
    (copy / name).write_bytes(text[:-5] + bytes([text[-5] ^ 1]) + text[-4:])
    assert not finished(copy, whole)
    assert f"run is finished, but {name} was changed or damaged" in capsys.readouterr().err
    (copy / name).unlink()
    assert not finished(copy, whole)


def test_a_summary_is_looked_at(copy: Path, whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = copy / "summary.json"
    values = json.loads(path.read_text())
    values["best"]["values"]["personal/accuracy"] = 0.999
    path.write_text(json.dumps(values))
    assert not finished(copy, whole) and "but summary.json was changed or damaged" in capsys.readouterr().err
    run(config(whole), copy, resume=True)
    assert finished(copy, whole) and json.loads(path.read_text())["best"]["values"]["personal/accuracy"] < 0.999


def test_an_older_summary_is_believed(copy: Path, whole: Path) -> None:
    values = json.loads((copy / "summary.json").read_text())
    for name in ("digest", "files", "data_hash"):
        del values[name]
    (copy / "summary.json").write_text(json.dumps(values))
    (copy / "clients.csv").unlink()
    assert finished(copy, whole)


# -- data ------------------------------------------------------------------------------------------------
@pytest.fixture
def data(whole: Path, tmp_path: Path) -> Path:
    """The data file, which is put back."""
    shutil.copy2(whole / "data.npz", tmp_path / "kept")
    yield whole / "data.npz"
    shutil.copy2(tmp_path / "kept", whole / "data.npz")


def changed(path: Path, name: str, index: int) -> None:
    with np.load(path) as file:
        arrays = dict(file)
    arrays[name][index] = (arrays[name][index] + 1) % 10
    np.savez(path, **arrays)


@pytest.mark.parametrize("name, index", [("X", 1796), ("y", 5)])
def test_changed_data_are_noticed(name: str, index: int, data: Path, copy: Path, whole: Path) -> None:
    """One value or label of another client's: resume and a finished cell refuse, until the file is put back."""
    changed(data, name, index)
    with pytest.raises(ConfigError, match=r"the data have changed since the run"):
        run(config(whole), copy, resume=True)
    with pytest.raises(ConfigError, match=r"is finished, but its data have changed \(digest"):
        finished(copy, whole)
    assert as_the_whole(copy, whole)


def test_data_that_are_gone_are_said(data: Path, copy: Path, whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data.unlink()
    assert finished(copy, whole)
    assert "cannot check whether the data have changed (" in capsys.readouterr().err


def test_data_are_loaded_again_only_if_a_file_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A set of MIN_BYTES bytes is remembered in data_dir; a smaller one, or one of a user's class, is loaded again."""
    file, loads = tmp_path / "numbers.txt", []
    data_dir = str(tmp_path / "data")
    source = {"_target_": "fedbench.data.x.X", "path": str(file)}
    file.write_text("1")

    def make() -> Arrays:
        loads.append(1)
        return Arrays(np.full((2, 3), float(file.read_text()), np.float32), np.array([0, 1]), np.zeros(2, np.int8), 2)

    def digest(source: dict[str, str]) -> str:
        return stored_digest.digest(source, data_dir, make)

    monkeypatch.setattr(stored_digest, "MIN_BYTES", 1)
    first = stored_digest.load(source, data_dir, make).digest
    assert digest(source) == first and len(loads) == 1
    os.utime(file, ns=(1, 1))
    assert [digest(source), digest(source)] == [first, first] and len(loads) == 2
    file.write_text("2")
    assert digest(source) != first and len(loads) == 3
    (tmp_path / "data" / "new.txt").write_text("of another set, or of this one")
    assert digest(source) != first and len(loads) == 4
    for big, target in ((1, "mine.Source"), (1 << 30, "fedbench.data.y.Y")):
        monkeypatch.setattr(stored_digest, "MIN_BYTES", big)
        loads.clear()
        assert digest({**source, "_target_": target}) == digest({**source, "_target_": target}) and len(loads) == 2


def test_a_digest_is_of_everything() -> None:
    def arrays(**changes: object) -> Arrays:
        values = {
            "inputs": np.arange(6, dtype=np.float32).reshape(2, 3),
            "targets": np.array([0, 1]),
            "split": np.zeros(2, np.int8),
            "num_classes": 2,
            "class_names": ["a", "b"],
            "mean": (0.5,),
        }
        return Arrays(**{**values, **changes})

    digests = [
        arrays(**changes).digest
        for changes in (
            {},
            {"inputs": np.arange(6, dtype=np.float32).reshape(3, 2)},
            {"inputs": np.ones((2, 3), np.float32)},
            {"inputs": np.arange(6).reshape(2, 3)},
            {"targets": np.array([1, 0])},
            {"split": np.ones(2, np.int8)},
            {"class_names": ["a", "c"]},
            {"mean": (0.25,)},
            {"domain": np.zeros(2, np.int64)},
            {"inputs": {"a": np.arange(6, dtype=np.float32).reshape(2, 3)}},
        )
    ]
    assert len(set(digests)) == len(digests) and arrays().digest == digests[0]
