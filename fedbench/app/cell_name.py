"""The folder name of a sweep's run, which the resolver ``cell_name`` gives to Hydra."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path

from omegaconf import OmegaConf

from fedbench.core.settings import WHEREABOUTS, is_matched

NAME_LENGTH = 100


def cell_name(overrides: Iterable[str], excluded: Iterable[str], folder: str = "", swept: Iterable[str] = ()) -> str:
    """Return the folder name of a sweep's run: its overrides, sorted, without the keys that match ``excluded``.

    Characters that a file system may refuse become _, and long names are cut.  A long name starts with the overrides of
    the ``swept`` keys, and the others fill the remaining length.  Changed and cut names end in a hash of the full text,
    so that two runs never share a folder.  A run whose former name exists in ``folder`` keeps that name.
    """
    patterns, differs = list(excluded), set(swept)
    naming = sorted(text.lstrip("+") for text in overrides if not is_matched(_key(text), patterns))
    full = ",".join(naming) or "default"
    safe = _safe(full)
    if safe == full and len(full) <= NAME_LENGTH:
        return full
    end = f"-{hashlib.sha256(full.encode()).hexdigest()[:8]}"
    room = NAME_LENGTH - len(end)
    before = f"{safe[:room]}{end}"  # the former rule: cut at the end
    if folder and (Path(folder).expanduser() / before).is_dir():
        return before
    first = [text for text in naming if _key(text) in differs]
    common = [text for text in naming if _key(text) not in differs]
    return f"{_safe(','.join([*_fitting(first, room), *common]))[:room]}{end}"


def _safe(text: str) -> str:
    return re.sub(r"[^\w.,=+\-\[\]~]", "_", text)


def _fitting(overrides: list[str], room: int) -> list[str]:
    """Return the overrides, shortened to the room: first keys to their last part, then each to its end."""
    if len(",".join(overrides)) <= room:
        return overrides
    short = [text.partition("=")[0].rpartition(".")[2] + "=" + text.partition("=")[2] for text in overrides]
    if len(",".join(short)) <= room:
        return short
    fair = max(room // len(short) - 1, 1)  # short overrides leave their spare room to long ones
    spare = sum(max(fair - len(text), 0) for text in short)
    most = fair + spare // max(sum(len(text) > fair for text in short), 1)
    return [text[-most:] for text in short]


def _key(override: str) -> str:
    return override.lstrip("+~").split("=", 1)[0]


OmegaConf.register_new_resolver("whereabouts", lambda: list(WHEREABOUTS), replace=True)
OmegaConf.register_new_resolver("cell_name", cell_name, replace=True)
