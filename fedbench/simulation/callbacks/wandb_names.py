"""Whether a run goes to Weights & Biases, and under which names."""

from __future__ import annotations

import hashlib
import importlib.util
import netrc
import os
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from omegaconf import DictConfig

from fedbench.core.options import ConfigError

MODES = ("auto", "online", "offline", "disabled")
LONGEST_NAME, LONGEST_CELL, LONGEST_TAG = 128, 100, 64  # the name and the tag are maximum lengths in W&B


def wandb_mode(setting: str) -> tuple[str, str]:
    """Return the mode of W&B for ``tracking.mode``, and a line that says why, or "".

    ``auto`` follows WANDB_MODE.  Without it, runs are online if a key is configured, and offline elsewhere.  Nothing is
    imported and nobody is asked: an online run without a key is recorded offline.

    Raises:
        ConfigError: The setting or WANDB_MODE is no mode.
    """
    mode = setting
    if setting == "auto":
        given = os.environ.get("WANDB_MODE") or "auto"
        mode = {"dryrun": "offline", "run": "online"}.get(given, given)
    if mode not in MODES:
        name = "tracking.mode" if setting != "auto" else "the variable WANDB_MODE"
        raise ConfigError(f"{name} is {mode}; allowed are {', '.join(MODES)}")
    if mode == "disabled":
        return mode, ""
    if importlib.util.find_spec("wandb") is None:
        return "disabled", "W&B: not installed (pip install wandb); the numbers are in the run's files."
    if mode == "offline" or wandb_key_is_configured():
        return ("offline" if mode == "offline" else "online"), ""
    return "offline", "W&B: no login (wandb login); recorded offline when the run ends, for wandb sync."


def wandb_key_is_configured() -> bool:
    """Return whether wandb.init would find a key, in the environment or in the netrc file."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    home = Path.home()
    given = os.environ.get("NETRC")
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).netloc
    for path in [Path(given).expanduser()] if given else [home / ".netrc", home / "_netrc"]:
        try:
            login = netrc.netrc(str(path)).authenticators(host)
        except (OSError, netrc.NetrcParseError):
            continue
        if login and login[2]:
            return True
    return False


def run_names(cfg: DictConfig, run_dir: Path) -> dict[str, Any]:
    """Return project, entity, group, job type, tags and name of a run.

    The name of a sweep's cell ends with its folder.  Its group is in tracking.group (app/sweep.py).
    """
    choices, tracking = cfg.choices, cfg.tracking
    dataset, partition, experiment = choices.dataset, choices.partition, choices.get("experiment")
    method, seed = cfg.get("name") or choices.algorithm, f"-s{cfg.seed}"
    table = [experiment.split("/")[0]] if experiment else []
    cell = cell_of(cfg, run_dir)
    end = f"{seed} {within(cell, LONGEST_CELL)}" if cell else seed
    return {
        "project": tracking.project,
        "entity": tracking.entity,
        "group": within(tracking.group or experiment or f"{dataset}-{partition}", LONGEST_NAME),
        "job_type": within(choices.algorithm, LONGEST_TAG),
        "tags": [within(tag, LONGEST_TAG) for tag in [*tracking.tags, dataset, partition, *table]],
        "name": within(f"{method}-{dataset}-{partition}", LONGEST_NAME - len(end)) + end,
    }


def cell_of(cfg: DictConfig, run_dir: Path) -> str:
    """Return the folder of a sweep's cell below that of the sweep; "" for a single run."""
    sweep, cell = Path(cfg.sweep_dir).expanduser().absolute(), run_dir.absolute()
    if sweep == cell or not cell.is_relative_to(sweep):
        return ""
    return cell.relative_to(sweep).as_posix()


def within(text: str, most: int) -> str:
    """Return the text, cut to a maximum length with a hash at its end if it is longer."""
    if len(text) <= most:
        return text
    return f"{text[: most - 9]}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
