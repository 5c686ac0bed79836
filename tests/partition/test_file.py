"""partition=file: partition.npz of another run, and index lists in every form, as they are or cut; what is refused."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny import compose

from fedbench.core.options import ConfigError
from fedbench.core.split import Split
from fedbench.data.base import TEST, Arrays
from fedbench.partition.base import build_split
from fedbench.partition.file import File
from fedbench.simulation.simulator import run

LISTS = [[5, 0, 7, 2], [1, 9, 4], [3, 8]]
CUT = [{"train": [5, 0], "test": [7, 2]}, {"train": [1], "test": [9, 4]}, {"train": [3], "test": [8]}]


def data(n: int = 12, **given: Any) -> Arrays:
    return Arrays(np.zeros((n, 1), np.float32), np.arange(n) % 3, np.zeros(n, np.int8), 3, **given)


def listed(split: Split, part: str) -> list[list[int]]:
    return [getattr(split, part)[i].tolist() for i in range(split.num_clients)]


def written(folder: Path, name: str, content: Any) -> Path:
    path = folder / name
    match path.suffix:
        case ".json":
            path.write_text(json.dumps(content))
        case ".csv":
            path.write_text(content)
        case ".npy":
            np.save(path, content)
        case ".npz":
            np.savez(path, **content)
        case ".pkl":
            path.write_bytes(pickle.dumps(content))
    return path


OWNER = np.array([0, 1, 0, 2, 1, 0, -1, 0, 2, 1, -1, -1])
ROWS = "index,client\n" + "".join(f"{i},{c}\n" for c, samples in enumerate(LISTS) for i in samples)
WITH_PARTS = "part,client,index\n" + "".join(
    f"{part},site {c},{i}\n" for c, of in enumerate(CUT) for part, samples in of.items() for i in samples
)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("lists.json", LISTS),
        ("clients.json", {"2": LISTS[2], "0": LISTS[0], "1": LISTS[1]}),
        ("rows.csv", ROWS),
        ("lists.npz", {str(i): np.array(LISTS[i]) for i in (1, 0, 2)}),
        ("owner.npy", OWNER),
        ("lists.pkl", [np.array(x) for x in LISTS]),
    ],
)
def test_lists_are_cut_as_those_of_any_partition(name: str, content: Any, tmp_path: Path) -> None:
    """Clients in the order of their numbers; what is named nowhere is nobody's; published parts are respected."""
    made = File(str(written(tmp_path, name, content)))
    split = build_split(data(), made, None, 1, test_fraction=0.5)
    held = [{*a, *b} for a, b in zip(listed(split, "train"), listed(split, "test"), strict=True)]
    assert held == [set(x) for x in LISTS] and split.test.sizes.tolist() == [2, 2, 1]
    assert build_split(data(), made, None, 2, test_fraction=0.5).hash != split.hash
    arrays = data()
    arrays.split[[7, 9, 8]] = TEST
    split = build_split(arrays, made, 3, 1, split="published")
    assert listed(split, "test") == [[7], [9], [8]]
    assert [set(x) for x in listed(split, "train")] == [{0, 2, 5}, {1, 4}, {3}]


@pytest.mark.parametrize(
    ("name", "content", "names"),
    [
        ("lists.json", LISTS, None),
        ("numbers.json", {str(i): x for i, x in enumerate(LISTS)}, None),
        ("gap.json", {"10": LISTS[2], "3": LISTS[0], "7": LISTS[1]}, ("3", "7", "10")),
        ("named.json", dict(zip(["north  ward", "east", "a,b"], CUT)), ("north ward", "east", "a,b")),
        ("rows.csv", WITH_PARTS, ("site 0", "site 1", "site 2")),
        ("lists.npz", dict(zip(["b", "a", "c"], map(np.array, LISTS))), ("b", "a", "c")),
        ("unnamed.npz", {f"arr_{i}": np.array(x) for i, x in enumerate(LISTS)}, None),
        ("owner.npy", OWNER, None),
        ("ints.pkl", {4: LISTS[0], 5: LISTS[1], 6: LISTS[2]}, ("4", "5", "6")),
    ],
)
def test_clients_keep_their_names(name: str, content: Any, names: tuple[str, ...] | None, tmp_path: Path) -> None:
    """Also through partition.npz."""
    split = build_split(data(), File(str(written(tmp_path, name, content))), None, 1, test_fraction=0.5)
    assert split.names == names
    split.save(tmp_path / "partition.npz")
    again = build_split(data(), File(str(tmp_path / "partition.npz")), None, 1)
    assert again.names == names and again.hash == split.hash


def test_parts_may_list_named_clients_in_any_order(tmp_path: Path) -> None:
    parts = {"train": {"b": [0, 1], "a": [2, 3]}, "test": {"a": [4], "b": [5]}}
    split = build_split(data(), File(str(written(tmp_path, "parts.json", parts))), None, 1)
    assert split.names == ("b", "a") and listed(split, "train") == [[0, 1], [2, 3]]
    assert listed(split, "test") == [[5], [4]]
    other = {"train": {"b": [0, 1], "a": [2, 3]}, "test": {"a": [4], "c": [5]}}
    with pytest.raises(ConfigError, match="client b not in all of its parts"):
        _ = File(str(written(tmp_path, "other.json", other))).content
    twice = {"7": [0, 1], "007": [2, 3]}
    with pytest.raises(ConfigError, match="'007' and '7' are equal numbers"):
        _ = File(str(written(tmp_path, "twice.json", twice))).content


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("clients.json", CUT),
        ("parts.json", {part: [of[part] for of in CUT] for part in ("test", "train")}),
        ("named.json", {f"site {i}": of for i, of in enumerate(CUT)}),
        ("rows.csv", WITH_PARTS),
        ("partition.pkl", {"data_indices": [{k: np.array(v) for k, v in of.items()} for of in CUT], "separation": {}}),
    ],
)
def test_parts_are_taken_as_they_are(name: str, content: Any, tmp_path: Path) -> None:
    split = build_split(data(), File(str(written(tmp_path, name, content))), None, 1, test_fraction=0.9)
    assert [listed(split, part) for part in ("train", "test")] == [[of[p] for of in CUT] for p in ("train", "test")]
    assert split.val.sizes.tolist() == [0, 0, 0]


QUICK = [
    *("dataset=digits", "model=logistic", "clients_per_round=3", "rounds=2", "tracking=disabled"),
    *("hardware.device=cpu", "hardware.executor=vmap", "algorithm=pgfed"),
]


def test_the_partition_of_another_run_gives_its_numbers(tmp_path: Path) -> None:
    """Bit for bit, the validation parts too."""
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    run(compose([*QUICK, "partition.num_clients=6", "dataset.val_fraction=0.2"]), tmp_path / "first")
    path = tmp_path / "first" / "partition.npz"
    run(compose([*QUICK, "partition=file", f"partition.path={path}"]), tmp_path / "second")
    names = ("metrics.csv", "clients.csv", "partition.npz")
    assert all((tmp_path / "first" / n).read_bytes() == (tmp_path / "second" / n).read_bytes() for n in names)


def test_a_partition_of_a_run_on_other_data_is_refused(tmp_path: Path) -> None:
    """By the digest that the run's summary has, however many samples there are."""
    split = build_split(data(), File(str(written(tmp_path, "lists.json", CUT))), None, 1)
    split.save(tmp_path / "partition.npz")
    (tmp_path / "summary.json").write_text(json.dumps({"data_hash": data().digest}))
    again = File(str(tmp_path / "partition.npz"))
    assert build_split(data(), again, None, 1).hash == split.hash
    with pytest.raises(ConfigError, match=r"is from a run on other data"):
        build_split(data(20), again, None, 1)


class Told(list):
    """What a pickle may do when it is read."""

    def __reduce__(self) -> Any:
        return print, ("it ran",)


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("lists.json", [[0, 1], [2, 12]], r"has sample 12, but this data set has 0 to 11"),
        ("lists.json", [{"train": [0], "test": [-1]}], r"has sample -1 in its part test"),
        (
            "lists.json",
            [[0, 1, 2, 2], [3, 4]],
            r"sample 2 to client 0 \((train|test)\), client 0 \((train|test)\): assign each",
        ),
        (
            "lists.json",
            [{"train": [0, 1], "test": [5]}, {"train": [3, 5], "test": [1]}],
            r"File assigned 2 samples to .*, for example sample 1 to client 0 \(train\), client 1 \(test\): assign",
        ),
        ("lists.json", [[0, 1], [2.5]], "must have whole numbers"),
        ("lists.json", [{"train": [0], "holdout": [1]}], "has the parts train, holdout"),
        ("lists.json", {"train": [[0], [1]], "test": [[2]]}, "must have a list for each client in each"),
        ("lists.json", [], "must have a list for each client"),
        ("lists.json", [[0, 1], [2]], "fewer than 2 samples.*give these clients more samples in partition.path="),
        ("rows.csv", "sample,client\n1,2\n", "needs the columns index and client"),
        ("rows.csv", "index,client\none,2\n", "cannot be read as index lists: ValueError"),
        ("lists.txt", "", r"must end in \.npz, \.json, \.csv, \.npy, \.pkl"),
        ("gone.json", None, "gone.json does not exist"),
        ("lists.npy", np.array([[1], None], dtype=object), "cannot be read as index lists"),
        (
            "lists.pkl",
            Told(),
            r"asks for builtins\.print\), which may run code when it is read: set partition\.trust=lists\.pkl",
        ),
    ],
)
def test_what_is_no_partition_of_these_data(
    name: str, content: Any, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / name if content is None else written(tmp_path, name, content)
    path.touch() if name == "lists.txt" else None
    with pytest.raises(ConfigError, match=sentence):
        build_split(data(), File(str(path), trust="another.pkl"), None, 1)
    assert "it ran" not in capsys.readouterr().out


def test_a_trusted_pickle_may_run_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, "lists.pkl", {"data_indices": [np.array([0, 1]), [2, 3]], "separation": Told()})
    assert [x.tolist() for x in File(str(path), trust="lists.pkl").content.lists[""]] == [[0, 1], [2, 3]]
    assert "it ran" in capsys.readouterr().out


def test_a_path_and_as_many_clients_are_asked_for() -> None:
    with pytest.raises(ConfigError, match=r"partition=file needs a file: set partition\.path"):
        File()
    with pytest.raises(ConfigError, match="returned 10 train lists for 7 clients"):
        build_split(data(1797), File(str(Path(__file__).with_name("owners.npy"))), 7, 1)
