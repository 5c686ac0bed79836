"""A partition from a file: of another run, or index lists of another program.

Formats by suffix:
    .npz    partition.npz of a run (training, validation and test samples), or an int array of samples for each client
    .json   [[samples of client 0], ...] or {client: [samples]}.  Instead of a list: {"train": [...], "test": [...],
            "val": [...]}, where "val" is optional.  Or {"train": [[...], ...], "test": [[...], ...]}
    .csv    columns index and client, and optionally part (train, val or test)
    .npy    [n] integers: the client of each sample, or -1
    .pkl    one of the forms of .json, pickled, for example FL-bench's partition.pkl (data_indices).  A pickle of other
            objects than arrays may run code, and is only read if `trust` names the file

Names of clients in a file are kept.  Samples have the order of the data set.  Parts in a file are used unchanged; lists
without parts are split by dataset.split, test_fraction and val_fraction.
"""

from __future__ import annotations

import csv
import json
import pickle
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedbench.core.files import read_json
from fedbench.core.options import ConfigError, require
from fedbench.core.split import Ragged, Split
from fedbench.data._names import check_spelling
from fedbench.data._pickled import NotPlainError, not_plain, read_plain
from fedbench.data.base import Arrays

PARTS = ("train", "val", "test")
RUN_ARRAYS = {f"{part}_{field}" for part in PARTS for field in ("indices", "offsets")}


class Content(NamedTuple):
    """The content of a partition file: sample indices of each client by part (train, ...), and names of clients.

    Attributes:
        lists: Samples of each client by part; the only part is "" if the file has no parts.
        names: Names of the clients, or None.
    """

    lists: dict[str, list[np.ndarray]]
    names: list[str] | None


class File:
    """A partition that is read from a file of sample indices.

    Args:
        path: The file.
        trust: The name of the file, without its folder, if it is a pickle that may run code.  None: no pickle may.
    """

    leaves_samples_out = True  # those that the file does not contain

    def __init__(self, path: str | None = None, trust: str | None = None):
        require(
            path is not None,
            "partition=file needs a file: set partition.path to the partition.npz of a run, or to a file of sample "
            "indices",
        )
        self.path = Path(str(path))
        self.trust = trust

    def default_num_clients(self, num_domains: int) -> int:
        """Return the number of clients in the file, for partition.num_clients=null.  `num_domains` is not used."""
        return len(next(iter(self.content.lists.values())))

    def predefined_split(self, arrays: Arrays) -> Split | None:
        """Return the split in the file, or None if the file has no parts (training, validation and test samples).

        Args:
            arrays: The data set.

        Raises:
            ConfigError: The file has indices that are not in the data set, or belongs to a run on other data.
        """
        lists = self.content.lists  # from part to the samples of each client
        for part, client_samples in lists.items():
            self._check_samples(part, client_samples, len(arrays))
        if "" in lists:  # lists without parts, such as train and test, which `assign` divides
            return None
        self._check_run(arrays)
        empty = [np.empty(0, np.int64)] * len(lists["train"])
        train, val, test = (Ragged.from_lists(lists.get(part, empty)) for part in PARTS)
        return Split(train, val, test)

    def assign(
        self,
        labels: np.ndarray,
        pools: list[np.ndarray],
        num_clients: int,
        rng: np.random.RandomState,
        domain: np.ndarray | None = None,
    ) -> list[Ragged]:
        """Assign each client the samples of its list in the file that are in a pool; other samples have no client.

        The file has one list for each client.  A file with training and test lists is not divided here: it is the split
        itself (`predefined_split`).

        Args:
            labels: Label of each sample of the data set, [n].  Only their number is used.
            pools: Sample indices of the sets to divide: all samples, or training, test and perhaps validation samples.
            num_clients: Not used: the file determines N.
            rng: Not used: nothing is random.
            domain: Not used; partitions by client site need it.

        Returns:
            For each pool, a Ragged: an array of sample indices for each of the N clients.
        """
        client_lists = self.content.lists[""]  # a dict from part to the samples of each client; "": without parts
        assigned = []
        for pool in pools:
            in_pool = np.zeros(len(labels), bool)  # [n]
            in_pool[pool] = True
            assigned.append(Ragged.from_lists([samples[in_pool[samples]] for samples in client_lists]))
        return assigned

    def client_names(self, arrays: Arrays) -> list[str] | None:
        """Return the names of the clients in the file, in order; None if it has no names.  `arrays` is not used."""
        return self.content.names

    @cached_property
    def content(self) -> Content:
        """The samples of each client in the file, and the clients' names.  The file is read at the first use.

        A pickle of other objects than arrays and lists may run code, and is only read if the option trust names it.

        Raises:
            ConfigError: The file does not exist, or has none of the formats of this module.
        """
        readers: dict[str, Callable[[Path], Content]] = {
            ".npz": _read_npz,
            ".json": lambda path: _parse(json.loads(path.read_text(encoding="utf-8"))),
            ".csv": _read_csv,
            ".npy": _read_npy,
            ".pkl": _read_trusted_pickle if self.trust == self.path.name else _read_pickle,
        }
        option = f"partition.path={self.path}"
        reader = readers.get(self.path.suffix.lower())
        if reader is None:
            raise ConfigError(f"{option} must end in {', '.join(readers)}: write the lists in one of these formats")
        require(self.path.is_file(), f"{option} does not exist or is a folder: set it to a file of sample indices")
        try:
            content = reader(self.path)
        except ConfigError:
            raise
        except NotPlainError as refused:
            raise ConfigError(not_plain(option, refused, f"partition.trust={self.path.name}")) from None
        except Exception as error:  # of zip files, JSON, numbers or pickles
            raise ConfigError(
                f"{option} cannot be read as index lists: {type(error).__name__}: {error}; write it again as in "
                "docs/partitions.md"
            ) from error
        lists = content.lists  # from part ("train", "val", "test"; "" if there are none) to the samples of each client
        client_counts = {len(client_samples) for client_samples in lists.values()}
        require(
            len(client_counts) == 1 and 0 not in client_counts,
            f"{option} must have a list for each client in each of its parts: add them",
        )
        require(
            lists.keys() == {""} or {"train", "test"} <= lists.keys() <= {*PARTS},
            f"{option} has the parts {', '.join(map(str, lists))}, but must have train and test (and optionally "
            "val) or no parts: rename or remove them",
        )
        check_spelling(content.names or (), f"{option}: the clients")
        return content

    def _check_run(self, arrays: Arrays) -> None:
        """Raise ConfigError if the file is in the folder of a run on other data, by the hash in its summary.json.

        Only an npz can be the file of a run.  Other files, and folders without such a summary, are not checked.
        """
        run_hash = read_json(self.path.parent / "summary.json").get("data_hash") if self.path.suffix == ".npz" else None
        require(
            run_hash in (None, arrays.digest),
            f"partition.path={self.path} is from a run on other data (hash {str(run_hash)[:12]} in summary.json, this "
            f"data set has {arrays.digest[:12]}): use the same data, or copy the file out of the run folder to skip "
            "this check",
        )

    def _check_samples(self, part: str, lists: list[np.ndarray], n: int) -> None:
        """Check that the lists of a part have only indices of the data set.

        Args:
            part: "train", "val" or "test", or "" if the file has no parts; for the message.
            lists: Sample indices of each client.
            n: The number of samples of the data set.

        Raises:
            ConfigError: An index is negative, or n or more.
        """
        samples = np.concatenate(lists)
        invalid = samples[(samples < 0) | (samples >= n)]
        if len(invalid):
            in_part = f" in its part {part}" if part else ""
            raise ConfigError(
                f"partition.path={self.path} has sample {invalid[0]}{in_part}, but this data set has 0 to {n - 1:,}: "
                "set partition.path to a file for these data"
            )


def _indices(values: Any) -> np.ndarray:
    """Return a list of m >= 0 sample indices as an array [m] int64; raise ConfigError if some are no whole numbers."""
    array = np.asarray(values)
    if array.size == 0:
        return np.empty(0, np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ConfigError(
            f"partition.path: a list of samples must have whole numbers only, such as [0, 5, 7], but one is "
            f"{str(values)[:60]}: correct the file"
        )
    return array.astype(np.int64)


def _read_npz(path: Path) -> Content:
    """Return the samples and names of the clients in an npz file.

    The file is a run's partition.npz (it has all of RUN_ARRAYS), or has an array of sample indices for each client.
    The names of such arrays are the clients' names, unless they are arr_0, arr_1, ... of numpy.savez(path, *arrays).
    Empty parts of a run, such as validation, are left out.
    """
    with np.load(path, allow_pickle=False) as file:
        if {*file.files} >= RUN_ARRAYS:
            split = Split.load(path)
            lists = {}
            for part in PARTS:
                ragged: Ragged = getattr(split, part)
                if len(ragged.indices):
                    lists[part] = [ragged[i] for i in range(len(ragged))]
            return Content(lists, None if split.names is None else list(split.names))
        names = _sorted_names(file.files)
        are_unnamed = all(re.fullmatch(r"arr_\d+", name) for name in names)  # numpy.savez(path, *arrays)
        return Content({"": [_indices(file[name]) for name in names]}, None if are_unnamed else names)


def _read_pickle(path: Path) -> Content:
    """Return the samples of the clients in a pickle of arrays, lists, dicts and plain values.

    Raises:
        NotPlainError: The pickle contains other objects, so that reading it could run code.
    """
    return _parse(read_plain(path.read_bytes()))


def _read_trusted_pickle(path: Path) -> Content:
    """Return the sample indices and names of clients in a pickle file, by Python's pickle, which may run code in it.

    Args:
        path: The file.  The user must have named it in partition.trust.
    """
    with path.open("rb") as file:
        return _parse(pickle.load(file))


def _read_npy(path: Path) -> Content:
    """Return the clients' sample indices, without names and parts, from a .npy file.

    It has an array [n] with the client of each sample, -1 for none.
    """
    client = _indices(np.load(path, allow_pickle=False))  # [n]
    return Content({"": _group_by_client(np.flatnonzero(client >= 0), client[client >= 0])}, None)


def _read_csv(path: Path) -> Content:
    """Return the samples and names of the clients in a CSV file with a row for each sample.

    Its columns are index (of the sample), client (a name or number) and, optionally, part (train, val or test).
    """
    with path.open(newline="", encoding="utf-8-sig") as file:
        rows = list(csv.DictReader(file))
    if not rows or not {"index", "client"} <= rows[0].keys():
        raise ConfigError(
            f"partition.path={path} needs the columns index and client, and part if there are parts: add them"
        )
    names = _sorted_names(list(dict.fromkeys(row["client"] for row in rows)))  # different names, in the file's order
    client_index = {name: i for i, name in enumerate(names)}
    index = _indices([int(row["index"]) for row in rows])
    client = np.array([client_index[row["client"]] for row in rows])
    parts = np.array([row.get("part") or "" for row in rows])
    lists = {}
    for part in dict.fromkeys(parts.tolist()):
        lists[part] = _group_by_client(index[parts == part], client[parts == part], len(names))
    return Content(lists, names)


def _group_by_client(samples: np.ndarray, client: np.ndarray, num_clients: int = 0) -> list[np.ndarray]:
    """Return the samples of each client.

    Args:
        samples: Sample indices, [m].
        client: Client of each of them, [m].
        num_clients: The smallest number of lists to return, with empty ones at the end if necessary.

    Returns:
        An array for each client, 0 to the largest in ``client``.
    """
    ragged = Ragged.from_owners(samples, client, max(num_clients, int(client.max(initial=-1)) + 1))
    return [ragged[i] for i in range(len(ragged))]


def _sorted_names(names: Mapping[str, Any] | Sequence[str]) -> list[Any]:
    """Return names (a list, or the keys of a dict), sorted as numbers if all are digits, else in the given order."""
    listed = list(names)
    return sorted(listed, key=int) if all(str(name).isdecimal() for name in listed) else listed


def _parse(value: Any) -> Content:
    """Return the samples and names of the clients in a .json or .pkl file.

    Args:
        value: One of these, perhaps inside of FL-bench's dict under "data_indices":

            - by client: [[samples of client 0], ...], or a dict from name to list of samples;
            - by client and part: the same, with {"train": [...], "test": [...]} instead of each list of samples;
            - by part and client: a dict from part to lists by client.
    """
    if isinstance(value, Mapping) and "data_indices" in value:  # FL-bench
        value = value["data_indices"]
    if isinstance(value, Mapping) and {*value} <= {*PARTS}:
        return _parse_parts(value)
    names = _sorted_names(value) if isinstance(value, Mapping) else None
    clients = list(value) if names is None else [value[name] for name in names]
    client_names = None if names is None else list(map(str, names))
    if not any(isinstance(client, Mapping) for client in clients):
        return Content({"": [_indices(client) for client in clients]}, client_names)
    parts = dict.fromkeys(part for client in clients for part in client if len(client[part]))  # not empty for all
    return Content({part: [_indices(client.get(part, ())) for client in clients] for part in parts}, client_names)


def _parse_parts(value: Mapping[str, Any]) -> Content:
    """Return the samples and names of the clients in a file that has lists for each part.

    Args:
        value: A dict from part ("train", "test" and perhaps "val") to the clients' lists of sample indices.  These are
            a list with one list for each client, or a dict from name to list, whose order may differ between parts.

    Raises:
        ConfigError: A client is not in all parts.
    """
    first = next(iter(value.values()))
    names = _sorted_names(first) if isinstance(first, Mapping) else None
    lists = {}
    for part, clients in value.items():
        if names is not None and isinstance(clients, Mapping):
            different = sorted(map(str, {*clients} ^ {*names}))  # clients that only one of the two parts has
            if different:
                raise ConfigError(
                    f"the file of partition.path has client {different[0]} not in all of its parts: give each client "
                    "a list in each part"
                )
            clients = {name: clients[name] for name in names}
        lists[part] = _parse(clients).lists[""]  # "": lists without parts
    return Content(lists, None if names is None else list(map(str, names)))
