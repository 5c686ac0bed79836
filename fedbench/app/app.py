"""The command line: ``python -m fedbench`` and the console script ``fedbench``.

Help is answered from the conf folder alone; everything else is in launch.py, imported when it is needed.
"""

from __future__ import annotations

import sys
import textwrap
from itertools import pairwise
from pathlib import Path
from typing import Any

from fedbench.config.conf_tree import GROUPS, conf_dirs, families, find_conf_dir, group_options, menu, option_files
from fedbench.core.options import ConfigError, refused

WIDTH = 110  # columns of the help
KNOBS = (  # the dozen keys people turn
    ("rounds", "communication rounds"),
    ("sample_rate", "share of the clients in a round (or clients_per_round=5)"),
    ("local.epochs", "passes over a client's data in a round"),
    ("system.dropout", "chance that a client is lost in a round (system.slow: share of slow ones)"),
    ("local.batch_size", "samples in a local step"),
    ("optimizer.lr", "the clients' learning rate"),
    ("partition.num_clients", "clients"),
    ("partition.alpha", "label skew of partition=dirichlet: smaller is stronger"),
    ("finetune.epochs", "train each client's model on before it is evaluated"),
    ("eval.every", "rounds between evaluations"),
    ("seed", "of everything but the partition (partition.seed)"),
    ("hardware.device", "auto, cpu, cuda, cuda:1, mps"),
    ("data_dir", "where data sets lie (or the variable FEDBENCH_DATA)"),
)
HEAD = """\
fedbench: federated and personalized federated learning, any method on any model, data and partition

  python -m fedbench [group=option] [key=value] ...       one run
  python -m fedbench -m [group=a,b] [key=1,2,3] ...       a sweep: finished cells are not run again
  python -m fedbench resume=<run directory>               go on with a run that was stopped
  python -m fedbench check my_package.MyMethod            check a method, model, ... of your own
  python -m fedbench --help experiment                    all of one group's options
  python -m fedbench --help algorithm=pgfed               an option's keys, their defaults and what they mean
"""
TAIL = """\
Examples
  python -m fedbench algorithm=fedavg partition.alpha=0.5 rounds=50
  python -m fedbench -m algorithm=local,fedavg,pgfed seed=0,1,2 && python -m fedbench.report sweeps
  python -m fedbench +experiment=debug algorithm=ditto algorithm.lam=0.1

--cfg job prints every key of the run that the command asks for; --info defaults where they come from;
--config-dir <folder> adds groups of your own; -m hydra/launcher=joblib runs a sweep's cells in parallel."""


def main(argv: list[str] | None = None) -> int:
    """Run a command line (default: the process's own).

    Returns the exit status: 0 done, 1 a run failed, 2 a mistake in the command, 130 interrupted.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        if {"-h", "--help"} & set(words):
            print(asked_help(words), flush=True)
            return 0
        from fedbench.app.launch import launch  # Hydra: half a second that --help need not pay

        return launch(words)
    except ConfigError as mistake:
        print(f"fedbench: {mistake}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        print(f"fedbench: {refused(error)}", file=sys.stderr)
        return 2


def asked_help(words: list[str]) -> str:
    """Return the help of the groups and options in the words, or the general help if there are none."""
    folders = conf_dirs(_config_dir(words))
    named = [word.lstrip("+").partition("=") for word in words]
    parts = [
        _option(group, option, folders) if option else _whole_group(group, folders)
        for group, _, option in named
        if group in GROUPS
    ]
    return "\n".join(parts) or help_text()


def _config_dir(words: list[str]) -> str | None:
    flags = ("--config-dir", "-cd")
    after = [word for flag, word in pairwise(words) if flag in flags]
    return next(iter([*after, *(word.partition("=")[2] for word in words if word.startswith("--config-dir="))]), None)


def _option(group: str, option: str, folders: list[Path]) -> str:
    """Return the keys of an option with their defaults and comments, as in its file."""
    files = option_files(group, option, folders).items()
    return "\n".join(f"{group}={name}\n{textwrap.indent(text.rstrip(), '  ')}" for name, text in files)


def help_text() -> str:
    """One screen: what there is to choose, what people turn, three commands."""
    import yaml

    root = find_conf_dir()
    config = yaml.safe_load((root / "config.yaml").read_text(encoding="utf-8"))
    chosen = {g: o for item in config["defaults"] if isinstance(item, dict) for g, o in item.items()}
    groups = [_group(group, chosen.get(group)) for group in GROUPS if group_options(group)]
    knobs = [f"  {key + '=' + _default(root, config, chosen, key):<30}{text}" for key, text in KNOBS]
    return "\n".join([HEAD, "Groups (* the default)", *groups, "\nKeys and their defaults", *knobs, "", TAIL])


def _group(group: str, chosen: str | None) -> str:
    names = [f"{name}*" if name == chosen else name for name in families(menu(group_options(group)))]
    return _filled(f"  {'+' if group == 'experiment' else ''}{group:<14}"[:16].ljust(16), names)


def _whole_group(group: str, folders: list[Path]) -> str:
    """Every option, also those in folders."""
    return _filled(f"{group:<16}", group_options(group, folders))


def _filled(label: str, names: list[str]) -> str:
    return textwrap.fill(
        "  ".join(names), WIDTH, initial_indent=label, subsequent_indent=" " * 16, break_on_hyphens=False
    )


def _default(root: Path, config: dict[str, Any], chosen: dict[str, str], key: str) -> str:
    """The value of a key in config.yaml, or in the default option of its group."""
    import yaml

    group, _, name = key.partition(".")
    if group in chosen:
        file = root / group / f"{chosen[group]}.yaml"
        value = yaml.safe_load(file.read_text(encoding="utf-8")).get(name) if file.is_file() else None
    else:
        value = config[group][name] if name else config[group]
    return "data" if key == "data_dir" else str(value)
