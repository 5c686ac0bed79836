"""Take results out of a finished run: a client's model for plain PyTorch, and every client's predictions.

    python -m fedbench.export <run directory> --client 7
    python -m fedbench.export <run directory> --predictions predictions.npz

The run is rebuilt from its own config and checkpoint; nothing that is loaded can execute code.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from omegaconf import OmegaConf
from torch import Tensor

from fedbench.cli import resume
from fedbench.core.destination import check_file, write_file
from fedbench.core.options import ConfigError, refused, require
from fedbench.engine.cohort import Cohort
from fedbench.simulation import checkpoint
from fedbench.simulation.simulator import Simulation, prepare


def open_run(run_dir: str | Path, overrides: Sequence[str] = ()) -> Simulation:
    """The run as it stood at its last checkpoint: data, model, algorithm and every client's state.

    overrides name the targets that are yours ("model._target_=my_package.MyNet"): nothing else of your own is built.
    """
    values, _ = resume.prepare(Path(run_dir), list(overrides), None)
    return prepare(OmegaConf.create(values), Path(run_dir), checkpoint.load(Path(run_dir), tables=False))


def deployed(sim: Simulation, ids: np.ndarray) -> tuple[Cohort, object]:
    """The cohort of these clients, and what they would deploy (rows, or a dict with "theta")."""
    n = sim.engine.federation.num_clients
    outside = [i for i in ids.tolist() if not 0 <= i < n]
    require(
        bool(len(ids)) and not outside,
        f"client {(outside or ['none'])[0]} is not among the {n} clients, which are 0 to {n - 1}",
    )
    cohort = Cohort(sim.engine, ids, max(sim.done - 1, 0), "evaluation")
    with torch.no_grad():
        return cohort, sim.algorithm.personalized(cohort, sim.done == sim.cfg.rounds)


def client_state(run_dir: str | Path, client: int, overrides: Sequence[str] = ()) -> dict[str, Tensor]:
    """What a client would deploy, as the state_dict of the run's nn.Module.

    Load it with strict=False where the module has integer counters (BatchNorm), which are no part of a row.
    """
    sim = open_run(run_dir, overrides)
    _, rows = deployed(sim, np.array([client]))
    row = rows["theta"] if isinstance(rows, dict) else rows
    assert isinstance(row, Tensor)
    return sim.engine.model.state_dict(row if row.dim() == 1 else row[0])


def predictions(run_dir: str | Path, split: str = "test", overrides: Sequence[str] = ()) -> dict[str, np.ndarray]:
    """Every client's logits on its own split: client [n], index [n] (into the data set), target [n, ...], logits
    [n, C]."""
    sim = open_run(run_dir, overrides)
    ids = np.arange(sim.engine.federation.num_clients)
    cohort, rows = deployed(sim, ids)
    part = sim.engine.federation.splits[split]
    logits = torch.cat(cohort.forward(rows, sim.algorithm.predict, split)).cpu().numpy()
    targets = sim.engine.federation.targets.cpu().numpy()[part.indices]
    return {"client": part.owners(), "index": part.indices, "target": targets, "logits": logits}


def _client(text: str) -> int:
    """argparse's type of --client."""
    if not re.fullmatch(r"\d{1,18}", text):
        raise argparse.ArgumentTypeError(f"must be the number of a client, a whole number >= 0, got {text!r}")
    return int(text)


def main() -> int:
    """Run the command; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m fedbench.export", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("overrides", nargs="*", help="targets of your own: model._target_=my_package.MyNet")
    parser.add_argument("--client", type=_client, metavar="N", help="save this client's state_dict under --out")
    parser.add_argument("--out", type=Path, metavar="FILE.pt", help="default: client<N>.pt")
    parser.add_argument("--predictions", type=Path, metavar="FILE.npz", help="save all clients' test predictions")
    args = parser.parse_intermixed_args()
    if args.client is None and args.predictions is None:
        parser.error("say what to export: --client N, or --predictions FILE.npz")
    try:
        require(sum(word.startswith("--client") for word in sys.argv) < 2, "--client is given twice: export one by one")
        require(args.out is None or args.client is not None, "--out is where --client N goes: give that number, too")
        require(args.out is None or args.out != args.predictions, f"--out and --predictions are both {args.out}")
        out = args.out or Path(f"client{args.client}.pt")
        check_file("--out", None if args.client is None else out)
        check_file("--predictions", args.predictions)
        if args.client is not None:
            state = client_state(args.run_dir, args.client, args.overrides)
            write_file("--out", out, lambda file: checkpoint.dump(state, file))
            print(f"{out}: state_dict of client {args.client}, {sum(t.numel() for t in state.values()):,} numbers")
        if args.predictions is not None:
            exported = predictions(args.run_dir, overrides=args.overrides)
            write_file("--predictions", args.predictions, lambda file: np.savez(file, **exported))  # type: ignore
            print(f"{args.predictions}: {', '.join(exported)} of {len(exported['client']):,} test samples")
    except ConfigError as error:
        print(f"fedbench: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"fedbench: {refused(error)}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
