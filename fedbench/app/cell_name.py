"""Folder names of the runs of a sweep, for Hydra's resolver ``cell_name`` in conf/config.yaml."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path

from omegaconf import OmegaConf

from fedbench.core.settings import UNHASHED_KEYS, is_matched

NAME_LENGTH = 100


def cell_name(overrides: Iterable[str], excluded: Iterable[str], folder: str = "", swept: Iterable[str] = ()) -> str:
    """Return the folder name of a run (a cell of the grid) of a sweep: its overrides, sorted and joined.

    Characters that a file system may not allow become "_".  Long names start with the overrides of the swept keys and
    are cut to NAME_LENGTH.  Changed or cut names end with a hash of all overrides, so two runs never share a folder.

    Args:
        overrides: The overrides of the run.
        excluded: Patterns of keys to omit.
        folder: The folder of the sweep.  If it contains the run under its name of older versions, that name is used.
        swept: The keys with several values in the sweep.
    """
    patterns, swept_keys = list(excluded), set(swept)
    naming = sorted(text.lstrip("+") for text in overrides if not is_matched(_key(text), patterns))
    full = ",".join(naming) or "default"
    safe = _safe(full)
    if safe == full and len(full) <= NAME_LENGTH:
        return full
    hash_suffix = f"-{hashlib.sha256(full.encode()).hexdigest()[:8]}"
    length = NAME_LENGTH - len(hash_suffix)
    old_name = f"{safe[:length]}{hash_suffix}"  # of older versions
    if folder and (Path(folder).expanduser() / old_name).is_dir():
        return old_name
    first = [text for text in naming if _key(text) in swept_keys]
    common = [text for text in naming if _key(text) not in swept_keys]
    return f"{_safe(','.join([*_shortened(first, length), *common]))[:length]}{hash_suffix}"


def _safe(text: str) -> str:
    """Return the text with "_" for each character but letters, digits and ``_.,=+-[]~``, for the name of a folder."""
    return re.sub(r"[^\w.,=+\-\[\]~]", "_", text)


def _shortened(overrides: list[str], length: int) -> list[str]:
    """Return overrides shortened to a total length, with the commas between them.

    First the prefixes of keys are removed, ``algorithm.`` of ``algorithm.mu=1``.  If that is not enough, each override
    is cut from its beginning, because its value is at its end.

    Args:
        overrides: The overrides.
        length: The total number of characters.
    """
    if len(",".join(overrides)) <= length:
        return overrides
    short = [text.partition("=")[0].rpartition(".")[2] + "=" + text.partition("=")[2] for text in overrides]
    if len(",".join(short)) <= length:
        return short
    # the length of each override without its comma; long overrides also get the length that short ones do not use
    equal_length = max(length // len(short) - 1, 1)
    unused = sum(max(equal_length - len(text), 0) for text in short)
    max_length = equal_length + unused // max(sum(len(text) > equal_length for text in short), 1)
    return [text[-max_length:] for text in short]


def _key(override: str) -> str:
    """Return the key of an override, without value and leading + or ~: "algorithm.mu" for "+algorithm.mu=0.1"."""
    return override.lstrip("+~").split("=", 1)[0]


OmegaConf.register_new_resolver("unhashed_keys", lambda: list(UNHASHED_KEYS), replace=True)
OmegaConf.register_new_resolver("cell_name", cell_name, replace=True)
