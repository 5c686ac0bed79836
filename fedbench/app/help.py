"""Help of the command line, read from the conf folder: no group or option is listed here."""

from __future__ import annotations

import re
import textwrap
from itertools import pairwise
from pathlib import Path
from typing import Any

from fedbench.app import meanings
from fedbench.config.conf_tree import GROUPS, conf_dirs, families, find_conf_dir, group_options, menu, option_files

WIDTH = 110  # columns of the help
LONG = 40  # columns of key=default beyond which the meaning is below it
SUBCOMMANDS = {  # the module whose main(argv) does the work, and a line for the help
    "report": ("report.command", "tables and figures of run folders"),
    "paper": ("report.paper_command", "a paper's table beside your runs of it"),
    "figures": ("report.figures_command", "the figures that papers draw of a method"),
    "export": ("tools.export_command", "a client's model, or all predictions, from a run"),
    "partition": ("tools.partitions", "the samples that each client would have"),
    "check": ("testing.command", "test a method, model, ... of your own"),
    "synthesize": ("tools.synthesize", "training pictures from diffusion models"),
    "fid": ("tools.fid", "Frechet distance between real and extra pictures"),
    "contours": ("tools.contours", "true and predicted outlines of segmentations"),
    "pages": ("pages.command", "pages of results from run folders"),
}
SETTINGS = (  # the keys that users set most
    ("rounds", "communication rounds"),
    ("sample_rate", "share of the clients in a round (or clients_per_round=5)"),
    ("local.epochs", "passes over a client's data in a round"),
    ("system.dropout", "chance that a client drops out of a round (system.slow: share of slow ones)"),
    ("local.batch_size", "samples in a local step"),
    ("optimizer.lr", "the clients' learning rate"),
    ("partition.num_clients", "clients"),
    ("partition.alpha", "label skew of partition=dirichlet: smaller is stronger"),
    ("finetune.epochs", "train each client's model on before it is evaluated"),
    ("eval.every", "rounds between evaluations"),
    ("seed", "of everything but the partition (partition.seed)"),
    ("hardware.device", "auto, cpu, cuda, cuda:1, mps"),
    ("data_dir", "where data sets are (or the variable FEDBENCH_DATA)"),
)
HEAD = """\
fedbench: federated and personalized federated learning, any method on any model, data and partition

  python -m fedbench [group=option] [key=value] ...       one run
  python -m fedbench -m [group=a,b] [key=1,2,3] ...       a sweep: finished cells are not run again
  python -m fedbench resume=<run folder>                  continue a run that was stopped
  python -m fedbench --help experiment                    all options of a group
  python -m fedbench --help algorithm=pgfed               an option's source, and its keys with their meaning

Subcommands (python -m fedbench report --help)"""
TAIL = """\
Examples
  python -m fedbench algorithm=fedavg partition.alpha=0.5 rounds=50
  python -m fedbench -m algorithm=local,fedavg,pgfed seed=0,1,2 && python -m fedbench report sweeps
  python -m fedbench +experiment=debug algorithm=ditto algorithm.lam=0.1

--cfg job prints every key of the run that the command asks for; --info defaults where they come from;
--config-dir <folder> adds groups of your own; -q prints warnings and the final table only;
-m hydra/launcher=joblib runs a sweep's cells in parallel."""
NO_KEYS = ("defaults", "_target_", "_recursive_")  # entries of an option's file that no user sets


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
    """Return the comments at the head of an option's file, and its keys with their defaults and comments."""
    files = option_files(group, option, folders)
    if group in ("experiment", "callbacks"):  # their files have keys of several parts
        return "\n".join(f"{group}={name}\n{textwrap.indent(text.rstrip(), '  ')}" for name, text in files.items())
    head = [f"{group}={option}"]
    for name, text in reversed(files.items()):
        head += [f"  {line}" if name == option else f"  from {group}={name}: {line}" for line in _header(text)]
    keys: dict[str, tuple[str, str]] = {}
    for text in files.values():
        for key, (default, meaning) in _keys(text).items():
            keys[key] = (default, meaning or keys.get(key, ("", ""))[1])
    target = keys.pop("_target_", ("", ""))[0]
    documented = {**_of_every_option(group), **meanings.of_target(target)}
    head += [f"  class {target}"] if target else []
    keys = {key: (default, meaning or documented.get(key, "")) for key, (default, meaning) in keys.items()}
    shown = {f"{group}.{key}={default}": meaning for key, (default, meaning) in keys.items() if key not in NO_KEYS}
    width = max((len(word) for word in shown if len(word) <= LONG), default=0)
    return "\n".join([*head, *(_key_line(word, meaning, width) for word, meaning in shown.items())])


def _of_every_option(group: str) -> dict[str, str]:
    """Return the meaning of the keys that all options of a group have."""
    from fedbench.config.run_keys import KEYS

    shared = KEYS.get(group)
    return meanings.of_docstring(str(shared.__doc__)) if shared else {}


def _key_line(word: str, meaning: str, width: int) -> str:
    """Return key=default and its meaning beside it, or below it if the word is long."""
    if not meaning:
        return f"  {word}"
    label = f"  {word:<{width}}  "
    if len(word) > width:
        label = f"  {word}\n{' ' * (width + 4)}"
    return label + _filled(" " * (width + 4), [meaning], width + 4).lstrip()


def _header(text: str) -> list[str]:
    """Return the comments above the first key: the option's name, source and remarks."""
    lines = [line for line in text.splitlines() if line.strip()]
    end = next((i for i, line in enumerate(lines) if not line.startswith("#")), len(lines))
    return [line.removeprefix("#").strip() for line in lines[:end]]


def _keys(text: str) -> dict[str, tuple[str, str]]:
    """Return the topmost keys of a YAML file: their values as text, and the comments beside and below them."""
    import yaml

    root, lines = yaml.compose(text, yaml.SafeLoader), text.splitlines()
    pairs: list[Any] = root.value if isinstance(root, yaml.MappingNode) else []
    values = yaml.safe_load(text) or {}
    ends = [*(key.start_mark.line for key, _ in pairs[1:]), len(lines)]
    keys = {}
    for (key, node), end in zip(pairs, ends, strict=True):
        comments = (re.search(r"(?:^|\s)#\s*(.*)", line) for line in lines[key.start_mark.line : end])
        scalar = isinstance(node, yaml.ScalarNode)
        value = node.value if scalar else _one_line(values[key.value])
        keys[key.value] = (value, " ".join(found[1] for found in comments if found))
    return keys


def _one_line(value: Any) -> str:
    import yaml

    return yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=1000).strip()


def help_text() -> str:
    """Return one screen: subcommands, groups with their options, the keys that users set most, examples."""
    import yaml

    root = find_conf_dir()
    config = yaml.safe_load((root / "config.yaml").read_text(encoding="utf-8"))
    chosen = {g: o for item in config["defaults"] if isinstance(item, dict) for g, o in item.items()}
    subcommands = [f"  {name:<14}{what}" for name, (_, what) in SUBCOMMANDS.items()]
    groups = [_group(group, chosen.get(group)) for group in GROUPS if group_options(group)]
    settings = [f"  {key + '=' + _default(root, config, chosen, key):<30}{text}" for key, text in SETTINGS]
    groups = ["\nGroups (* the default)", *groups]
    return "\n".join([HEAD, *subcommands, *groups, "\nKeys and their defaults", *settings, "", TAIL])


def _group(group: str, chosen: str | None) -> str:
    names = [f"{name}*" if name == chosen else name for name in families(menu(group_options(group)))]
    return _filled(f"  {'+' if group == 'experiment' else ''}{group:<14}"[:16].ljust(16), names)


def _whole_group(group: str, folders: list[Path]) -> str:
    """Return every option, also those in folders."""
    return _filled(f"{group:<16}", group_options(group, folders))


def _filled(label: str, names: list[str], indent: int = 16) -> str:
    """Return a label and words behind it, in lines of WIDTH columns."""
    return textwrap.fill(
        "  ".join(names), WIDTH, initial_indent=label, subsequent_indent=" " * indent, break_on_hyphens=False
    )


def _default(root: Path, config: dict[str, Any], chosen: dict[str, str], key: str) -> str:
    """Return the value of a key in config.yaml, or in the default option of its group."""
    import yaml

    group, _, name = key.partition(".")
    if group in chosen:
        file = root / group / f"{chosen[group]}.yaml"
        value = yaml.safe_load(file.read_text(encoding="utf-8")).get(name) if file.is_file() else None
    else:
        value = config[group][name] if name else config[group]
    return "data" if key == "data_dir" else str(value)
