"""The help of the command line, generated from the files in the conf folder."""

from __future__ import annotations

import re
import textwrap
from itertools import pairwise
from pathlib import Path
from typing import Any

from fedbench.app import meanings
from fedbench.config.conf_tree import (
    GROUPS,
    conf_dirs,
    families,
    find_conf_dir,
    group_options,
    group_overview,
    option_files,
)

WIDTH = 110  # columns of the help
LONG = 40  # if key=default has more characters, its description is on the next line
SUBCOMMANDS = {  # name: (module with main(argv), description)
    "report": ("report.command", "tables and figures of run folders"),
    "tune": ("tune.command", "choose options by validation, with equal numbers of trials"),
    "paper": ("report.paper_command", "a paper's table beside your runs of it"),
    "figures": ("report.figures_command", "the figures that papers draw of a method"),
    "export": ("tools.export_command", "a client's model, all predictions, or a generated text, from a run"),
    "partition": ("tools.partitions", "the samples that each client would have"),
    "options": ("app.options_command", "all keys of a run: types, ranges, defaults, meanings"),
    "check": ("testing.command", "test your own method, model, partition, ..."),
    "synthesize": ("tools.synthesize", "training images from diffusion models"),
    "fid": ("tools.fid", "Frechet distance between real and extra images"),
    "contours": ("tools.contours", "true and predicted outlines of segmentations"),
    "pages": ("pages.command", "pages of results from run folders"),
}
SETTINGS = (  # frequently used keys
    ("rounds", "number of communication rounds"),
    ("sample_rate", "fraction of the clients per round (or clients_per_round=5)"),
    ("local.epochs", "local epochs per round"),
    ("system.dropout", "probability that a client drops out of a round (see also system.slow)"),
    ("local.batch_size", "samples per local step"),
    ("optimizer.lr", "learning rate of the clients"),
    ("partition.num_clients", "number of clients"),
    ("partition.alpha", "label skew of partition=dirichlet: smaller is stronger"),
    ("finetune.epochs", "epochs of fine-tuning each client's model before evaluation"),
    ("eval.every", "rounds between evaluations"),
    ("seed", "seed of everything except the partition (partition.seed)"),
    ("hardware.device", "auto, cpu, cuda, cuda:1, mps"),
    ("data_dir", "folder of the data sets (or the variable FEDBENCH_DATA)"),
)
HEAD = """\
fedbench: federated and personalized federated learning, any method on any model, data set and partition

  python -m fedbench [group=option] [key=value] ...       one run
  python -m fedbench -m [group=a,b] [key=1,2,3] ...       a sweep: finished runs are not repeated
  python -m fedbench resume=<run folder>                  resume a run that was stopped
  python -m fedbench --help experiment                    list all options of a group
  python -m fedbench --help algorithm=pgfed               show an option: its reference and its keys

Subcommands (python -m fedbench report --help)"""
TAIL = """\
Examples
  python -m fedbench algorithm=fedavg partition.alpha=0.5 rounds=50
  python -m fedbench -m algorithm=local,fedavg,pgfed seed=0,1,2 && python -m fedbench report sweeps
  python -m fedbench +experiment=debug algorithm=ditto algorithm.lam=0.1

--cfg job prints all keys of a run; --info defaults shows the files that they come from;
--config-dir <folder> adds your own options; -q prints only warnings and the final table;
--json prints the results as JSON; -m hydra/launcher=joblib runs a sweep in parallel;
-m ... --dry-run lists the runs of a sweep, what would be done, and about how long it would take."""
NO_KEYS = ("defaults", "_target_", "_recursive_")  # entries of an option's file that users do not set


def requested_help(arguments: list[str]) -> str:
    """Return the help of the groups and options in the arguments, or the general help if there are none.

    Other arguments, such as flags, are ignored.

    Args:
        arguments: The arguments of the command, such as "experiment" or "algorithm=pgfed".
    """
    folders = conf_dirs(_config_dir(arguments))
    named = [text.lstrip("+").partition("=") for text in arguments]
    parts = [
        _option(group, option, folders) if option else _all_options(group, folders)
        for group, _, option in named
        if group in GROUPS
    ]
    return "\n".join(parts) or help_text()


def _config_dir(arguments: list[str]) -> str | None:
    """Return the folder in ``--config-dir FOLDER``, ``-cd FOLDER`` or ``--config-dir=FOLDER``; None without them."""
    for flag, value in pairwise(arguments):
        if flag in ("--config-dir", "-cd"):
            return value
    return next((text.partition("=")[2] for text in arguments if text.startswith("--config-dir=")), None)


def _option(group: str, option: str, folders: list[Path]) -> str:
    """Return the help of an option: the comments at the top of its file, and its keys with defaults and descriptions.

    Args:
        group: The group of options, such as "algorithm".
        option: The option of the group, such as "fedavg".
        folders: The folders of options.
    """
    files = option_files(group, option, folders)
    if group in ("experiment", "callbacks"):  # their files have nested keys: show them as they are
        return "\n".join(f"{group}={name}\n{textwrap.indent(text.rstrip(), '  ')}" for name, text in files.items())
    lines = [f"{group}={option}"]
    for name, text in reversed(files.items()):  # the option's own file, then those that it includes
        lines += [f"  {line}" if name == option else f"  from {group}={name}: {line}" for line in header(text)]
    target, keys = described_keys(group, files)
    lines += [f"  class {target}"] if target else []
    # NO_KEYS: entries of files that are no options, such as defaults
    meanings = {f"{group}.{key}={default}": meaning for key, (default, meaning) in keys.items() if key not in NO_KEYS}
    # descriptions form a column, except for long entries, whose description is on the next line
    width = max((len(entry) for entry in meanings if len(entry) <= LONG), default=0)
    return "\n".join([*lines, *(_key_line(entry, meaning, width) for entry, meaning in meanings.items())])


def described_keys(group: str, files: dict[str, str]) -> tuple[str, dict[str, tuple[str, str]]]:
    """Return the class of an option, and its keys with their defaults as text and their descriptions.

    A description is the comment of the key in the file, or else that in the docstring of the option's class.

    Args:
        group: The group of options, such as "algorithm".
        files: From option to the text of its file: the option, after those that its defaults include.
    """
    keys: dict[str, tuple[str, str]] = {}
    for text in files.values():
        for key, (default, meaning) in commented_keys(text).items():
            keys[key] = (default, meaning or keys.get(key, ("", ""))[1])
    target = keys.pop("_target_", ("", ""))[0]
    documented = {**of_every_option(group), **meanings.of_target(target)}
    return target, {key: (default, meaning or documented.get(key, "")) for key, (default, meaning) in keys.items()}


def of_every_option(group: str) -> dict[str, str]:
    """Return {key: description} of the keys that every option of a group has, such as the key columns of all models.

    The result is {} if the group has no such keys.
    """
    from fedbench.config.run_keys import KEYS

    shared = KEYS.get(group)  # the class that declares these keys; None for a group without such keys
    return meanings.of_docstring(str(shared.__doc__)) if shared else {}


def _key_line(entry: str, meaning: str, width: int) -> str:
    """Return a line with key=default and its description, which is on the next line if key=default is long.

    Args:
        entry: key=default.
        meaning: The description; "" if there is none.
        width: The number of characters that key=default is padded to.
    """
    if not meaning:
        return f"  {entry}"
    label = f"  {entry:<{width}}  "
    if len(entry) > width:
        label = f"  {entry}\n{' ' * (width + 4)}"
    return label + _filled(" " * (width + 4), [meaning], width + 4).lstrip()


def header(text: str) -> list[str]:
    """Return the comment lines, without #, above the first key of a YAML file's text: name, reference, remarks."""
    lines = [line for line in text.splitlines() if line.strip()]
    end = next((i for i, line in enumerate(lines) if not line.startswith("#")), len(lines))
    return [line.removeprefix("#").strip() for line in lines[:end]]


def commented_keys(text: str) -> dict[str, tuple[str, str]]:
    """Return the keys at the top level of a YAML file with their values and comments.

    Args:
        text: The content of the file.

    Returns:
        For each key: its value as text, and the comments next to and below it as one text, "" without any.
    """
    import yaml

    root, lines = yaml.compose(text, yaml.SafeLoader), text.splitlines()
    pairs: list[Any] = root.value if isinstance(root, yaml.MappingNode) else []
    values = yaml.safe_load(text) or {}
    # a key ends at the line of the next one
    ends = [*(key.start_mark.line for key, _ in pairs[1:]), len(lines)] if pairs else []
    keys = {}
    for (key, node), end in zip(pairs, ends, strict=True):
        comments = (re.search(r"(?:^|\s)#\s*(.*)", line) for line in lines[key.start_mark.line : end])
        scalar = isinstance(node, yaml.ScalarNode)
        value = node.value if scalar else _one_line(values[key.value])
        keys[key.value] = (value, " ".join(match[1] for match in comments if match))
    return keys


def _one_line(value: Any) -> str:
    """Return a list, mapping or None as YAML text in one line: "[1, 2]", "{a: 1}" or "null"."""
    import yaml

    return yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=1000).strip()


def help_text() -> str:
    """Return the general help: subcommands, groups with their options, frequently used keys, examples."""
    import yaml

    root = find_conf_dir()
    config = yaml.safe_load((root / "config.yaml").read_text(encoding="utf-8"))
    chosen = {group: option for item in config["defaults"] if isinstance(item, dict) for group, option in item.items()}
    subcommands = [f"  {name:<14}{description}" for name, (_, description) in SUBCOMMANDS.items()]
    groups = [_group(group, chosen.get(group)) for group in GROUPS if group_options(group)]
    settings = [f"  {key + '=' + _default(root, config, chosen, key):<30}{text}" for key, text in SETTINGS]
    groups = ["\nGroups (* the default)", *groups]
    return "\n".join([HEAD, *subcommands, *groups, "\nKeys and their defaults", *settings, "", TAIL])


def _group(group: str, chosen: str | None) -> str:
    """Return the lines of a group of options in the general help, such as "algorithm  fedavg*  ditto ...".

    Args:
        group: The group of options, such as "algorithm".
        chosen: Its default option, which is marked by a star; None if it has no default.
    """
    # shortened by families(): folders with the same first word are one entry
    names = [f"{name}*" if name == chosen else name for name in families(group_overview(group_options(group)))]
    return _filled(f"  {'+' if group == 'experiment' else ''}{group:<14}"[:16].ljust(16), names)


def _all_options(group: str, folders: list[Path]) -> str:
    """Return the help of a group: its name and all of its options, those in subfolders included, as "table/a".

    Args:
        group: The group of options, such as "algorithm".
        folders: The conf folders, in whose subfolder GROUP its options are.
    """
    return _filled(f"{group:<16}", group_options(group, folders))


def _filled(label: str, names: list[str], indent: int = 16) -> str:
    """Return a label followed by names, wrapped to WIDTH columns; later lines begin with ``indent`` spaces."""
    return textwrap.fill(
        "  ".join(names), WIDTH, initial_indent=label, subsequent_indent=" " * indent, break_on_hyphens=False
    )


def _default(root: Path, config: dict[str, Any], chosen: dict[str, str], key: str) -> str:
    """Return the default of a key as text: its value in config.yaml, or in the file of the default option of its group.

    Args:
        root: The conf folder.
        config: The content of config.yaml.
        chosen: From the name of a group to its default option.
        key: The dotted key.
    """
    import yaml

    group, _, name = key.partition(".")
    if group in chosen:
        file = root / group / f"{chosen[group]}.yaml"
        value = yaml.safe_load(file.read_text(encoding="utf-8")).get(name) if file.is_file() else None
    else:
        value = config[group][name] if name else config[group]
    return "data" if key == "data_dir" else str(value)  # config.yaml has ${oc.env:FEDBENCH_DATA,data}
