"""The command ``fedbench export``: save the model of a client, or the predictions of all clients."""

from __future__ import annotations

import argparse
import math
import re
from pathlib import Path

from fedbench.core.command import add_config_dir, arguments, command
from fedbench.core.destination import check_file, check_folder, write_file
from fedbench.core.files import typed_path
from fedbench.core.options import require

NOT_IN_FILE_NAMES = re.compile(r"[^\w.-]")
GENERATION = ("tokens", "temperature", "seed")  # options of --generate
DESCRIPTION = """\
Export from a run: the model of a client for PyTorch, the predictions of all clients, or a text.

  python -m fedbench export <run directory> --client 7
  python -m fedbench export <run directory> --client north
  python -m fedbench export <run directory> --client 7 --merged
  python -m fedbench export <run directory> --client 7 --peft folder
  python -m fedbench export <run directory> --predictions predictions.npz
  python -m fedbench export <run directory> --client 7 --generate "To be"

The models are those of the last saved round; models of the best round are not saved.  The run is rebuilt from its
configuration and checkpoint, without executing stored code.  Classes in Python files below the working directory, and
classes of options in --config-dir, are accepted.  Repeat other classes of yours (model._target_=my_package.MyNet), and
a pickle that the run trusts (dataset.trust=MNIST): see docs/security.md."""


def _count(text: str) -> int:
    """Return the value of a flag as an integer >= 1 of at most 9 digits; ArgumentTypeError for any other text."""
    if not re.fullmatch(r"[1-9]\d{0,8}", text):
        raise argparse.ArgumentTypeError(f"must be an integer >= 1, got {text!r}")
    return int(text)


def _seed(text: str) -> int:
    """Return the value of a flag as an integer >= 0 of at most 18 digits; ArgumentTypeError for any other text."""
    if not re.fullmatch(r"\d{1,18}", text):
        raise argparse.ArgumentTypeError(f"must be an integer >= 0, got {text!r}")
    return int(text)


def _temperature(text: str) -> float:
    """Return the value of a flag as a finite number >= 0; ArgumentTypeError for any other text."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number >= 0, got {text!r}")
    return value


def parser() -> argparse.ArgumentParser:
    """Return the parser of the arguments of ``fedbench export``."""
    p = arguments("export", DESCRIPTION)
    p.add_argument("run_dir", type=typed_path, help="the run folder; add --client, --predictions or both")
    p.add_argument("overrides", nargs="*", help="overrides of the run that name your own classes or trusted pickles, "
                   "typed again: model._target_=my_package.MyNet, dataset.trust=MNIST")  # fmt: skip
    add_config_dir(p)
    # "append", so that a second client is refused instead of replacing the first one
    p.add_argument("--client", action="append", metavar="N", help="save the state_dict of this client (name or index)")
    forms = p.add_mutually_exclusive_group()  # they need --client
    forms.add_argument("--merged", action="store_true", help="with --client: merge the adapter into the weights")
    forms.add_argument("--peft", type=typed_path, metavar="FOLDER",
                       help="with --client: write a folder for peft instead (adapter=lora)")  # fmt: skip
    forms.add_argument("--generate", metavar="TEXT",
                       help="with --client: print this text as the client's language model continues it")  # fmt: skip
    p.add_argument("--tokens", type=_count, metavar="N", help="tokens that --generate adds at most (default: 100)")
    p.add_argument("--temperature", type=_temperature, metavar="T",
                   help="temperature of --generate; 0: always the most probable token (default: 0.8)")  # fmt: skip
    p.add_argument("--seed", type=_seed, metavar="N", help="of --generate; the same seed, the same text (default: 0)")
    p.add_argument("--out", type=typed_path, metavar="FILE.pt", help="file of the state_dict (default: client<N>.pt)")
    p.add_argument("--predictions", type=typed_path, metavar="FILE.npz", help="save all clients' test predictions")
    return p


@command
def main(argv: list[str]) -> int:
    """Run ``fedbench export`` with the words typed after it; return the exit status: 0, or 2 after a mistake."""
    args = parser().parse_intermixed_args(argv)
    _check_arguments(args)
    client = args.client[0] if args.client else None
    out = args.out or Path(f"client{NOT_IN_FILE_NAMES.sub('_', client or '')}.pt")
    writes_model = client is not None and args.peft is None and args.generate is None
    check_file("--out", out if writes_model else None)
    check_folder("--peft", args.peft)
    check_file("--predictions", args.predictions)
    _export(args, client, out)
    return 0


def _export(args: argparse.Namespace, client: str | None, out: Path) -> None:
    """Open the run, write the requested files, and print what they contain.

    Args:
        args: The parsed command line.
        client: Index or name of the client, as text; None to export no model.
        out: The file of its state_dict.
    """
    import numpy as np

    from fedbench.simulation import checkpoint
    from fedbench.tools import export  # torch
    from fedbench.tools.generate import generate

    sim = export.open_run(args.run_dir, [*args.overrides, *_class_overrides(args)], args.config_dir)
    if client is not None and args.peft is not None:
        base_model = export.save_peft_of(sim, client, args.peft)
        # base_model: the file or folder with the module that the adapter belongs to
        print(f"{args.peft}: client {client} for peft.PeftModel.from_pretrained, on {base_model}")
        print(f"{args.peft}: {export.saved_round(sim)}")
    elif client is not None and args.generate is not None:
        # GENERATION: the names of the options of generate, such as "tokens"; those not given keep their defaults
        options = {name: value for name in GENERATION if (value := getattr(args, name)) is not None}
        print(generate(sim, client, args.generate, **options))
    elif client is not None:
        state = export.state_of(sim, client, args.merged)
        write_file("--out", out, lambda file: checkpoint.dump(state, file))
        print(f"{out}: state_dict of client {client}, {sum(t.numel() for t in state.values()):,} values")
        print(f"{out}: {export.saved_round(sim)}")
    if args.predictions is not None:
        exported = export.predictions_of(sim)
        write_file("--predictions", args.predictions, lambda file: np.savez(file, **exported))  # type: ignore
        print(f"{args.predictions}: {', '.join(exported)} of {len(exported['client']):,} test samples")
        print(f"{args.predictions}: {export.saved_round(sim)}")


def _class_overrides(args: argparse.Namespace) -> list[str]:
    """Return overrides that name the user's own classes of the run, as open_run requires, except for those given.

    These are classes in Python files below the working directory, and classes of options in --config-dir.
    """
    from omegaconf import OmegaConf

    from fedbench.config.targets import user_classes
    from fedbench.core.settings import load_config

    config = args.run_dir / "config.yaml"
    if not config.is_file():
        return []  # open_run refuses the folder
    given_keys = {override.partition("=")[0] for override in args.overrides}
    stored = OmegaConf.to_container(load_config(config))
    class_overrides = user_classes(stored, args.config_dir, args.run_dir) if isinstance(stored, dict) else []  # type: ignore
    return [override for override in class_overrides if override.partition("=")[0] not in given_keys]


def _check_arguments(args: argparse.Namespace) -> None:
    """Raise ConfigError if no export is requested, two flags exclude each other, or a flag needs an absent one."""
    is_given = (args.client, args.predictions, args.peft, args.generate, args.merged) != (None, None, None, None, False)
    require(is_given, "no export is requested: add --client N for the model of a client, or --predictions FILE.npz")
    require(
        len(args.client or ()) < 2,
        f"--client is given twice, {' and '.join(args.client or ())}: export one client at a time",
    )
    require(
        args.out is None or args.client is not None, f"--out {args.out} is the file of a client's model: add --client N"
    )
    require(not args.merged or args.client is not None, "--merged exports the model of one client: add --client N")
    require(args.peft is None or args.client is not None, f"--peft {args.peft} exports one client: add --client N")
    require(
        args.peft is None or args.out is None,
        f"--out {args.out} and --peft {args.peft} exclude each other: omit --out, because --peft writes a folder",
    )
    require(
        args.generate is None or args.client is not None,
        f"--generate {args.generate!r} needs the model of a client: add --client N",
    )
    require(
        args.out is None or args.generate is None,
        f"--out {args.out} and --generate exclude each other: omit --out, because --generate prints the text",
    )
    given_flags = [f"--{name}" for name in GENERATION if getattr(args, name) is not None]
    require(
        not given_flags or args.generate is not None,
        f"{', '.join(given_flags)} belong to --generate: add --generate TEXT",
    )
    require(
        args.out is None or args.out != args.predictions,
        f"--out and --predictions are both {args.out}: name two different files",
    )
