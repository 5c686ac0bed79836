"""Composing a run's configuration: Hydra's groups in, one plain checked config out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from omegaconf import DictConfig, OmegaConf, open_dict

from fedbench.options import ConfigError

GROUPS = ("dataset", "partition", "model", "algorithm", "optimizer", "hardware", "tracking", "experiment")


def find_conf_dir() -> Path:
    """The folder with config.yaml: beside the package in a checkout, inside it in a wheel."""
    package = Path(__file__).resolve().parent
    for folder in (package.parent / "conf", package / "conf"):
        if (folder / "config.yaml").is_file():
            return folder
    raise ConfigError(f"the conf folder of fedbench is missing (looked beside and inside {package})")


def group_options(group: str, conf_dir: Path | None = None) -> list[str]:
    """Names of the options of a group, sorted: the files of its folder, nested ones as folder/name."""
    root = (conf_dir or find_conf_dir()) / group
    return sorted(path.relative_to(root).with_suffix("").as_posix() for path in root.rglob("*.yaml"))


def cell_name(overrides: Any, excluded: Any) -> str:
    """Folder name of a sweep's cell, from its overrides."""
    return ",".join(sorted(overrides)).replace("/", "_") or "default"


OmegaConf.register_new_resolver("cell_name", cell_name, replace=True)


def compose(overrides: list[str]) -> DictConfig:
    """The run's config without Hydra's own node, plus ``choices``: the option chosen in each group."""
    with initialize_config_dir(str(find_conf_dir()), version_base="1.3"):
        cfg = hydra_compose("config", list(overrides), return_hydra_config=True)
    return with_choices(cfg, cfg.hydra.runtime.choices)


def with_choices(cfg: DictConfig, chosen: Any) -> DictConfig:
    """cfg with ``choices``, and without ``hydra``."""
    with open_dict(cfg):
        cfg.choices = {group: chosen.get(group) for group in GROUPS}
        cfg.pop("hydra", None)
    return cfg
