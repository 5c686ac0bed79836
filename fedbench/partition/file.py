"""An existing partition: of another run, or index lists of another program.

Formats by suffix:
    .npz    partition.npz of a run (who trains, validates and tests on what), or an int array of samples for each client
    .json   [[samples of client 0], ...] or {client: [samples]}; in the place of a list {"train": [...], "test": [...]}
            (and "val"); or {"train": [[...], ...], "test": [[...], ...]}
    .csv    columns index and client, and part (train, val or test) if wanted
    .npy    [n] whole numbers: the client of each sample, -1 where nobody has it
    .pkl    one of the forms of .json, pickled, as FL-bench's partition.pkl (data_indices).  A pickle that names more
            than arrays may run code: it is refused unless `trust` names the file

Clients keep the names that a file gives them.  Samples are numbered as the data set has them.  Parts that a file gives
are taken as they are; lists without parts are cut as dataset.split, test_fraction and val_fraction say.
"""

from __future__ import annotations

import csv
import json
import pickle
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedbench.core.files import read_json
from fedbench.core.options import ConfigError, require
from fedbench.core.split import Ragged, Split
from fedbench.data._names import check_spelling
from fedbench.data._pickled import NotPlainError, not_plain, read_plain
from fedbench.data.base import Arrays

PARTS = ("train", "val", "test")
OURS = {f"{part}_{field}" for part in PARTS for field in ("indices", "offsets")}
Lists = dict[str, list[np.ndarray]]  # by part, or by "" where there are none: of each client, its samples
Read = tuple[Lists, list[str] | None]  # and the names of the clients


class File:
    """A partition from a file.

    Args:
        path: The file.
        trust: Name of a pickle that may run code.  None: no pickle may.
    """

    leaves_out = True  # what the file names nowhere

    def __init__(self, path: str | None = None, trust: str | None = None):
        require(path is not None, "partition=file needs partition.path=<partition.npz of a run, or index lists>")
        self.path, self.trust = Path(str(path)), trust
        self._found: Read | None = None

    def count(self, num_domains: int) -> int:
        """N: that of the file."""
        return len(next(iter(self.lists().values())))

    def ready(self, arrays: Arrays) -> Split | None:
        """The split, where the file says who tests on what; ConfigError where it is of other data."""
        lists = self.lists()
        for name, each in lists.items():
            self._check(name, each, len(arrays))
        if "" in lists:
            return None
        self._check_run(arrays)
        nothing = [np.empty(0, np.int64)] * len(lists["train"])
        train, val, test = (Ragged.from_lists(lists.get(part, nothing)) for part in PARTS)
        return Split(train, val, test)

    def assign(
        self,
        labels: np.ndarray,
        pools: list[np.ndarray],
        num_clients: int,
        rng: np.random.RandomState,
        domain: np.ndarray | None = None,
    ) -> list[Ragged]:
        """See Partition.assign: of each pool what each client's list holds of it."""
        lists = self.lists()[""]
        inside = np.zeros((len(pools), len(labels)), bool)  # [pools, n]
        for pool, row in zip(pools, inside, strict=True):
            row[pool] = True
        return [Ragged.from_lists([samples[row[samples]] for samples in lists]) for row in inside]

    def lists(self) -> Lists:
        """What the file says, read once."""
        return self._read()[0]

    def client_names(self, arrays: Arrays) -> list[str] | None:
        """Return the names that the file gives the clients."""
        return self._read()[1]

    def _read(self) -> Read:
        if self._found is None:
            self._found = self._read_file()
        return self._found

    def _read_file(self) -> Read:
        readers: dict[str, Callable[[Path], Read]] = {
            ".npz": _from_npz,
            ".json": _from_json,
            ".csv": _from_csv,
            ".npy": _from_npy,
            ".pkl": _from_trusted_pickle if self.trust == self.path.name else _from_pickle,
        }
        reader, said = readers.get(self.path.suffix.lower()), f"partition.path={self.path}"
        require(reader is not None, f"{said} must end in {', '.join(readers)}")
        require(self.path.is_file(), f"{said} is no file")
        try:
            lists, names = reader(self.path)  # type: ignore[misc]
        except ConfigError:
            raise
        except NotPlainError as refused:
            raise ConfigError(not_plain(said, refused, f"partition.trust={self.path.name}")) from None
        except Exception as error:  # of zip files, JSON, numbers, pickles: all mean the same to the user
            raise ConfigError(f"{said} cannot be read as index lists: {type(error).__name__}: {error}") from error
        sizes = {len(each) for each in lists.values()}
        require(
            len(sizes) == 1 and 0 not in sizes, f"{said} must give a list to each client, in every part that it has"
        )
        require(
            lists.keys() == {""} or {"train", "test"} <= lists.keys() <= {*PARTS},
            f"{said} has the parts {', '.join(map(str, lists))}: give train and test, and val if wanted, or none",
        )
        check_spelling(names or (), f"{said}: the clients")
        return lists, names

    def _check_run(self, arrays: Arrays) -> None:
        """ConfigError where the file lies in the folder of a run, and that run was on other data."""
        then = read_json(self.path.parent / "summary.json").get("data_hash") if self.path.suffix == ".npz" else None
        require(
            then in (None, arrays.digest),
            f"partition.path={self.path} is of other data: its run was on {str(then)[:12]}, this data set is "
            f"{arrays.digest[:12]} (summary.json); a copy of the file elsewhere is taken for any data that it fits",
        )

    def _check(self, part: str, lists: list[np.ndarray], n: int) -> None:
        """ConfigError for numbers that no sample has."""
        everything = np.concatenate(lists)
        outside = everything[(everything < 0) | (everything >= n)]
        require(
            len(outside) == 0,
            f"partition.path={self.path} is of other data: it names sample {outside[0] if len(outside) else ''}"
            f"{f' in its part {part}' if part else ''}, and this data set has 0 to {n - 1:,}",
        )


def _numbers(values: Any) -> np.ndarray:
    """Whole numbers as int64.  # [m]"""
    found = np.asarray(values)
    if found.size == 0:
        return np.empty(0, np.int64)
    if found.ndim != 1 or found.dtype.kind not in "iu":
        raise ConfigError("a list of samples must hold whole numbers, as in [0, 5, 7]")
    return found.astype(np.int64)


def _from_npz(path: Path) -> Read:
    with np.load(path, allow_pickle=False) as file:
        if {*file.files} >= OURS:
            split = Split.load(path)
            parts = {part: [r[i] for i in range(len(r))] for part in PARTS if len((r := getattr(split, part)).indices)}
            return parts, None if split.names is None else list(split.names)
        names = _in_order(file.files)
        unnamed = all(re.fullmatch(r"arr_\d+", name) for name in names)  # numpy.savez(path, *arrays)
        return {"": [_numbers(file[name]) for name in names]}, None if unnamed else names


def _from_json(path: Path) -> Read:
    return _lists_of(json.loads(path.read_text(encoding="utf-8")))


def _from_pickle(path: Path) -> Read:
    return _lists_of(read_plain(path.read_bytes()))


def _from_trusted_pickle(path: Path) -> Read:
    with path.open("rb") as file:
        return _lists_of(pickle.load(file))


def _from_npy(path: Path) -> Read:
    owner = _numbers(np.load(path, allow_pickle=False))  # [n]
    return {"": _by_client(np.flatnonzero(owner >= 0), owner[owner >= 0])}, None


def _from_csv(path: Path) -> Read:
    with path.open(newline="", encoding="utf-8-sig") as file:
        rows = list(csv.DictReader(file))
    if not rows or not {"index", "client"} <= rows[0].keys():
        raise ConfigError(f"partition.path={path} needs the columns index and client, and part if there are parts")
    index, parts = _numbers([int(row["index"]) for row in rows]), np.array([row.get("part") or "" for row in rows])
    number = {name: i for i, name in enumerate(_in_order({row["client"]: None for row in rows}))}
    client = np.array([number[row["client"]] for row in rows])
    n = len(number)
    lists = {str(part): _by_client(index[parts == part], client[parts == part], n) for part in dict.fromkeys(parts)}
    return lists, list(number)


def _by_client(samples: np.ndarray, client: np.ndarray, num_clients: int = 0) -> list[np.ndarray]:
    ragged = Ragged.from_owners(samples, client, max(num_clients, int(client.max(initial=-1)) + 1))
    return [ragged[i] for i in range(len(ragged))]


def _in_order(names: Mapping[str, Any] | Sequence[str]) -> list[Any]:
    """Clients' names by number where all are numbers, else as they come."""
    found = list(names)
    return sorted(found, key=int) if all(str(name).isdecimal() for name in found) else found


def _lists_of(found: Any) -> Read:
    """Of any form of JSON: by client, by client and part, or by part and client."""
    if isinstance(found, Mapping) and "data_indices" in found:  # FL-bench
        found = found["data_indices"]
    if isinstance(found, Mapping) and {*found} <= {*PARTS}:
        return _by_part(found)
    names = _in_order(found) if isinstance(found, Mapping) else None
    each = list(found) if names is None else [found[name] for name in names]
    shown = None if names is None else list(map(str, names))
    if not any(isinstance(of, Mapping) for of in each):
        return {"": [_numbers(of) for of in each]}, shown
    parts = dict.fromkeys(part for of in each for part in of if len(of[part]))
    return {part: [_numbers(of.get(part, ())) for of in each] for part in parts}, shown


def _by_part(found: Mapping[str, Any]) -> Read:
    """Read lists by part, then by client; parts with named clients may list them in any order."""
    first = next(iter(found.values()))
    names = _in_order(first) if isinstance(first, Mapping) else None
    lists = {}
    for part, of in found.items():
        if names is not None and isinstance(of, Mapping):
            odd = sorted(map(str, {*of} ^ {*names}))
            if odd:
                raise ConfigError(f"the parts have different clients: {odd[0]} is not in all of them")
            of = {name: of[name] for name in names}
        lists[part] = _lists_of(of)[0][""]
    return lists, None if names is None else list(map(str, names))
