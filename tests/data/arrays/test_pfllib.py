"""dataset=pfllib: a folder made by PFLlib's layout rules becomes a run, client by client; what a pickle may not do."""

from __future__ import annotations

import codecs
import csv
import json
import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import compose

from fedbench.core.options import ConfigError
from fedbench.core.settings import save_config
from fedbench.core.split import Split
from fedbench.data.arrays.pfllib import PFLlib
from fedbench.report.runs import Run
from fedbench.simulation import build
from fedbench.simulation.simulator import run
from fedbench.tools import export

SIZES = {"train": [12, 30, 7, 9, 8, 10, 11, 9, 8, 9, 20], "test": [4, 10, 3, 3, 2, 3, 4, 3, 3, 3, 5]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """As the generators write it: one object array `data` in each file, a dict of float32 x and int64 y."""
    path, rng = tmp_path / "Digits", np.random.default_rng(0)
    for part, sizes in SIZES.items():
        (path / part).mkdir(parents=True)
        for i, n in enumerate(sizes):
            x = rng.normal(size=(n, 1, 8, 8)).astype(np.float32)
            np.savez_compressed(path / part / f"{i}.npz", data={"x": x, "y": rng.integers(0, 4, n)})
    (path / "config.json").write_text(json.dumps({"num_clients": 11, "num_classes": 10, "alpha": 0.1}))
    return path


def stored(path: Path) -> tuple[np.ndarray, np.ndarray]:
    data = np.load(path, allow_pickle=True)["data"].tolist()
    return data["x"], data["y"]


def test_clients_and_parts_are_those_of_the_folder(folder: Path) -> None:
    """Client 10 comes after client 9, not after client 1; classes that nobody shows are counted."""
    arrays = PFLlib(str(folder)).load()
    assert arrays.num_classes == 10 and arrays.inputs.dtype == np.float32 and arrays.targets.dtype == np.int64
    words = ["dataset=pfllib", f"dataset.path={folder}", "partition=domain"]
    split = build.partition(compose(words), arrays)
    for part, sizes in SIZES.items():
        lists = getattr(split, part)
        assert lists.sizes.tolist() == sizes
        for i in range(len(sizes)):
            x, y = stored(folder / part / f"{i}.npz")
            np.testing.assert_array_equal(arrays.inputs[lists[i]], x)
            np.testing.assert_array_equal(arrays.targets[lists[i]], y)


def test_the_folder_becomes_a_run(folder: Path, tmp_path: Path) -> None:
    words = ["dataset=pfllib", f"dataset.path={folder}", "partition=domain", "model=logistic", "algorithm=fedavg"]
    (tmp_path / "run").mkdir()
    found = run(compose([*words, "rounds=2", "tracking=disabled", "hardware.executor=vmap"]), tmp_path / "run")
    assert found["num_clients"] == 11
    assert Split.load(tmp_path / "run" / "partition.npz").train.sizes.tolist() == SIZES["train"]


def test_clients_keep_the_numbers_of_their_files(folder: Path, tmp_path: Path) -> None:
    """Files 0, 1, 3 and 10: in every table, in reports and in what is exported, also of a run that went on."""
    for part in SIZES:
        for path in (folder / part).glob("*.npz"):
            if path.stem not in ("0", "1", "3", "10"):
                path.unlink()
    words = ["dataset=pfllib", f"dataset.path={folder}", "partition=domain", "model=logistic", "algorithm=local"]
    words += ["tracking=disabled", "hardware.executor=vmap"]
    place = tmp_path / "run"
    place.mkdir()
    run(compose([*words, "rounds=1"]), place)
    save_config(cfg := compose([*words, "rounds=2"]), place / "config.yaml")
    run(cfg, place, resume=True)
    with (place / "clients.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(r["client"], r["name"], r["n_train"]) for r in rows] == [
        ("0", "0", "12"), ("1", "1", "30"), ("2", "3", "9"), ("3", "10", "20")] * 2  # fmt: skip
    assert json.loads((place / "partition.json").read_text())["names"] == ["0", "1", "3", "10"]
    assert Split.load(place / "partition.npz").names == ("0", "1", "3", "10")
    reported = Run(place)
    assert reported.partition["names"] == ["0", "1", "3", "10"]
    assert reported.clients("n_train").iloc[0].tolist() == [12, 30, 9, 20]
    assert export.predictions(place)["names"].tolist() == ["0", "1", "3", "10"]
    last, third = export.client_state(place, "10"), export.client_state(place, "3")
    assert all(torch.equal(last[k], v) for k, v in export.client_state(place, 3).items())
    assert not torch.equal(last["head.weight"], third["head.weight"])
    for other in ("2", "x"):
        with pytest.raises(ConfigError, match=rf"an integer from 0 to 3, or a name \(0, 1, 3, 10\), got '{other}'"):
            export.client_state(place, other)


def test_lists_of_numbers_are_arrays_too(folder: Path) -> None:
    """As older folders have them."""
    x, y = stored(folder / "train" / "3.npz")
    np.savez(folder / "train" / "3.npz", data={"x": x.tolist(), "y": y.tolist()})
    arrays = PFLlib(str(folder)).load()
    np.testing.assert_array_equal(arrays.inputs[(arrays.domain == 3) & (arrays.split == 0)], x)


class Told:
    """What a pickle may do when it is read."""

    def __reduce__(self) -> Any:
        return print, ("it ran",)


def test_a_pickle_builds_arrays_alone_unless_it_is_trusted(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    x, y = stored(folder / "test" / "0.npz")
    np.savez(folder / "test" / "0.npz", data={"x": x, "y": y, "z": Told()})
    for trust in (None, "Other"):
        with pytest.raises(ConfigError, match=r"0\.npz holds more than arrays \(its pickle asks for builtins\.print\)"):
            PFLlib(str(folder), trust).load()
        with pytest.raises(ConfigError, match=r"set dataset\.trust=Digits if you trust its author"):
            PFLlib(str(folder), trust).load()
    assert "it ran" not in capsys.readouterr().out
    assert len(PFLlib(str(folder), "Digits").load()) == sum(map(sum, SIZES.values()))
    assert "it ran" in capsys.readouterr().out


class Built:
    """What a pickle may say: a callable, its arguments, and a state."""

    def __init__(self, *said: Any):
        self.said = said

    def __reduce__(self) -> Any:
        return self.said


def hidden() -> Built:
    """A dtype of objects that says that it has none."""
    state = [*np.dtype([("a", "O")]).__reduce__()[2]]  # type: ignore[misc]
    return Built(np.dtype, ("V8", False, True), (*state[:-1], 0))


EMPTY = (np.empty(0).__reduce__()[0], (np.ndarray, (0,), b"b"))  # type: ignore[misc]
SCALAR = np.float64(0).__reduce__()[0]  # type: ignore[misc]


@pytest.mark.parametrize(
    ("said", "asked"),
    [
        (Built(np.ndarray, ((1,), np.dtype("O"), bytes(8))), "numpy.ndarray of 3 arguments"),
        (Built(*EMPTY, (1, (1,), np.dtype("O"), False, bytes(8))), "a dtype O8"),
        (Built(*EMPTY, (1, (1,), hidden(), False, bytes(8))), "a dtype V8"),
        (Built(*EMPTY, (1, (-1,), np.dtype("f8"), False, b"")), r"arrays of shape \(-1,\)"),
        (Built(codecs.encode, ("x", "rot13")), "_codecs.encode to rot13"),
        (Built(SCALAR, (hidden(), bytes(8))), "a dtype V8"),
        (Built(SCALAR, (np.dtype("O"), bytes(8))), "a dtype O8"),
    ],
)
def test_addresses_are_taken_from_no_pickle(said: Built, asked: str, folder: Path) -> None:
    """NumPy would read these bytes as pointers to objects; all are null here, which it shows as None."""
    path = folder / "train" / "0.npz"
    with zipfile.ZipFile(path) as archive:
        content = archive.read("data.npy")
    start = content.index(b"\n") + 1
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("data.npy", content[:start] + pickle.dumps(said))
    with pytest.raises(ConfigError, match=f"its pickle asks for {asked}"):
        PFLlib(str(folder)).load()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_names_of_older_and_newer_numpy_are_known(folder: Path) -> None:
    """numpy.core became numpy._core: folders of both are read."""
    path = folder / "train" / "0.npz"
    x, _ = stored(path)
    with zipfile.ZipFile(path) as archive:
        content = archive.read("data.npy")
    start = content.index(b"\n") + 1
    for protocol in (2, 3, 4, 5):
        data = np.empty((), object)
        data[()] = {"x": x, "y": np.arange(len(x)) % 4}
        for core in (b"numpy._core.multiarray", b"numpy.core.multiarray"):
            stream = pickle.dumps(data, protocol)
            name = b"numpy._core.multiarray" if b"numpy._core" in stream else b"numpy.core.multiarray"
            stream = _renamed(stream, name, core, protocol)
            with zipfile.ZipFile(path, "w") as archive:
                archive.writestr("data.npy", content[:start] + stream)
            arrays = PFLlib(str(folder)).load()
            np.testing.assert_array_equal(arrays.inputs[(arrays.domain == 0) & (arrays.split == 0)], x)


def _renamed(stream: bytes, old: bytes, new: bytes, protocol: int) -> bytes:
    """The pickle with another module's name: by line, or with its length before it."""
    if protocol < 4:
        return stream.replace(b"c" + old + b"\n", b"c" + new + b"\n")
    frame = stream.index(b"\x95")  # a frame says its length, which changes
    body = stream[frame + 9 :].replace(bytes([len(old)]) + old, bytes([len(new)]) + new)
    return stream[:frame] + body


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda f: (f / "test" / "10.npz").unlink(), r"train/ has 11 and test/ has 10 files of clients"),
        (lambda f: np.savez(f / "test" / "0.npz", data={"x": np.zeros(2)}), r"0\.npz must contain an array `data`"),
        (lambda f: np.savez(f / "test" / "0.npz", x=np.zeros(2)), r"0\.npz cannot be read: KeyError"),
        (lambda f: (f / "test" / "0.npz").write_bytes(b"PK"), r"0\.npz cannot be read"),
        (
            lambda f: np.savez(f / "test" / "0.npz", data={"x": [[1], [1, 2]], "y": [0, 1]}),
            r"0\.npz must contain numbers x \[n, \.\.\.\]",
        ),
        (
            lambda f: np.savez(f / "test" / "0.npz", data={"x": np.zeros((2, 3), np.float32), "y": np.arange(2)}),
            r"must have one shape, but those of the clients have \(1, 8, 8\), \(3,\)",
        ),
    ],
)
def test_what_is_no_folder_of_pfllib(change: Any, sentence: str, folder: Path) -> None:
    change(folder)
    with pytest.raises(ConfigError, match=sentence):
        PFLlib(str(folder)).load()


def test_a_path_is_asked_for() -> None:
    with pytest.raises(
        ConfigError,
        match=r"dataset=pfllib needs a folder that PFLlib wrote, but dataset\.path is null: set dataset\.path",
    ):
        PFLlib().load()
