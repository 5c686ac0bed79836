"""A run's folder on disk: what is in it, whether the run is finished, and what is removed before it begins."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf

from fedbench.core.files import read_json
from fedbench.core.lock import MARK, NAME
from fedbench.core.options import ConfigError, require
from fedbench.core.settings import load_config, save_config
from fedbench.simulation.log import notice

CHECKPOINTS = ("checkpoint.pt", "checkpoint.prev.pt")
FILES = (*CHECKPOINTS, "metrics.csv", "clients.csv", "costs.csv", "summary.json", "partition.npz", "matrices.npz")
LEFTOVERS = ("*.part", "*.partial")


def check_files(folder: Path) -> None:
    """Refuse a run folder in which folders have the names of output files."""
    wrong = next((folder / name for name in FILES if (folder / name).is_dir()), None)
    require(wrong is None, f"{wrong} is a folder, and a run writes a file of that name: move it away")


def remove_leftovers(folder: Path) -> None:
    """Remove what a killed process was writing: files that were to be renamed when they were complete."""
    for pattern in LEFTOVERS:
        for path in [*folder.glob(pattern), *(folder / ".hydra").glob(pattern)]:
            if path.is_file():
                path.unlink(missing_ok=True)


def stored_config(folder: Path) -> dict[str, Any] | None:
    """Return the config of the run in the folder; None if there is none.

    A folder whose config cannot be read is set aside.
    """
    path = folder / "config.yaml"
    try:
        return OmegaConf.to_container(load_config(path)) if path.exists() else None  # type: ignore[return-value]
    except ConfigError:
        set_aside(folder)
        return None


def set_aside(folder: Path) -> None:
    """Move the files of another run out of the folder, so that nothing is lost.  The folder and its lock stay."""
    old = next(p for k in count(1) if not (p := folder.with_name(f"{folder.name}.old-{k}")).exists())
    old.mkdir()
    contents = [path for path in folder.iterdir() if path.name not in (NAME, MARK)]
    for path in sorted(contents, key=lambda path: path.name == "config.yaml"):  # last, were this to be cut off
        path.rename(old / path.name)
    print(
        f"{folder} contained a run with another config, or with one that cannot be read: it is now {old.name}",
        flush=True,
    )


def save_request(config: Mapping[str, Any], hydra: DictConfig, folder: Path) -> None:
    """Write config.yaml, and the files of .hydra that Hydra itself would overwrite each time."""
    inner = folder / ".hydra"
    inner.mkdir(exist_ok=True)
    OmegaConf.save(OmegaConf.create({"hydra": hydra}), inner / "hydra.yaml")
    OmegaConf.save(hydra.overrides.task, inner / "overrides.yaml")
    save_config(config, inner / "config.yaml")
    save_config(config, folder / "config.yaml")


def is_finished(folder: Path, config: Mapping[str, Any]) -> bool:
    """Return whether the run is finished and its files are still what it wrote.

    Raises:
        ConfigError: The data have changed since.
    """
    summary = read_json(folder / "summary.json")
    if summary.get("status") != "finished":
        return False
    if (name := _damaged(folder, summary)) is not None:
        notice(f"{folder} is finished, but {name} is no longer what the run wrote: it goes on from its checkpoint")
        return False
    then = summary.get("data_hash")
    now = _data_hash(folder, config) if then else None
    require(
        now in (None, then),
        f"{folder} is finished, but the data are no longer those of the run (digest "
        f"{str(now)[:12]}, the run's {str(then)[:12]}): put its files back, or move the folder away to run it anew",
    )
    return True


def is_resumable(folder: Path) -> bool:
    """Return whether there is a checkpoint that is not truncated (a zip file ends with its directory)."""
    return any(zipfile.is_zipfile(folder / name) for name in CHECKPOINTS)


def has_begun(folder: Path) -> bool:
    """Return whether a run has finished a round."""
    has_checkpoint = any((folder / name).exists() for name in CHECKPOINTS)
    return has_checkpoint or read_json(folder / "summary.json").get("rounds_done", 0) > 0


def config_dir_of(folder: Path) -> str | None:
    """Return the --config-dir of a run, relative if it is below the working directory.

    None if there is none or it is unknown.
    """
    path = folder / ".hydra" / "hydra.yaml"
    try:
        sources = yaml.safe_load(path.read_text(encoding="utf-8"))["hydra"]["runtime"]["config_sources"]
        given = [Path(source["path"]) for source in sources if source["provider"].endswith("command-line")]
    except (KeyError, TypeError, ValueError, AttributeError, OSError, yaml.YAMLError):  # the file may be damaged
        return None
    here = Path.cwd()
    return str(given[0].relative_to(here) if given[0].is_relative_to(here) else given[0]) if given else None


def _damaged(folder: Path, summary: Mapping[str, Any]) -> str | None:
    """Return the first file of a finished run that differs from its record in the summary; None if none does."""
    if "digest" not in summary:
        return None
    from fedbench.core.digests import differing, digest  # NumPy

    if digest({name: value for name, value in summary.items() if name != "digest"}) != summary["digest"]:
        return "summary.json"
    return differing(folder, summary.get("files", {}), whole=True)


def _data_hash(folder: Path, config: Mapping[str, Any]) -> str | None:
    """Return the digest of a run's data as they are now; None where they cannot be read."""
    from fedbench.data import _known as known

    def load() -> Any:
        from fedbench.simulation.build import load  # torch

        return load(OmegaConf.create(dict(config)))

    try:
        return known.digest(config["dataset"], config["data_dir"], load)
    except ConfigError as error:
        notice(f"{folder}: whether its data have changed cannot be told ({error})")
        return None
