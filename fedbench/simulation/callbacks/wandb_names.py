"""The mode of Weights & Biases, and the names of a run there."""

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
LONGEST_NAME, LONGEST_FOLDER, LONGEST_TAG = 128, 100, 64  # characters; W&B limits names and tags


def wandb_mode(setting: str) -> tuple[str, str]:
    """Return the mode of W&B for an option ``tracking.mode``.

    ``auto`` follows WANDB_MODE.  Without that variable, runs are online if a W&B key is configured, else offline.

    Args:
        setting: auto, online, offline or disabled.

    Returns:
        The mode (online, offline or disabled), and a line for the user if it is not the requested one, else "".

    Raises:
        ConfigError: The setting or WANDB_MODE is not a mode.
    """
    mode = setting
    if setting == "auto":
        variable = os.environ.get("WANDB_MODE") or "auto"
        mode = {"dryrun": "offline", "run": "online"}.get(variable, variable)  # former names of the modes
    if mode not in MODES:
        name = "tracking.mode" if setting != "auto" else "the variable WANDB_MODE"
        raise ConfigError(f"{name} must be one of {', '.join(MODES)}, got {mode}")
    if mode == "disabled":
        return mode, ""
    if importlib.util.find_spec("wandb") is None:
        return "disabled", "W&B: not installed (pip install wandb); the results are in the run's files."
    if mode == "offline" or wandb_key_is_configured():
        return ("offline" if mode == "offline" else "online"), ""
    return (
        "offline",
        "W&B: not logged in (wandb login); the run is recorded offline at its end, for wandb sync.",
    )


def wandb_key_is_configured() -> bool:
    """Return whether wandb.init would find an API key of W&B: in WANDB_API_KEY or in the user's netrc file."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    home = Path.home()
    netrc_path = os.environ.get("NETRC")
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).netloc
    for path in [Path(netrc_path).expanduser()] if netrc_path else [home / ".netrc", home / "_netrc"]:
        try:
            login = netrc.netrc(str(path)).authenticators(host)
        except (OSError, netrc.NetrcParseError):
            continue
        if login and login[2]:  # login, account, password
            return True
    return False


def run_names(cfg: DictConfig, run_dir: Path) -> dict[str, Any]:
    """Return the arguments of wandb.init that name a run: project, entity, group, job type, tags and name.

    The name of a run of a sweep ends with its folder.

    Args:
        cfg: The checked configuration.
        run_dir: The run folder.
    """
    choices, tracking = cfg.choices, cfg.tracking
    dataset, partition, experiment = choices.dataset, choices.partition, choices.get("experiment")
    method, seed = cfg.get("name") or choices.algorithm, f"-s{cfg.seed}"
    experiment_tags = [experiment.split("/")[0]] if experiment else []  # the folder of the experiment's file
    subfolder = folder_in_sweep(cfg, run_dir)
    end = f"{seed} {shortened(subfolder, LONGEST_FOLDER)}" if subfolder else seed
    return {
        "project": tracking.project,
        "entity": tracking.entity,
        "group": shortened(tracking.group or experiment or f"{dataset}-{partition}", LONGEST_NAME),
        "job_type": shortened(choices.algorithm, LONGEST_TAG),
        "tags": [shortened(tag, LONGEST_TAG) for tag in [*tracking.tags, dataset, partition, *experiment_tags]],
        "name": shortened(f"{method}-{dataset}-{partition}", LONGEST_NAME - len(end)) + end,
    }


def folder_in_sweep(cfg: DictConfig, run_dir: Path) -> str:
    """Return the folder of a run relative to sweep_dir, the folder of its sweep; "" for a run outside of sweep_dir."""
    sweep_dir = Path(cfg.sweep_dir).expanduser().absolute()
    run_dir = run_dir.absolute()
    if run_dir == sweep_dir or not run_dir.is_relative_to(sweep_dir):
        return ""
    return run_dir.relative_to(sweep_dir).as_posix()


def shortened(text: str, max_length: int) -> str:
    """Return a text with at most max_length characters.

    The end of a longer text is replaced by a hash of the whole text, so that different texts stay different.
    """
    if len(text) <= max_length:
        return text
    # 9: a hyphen and 8 digits of the hash
    return f"{text[: max_length - 9]}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
