"""The folder of a run: read its state, check its files, and clean it up before a run begins."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf

from fedbench.core.files import read_json
from fedbench.core.lock import LOCK_FILE, LOCK_MARK
from fedbench.core.options import ConfigError, require
from fedbench.core.settings import load_config, save_config
from fedbench.simulation.log import notice

CHECKPOINTS = ("checkpoint.pt", "checkpoint.prev.pt")
FILES = (*CHECKPOINTS, "metrics.csv", "clients.csv", "costs.csv", "summary.json", "partition.npz", "matrices.npz")
LEFTOVERS = ("*.part", "*.partial")


def check_files(folder: Path) -> None:
    """Raise ConfigError if the run folder contains a folder with the name of an output file, such as metrics.csv."""
    wrong = next((folder / name for name in FILES if (folder / name).is_dir()), None)
    require(wrong is None, f"{wrong} is a folder, but the run writes a file of that name: move the folder")


def remove_leftovers(folder: Path) -> None:
    """Remove the incomplete files *.part and *.partial of killed processes from a run folder and its folder .hydra."""
    for pattern in LEFTOVERS:
        for path in [*folder.glob(pattern), *(folder / ".hydra").glob(pattern)]:
            if path.is_file():
                path.unlink(missing_ok=True)


def stored_config(folder: Path) -> dict[str, Any] | None:
    """Return the configuration of the run in a folder; None if there is no run.

    If the configuration cannot be read, the files of the folder are moved to a new one (`set_aside`), and the result
    is None.
    """
    path = folder / "config.yaml"
    try:
        return OmegaConf.to_container(load_config(path)) if path.exists() else None  # type: ignore[return-value]
    except ConfigError:
        set_aside(folder)
        return None


def set_aside(folder: Path) -> None:
    """Move the files of another run from a run folder to a new folder, FOLDER.old-1 or a higher number.

    The lock file stays, because this process holds it.
    """
    old = next(p for k in count(1) if not (p := folder.with_name(f"{folder.name}.old-{k}")).exists())
    old.mkdir()
    contents = [path for path in folder.iterdir() if path.name not in (LOCK_FILE, LOCK_MARK)]
    for path in sorted(contents, key=lambda path: path.name == "config.yaml"):  # config.yaml last: it marks a run
        path.rename(old / path.name)
    print(
        f"{folder} had a run with another or an unreadable configuration: its files were moved to {old.name}",
        flush=True,
    )


def save_request(config: Mapping[str, Any], hydra: DictConfig, folder: Path) -> None:
    """Write config.yaml, and the files in .hydra, which record the first command of the run.

    Args:
        config: The checked configuration.
        hydra: The value of the key hydra in the composed configuration.
        folder: The run folder.
    """
    inner = folder / ".hydra"
    inner.mkdir(exist_ok=True)
    OmegaConf.save(OmegaConf.create({"hydra": hydra}), inner / "hydra.yaml")
    OmegaConf.save(hydra.overrides.task, inner / "overrides.yaml")
    save_config(config, inner / "config.yaml")
    save_config(config, folder / "config.yaml")


def is_finished(folder: Path, config: Mapping[str, Any]) -> bool:
    """Return whether the run in a folder is finished and its files are unchanged.

    Args:
        folder: The run folder.
        config: The checked configuration, used to read the data.

    Raises:
        ConfigError: The data have changed since the run.
    """
    summary = read_json(folder / "summary.json")
    if summary.get("status") != "finished":
        return False
    if (name := _damaged(folder, summary)) is not None:
        notice(f"{folder} is finished, but {name} was changed or damaged: resuming from the checkpoint")
        return False
    stored = summary.get("data_hash")
    current = _data_hash(folder, config) if stored else None
    require(
        current in (None, stored),
        f"{folder} is finished, but its data have changed (digest {str(current)[:12]}, the run's {str(stored)[:12]}): "
        "restore the data files, or move the folder to run it again",
    )
    return True


def is_resumable(folder: Path) -> bool:
    """Return whether a run folder has a checkpoint that is not truncated.  Its content is not checked."""
    # a checkpoint is a zip file, whose directory is at its end
    return any(zipfile.is_zipfile(folder / name) for name in CHECKPOINTS)


def has_begun(folder: Path) -> bool:
    """Return whether the run in a folder has a checkpoint, or a summary with at least one finished round."""
    has_checkpoint = any((folder / name).exists() for name in CHECKPOINTS)
    return has_checkpoint or read_json(folder / "summary.json").get("rounds_done", 0) > 0


def config_dir_of(folder: Path) -> str | None:
    """Return the --config-dir of a run, relative to the working directory if it is inside.

    Returns:
        The folder; None if the run had none, or if its record cannot be read.
    """
    path = folder / ".hydra" / "hydra.yaml"
    try:
        sources = yaml.safe_load(path.read_text(encoding="utf-8"))["hydra"]["runtime"]["config_sources"]
        # Hydra records where it searched for options; the provider "command-line" is --config-dir
        folders = [Path(source["path"]) for source in sources if source["provider"].endswith("command-line")]
    except (KeyError, TypeError, ValueError, AttributeError, OSError, yaml.YAMLError):  # the file may be damaged
        return None
    here = Path.cwd()
    if not folders:
        return None
    return str(folders[0].relative_to(here) if folders[0].is_relative_to(here) else folders[0])


def _damaged(folder: Path, summary: Mapping[str, Any]) -> str | None:
    """Return the name of the first file of a finished run that was changed or damaged; None if there is none.

    Args:
        folder: The run folder.
        summary: The content of summary.json with the checksums.  Older versions wrote none: then the result is None.
    """
    if "digest" not in summary:
        return None
    from fedbench.core.digests import differing, digest  # here, because it imports NumPy, which takes time

    if digest({name: value for name, value in summary.items() if name != "digest"}) != summary["digest"]:
        return "summary.json"
    return differing(folder, summary.get("files", {}), whole=True)


def _data_hash(folder: Path, config: Mapping[str, Any]) -> str | None:
    """Return the digest of a run's data as they are now; None, after a notice to the user, if they cannot be read.

    Args:
        folder: The run folder, for the notice.
        config: The checked configuration.
    """
    from fedbench.data import _stored_digest as stored_digest

    def load() -> Any:
        from fedbench.simulation.build import load  # here: torch is slow to import

        return load(OmegaConf.create(dict(config)))

    try:
        return stored_digest.digest(config["dataset"], config["data_dir"], load)
    except ConfigError as error:
        notice(f"{folder}: cannot check whether the data have changed ({error}); the run counts as finished")
        return None
