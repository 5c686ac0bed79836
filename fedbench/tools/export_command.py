"""``python -m fedbench export``: a client's model for plain PyTorch, or every client's predictions."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from fedbench.core.command import add_config_dir, arguments, command
from fedbench.core.destination import check_file, check_folder, write_file
from fedbench.core.files import typed_path
from fedbench.core.options import require

NO_FILE = re.compile(r"[^\w.-]")  # characters replaced in file names
DESCRIPTION = """\
Take results out of a run: a client's model for plain PyTorch, or every client's predictions.

  python -m fedbench export <run directory> --client 7
  python -m fedbench export <run directory> --client north
  python -m fedbench export <run directory> --client 7 --merged
  python -m fedbench export <run directory> --client 7 --peft folder
  python -m fedbench export <run directory> --predictions predictions.npz

The models are those of the last saved round, in a finished run of the last round: those of the best round are not kept.
The run is rebuilt from its config and checkpoint, and nothing that is loaded can execute code.  Classes in Python files
below the working directory are yours, and so are those that the options of --config-dir name.  Name other classes again
(model._target_=my_package.MyNet), and a pickle that the run trusts (dataset.trust=MNIST): docs/security.md."""


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    p = arguments("export", DESCRIPTION)
    p.add_argument("run_dir", type=typed_path)
    p.add_argument("overrides", nargs="*", help="repeated: model._target_=my_package.MyNet, dataset.trust=MNIST")
    add_config_dir(p)
    p.add_argument("--client", action="append", metavar="N", help="save the state_dict of this client (name or number)")
    forms = p.add_mutually_exclusive_group()
    forms.add_argument("--merged", action="store_true", help="that of the bare model, the adapter in its weights")
    forms.add_argument(
        "--peft", type=typed_path, metavar="FOLDER", help="write a folder for peft instead (adapter=lora)"
    )
    p.add_argument("--out", type=typed_path, metavar="FILE.pt", help="default: client<N>.pt")
    p.add_argument("--predictions", type=typed_path, metavar="FILE.npz", help="save all clients' test predictions")
    return p


@command
def main(argv: list[str]) -> int:
    """Run the command line and return the exit status."""
    args = parser().parse_intermixed_args(argv)
    _check_words(args)
    client = args.client[0] if args.client else None
    out = args.out or Path(f"client{NO_FILE.sub('_', client or '')}.pt")
    check_file("--out", None if client is None or args.peft is not None else out)
    check_folder("--peft", args.peft)
    check_file("--predictions", args.predictions)
    _export(args, client, out)
    return 0


def _export(args: argparse.Namespace, client: str | None, out: Path) -> None:
    """Open the run and write what is asked for."""
    import numpy as np

    from fedbench.simulation import checkpoint
    from fedbench.tools import export  # torch

    sim = export.open_run(args.run_dir, [*args.overrides, *_own(args)], args.config_dir)
    if client is not None and args.peft is not None:
        export.save_peft_of(sim, client, args.peft)
        print(f"{args.peft}: client {client} for peft.PeftModel.from_pretrained, on base_model.safetensors")
        print(f"{args.peft}: {export.saved_round(sim)}")
    elif client is not None:
        state = export.state_of(sim, client, args.merged)
        write_file("--out", out, lambda file: checkpoint.dump(state, file))
        print(f"{out}: state_dict of client {client}, {sum(t.numel() for t in state.values()):,} numbers")
        print(f"{out}: {export.saved_round(sim)}")
    if args.predictions is not None:
        exported = export.predictions_of(sim)
        write_file("--predictions", args.predictions, lambda file: np.savez(file, **exported))  # type: ignore
        print(f"{args.predictions}: {', '.join(exported)} of {len(exported['client']):,} test samples")
        print(f"{args.predictions}: {export.saved_round(sim)}")


def _own(args: argparse.Namespace) -> list[str]:
    """Return overrides for the user's classes in the run that the command does not name."""
    from omegaconf import OmegaConf

    from fedbench.config.targets import own_classes
    from fedbench.core.settings import load_config

    config = args.run_dir / "config.yaml"
    if not config.is_file():
        return []  # refused where the run is opened
    given = {word.partition("=")[0] for word in args.overrides}
    stored = OmegaConf.to_container(load_config(config))
    own = own_classes(stored, args.config_dir, args.run_dir) if isinstance(stored, dict) else []  # type: ignore
    return [word for word in own if word.partition("=")[0] not in given]


def _check_words(args: argparse.Namespace) -> None:
    """Refuse flags that do not fit together."""
    asked = (args.client, args.predictions, args.peft, args.merged) != (None, None, None, False)
    require(asked, "name what to export: --client N, or --predictions FILE.npz")
    require(len(args.client or ()) < 2, "--client is given twice: export one by one")
    require(args.out is None or args.client is not None, "--out is where --client N goes: give that number, too")
    require(not args.merged or args.client is not None, "--merged is of one client: give --client N, too")
    require(args.peft is None or args.client is not None, "--peft is of one client: give --client N, too")
    require(
        args.peft is None or args.out is None,
        f"--out {args.out} names a file, and --peft {args.peft} a folder that is written instead: leave one out",
    )
    require(args.out is None or args.out != args.predictions, f"--out and --predictions are both {args.out}")
