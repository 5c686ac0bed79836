"""Take results out of a run: a client's model for plain PyTorch, and every client's predictions.

The models are those of the last saved round, in a finished run of the last round.  The run is rebuilt from its config
and checkpoint, and nothing that is loaded can execute code.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from omegaconf import OmegaConf
from torch import Tensor, nn

from fedbench.app import resume
from fedbench.core.destination import check_folder, write_file
from fedbench.core.options import ConfigError, require
from fedbench.engine.cohort import Cohort
from fedbench.simulation import checkpoint
from fedbench.simulation.build_model import build_module
from fedbench.simulation.instantiate import part
from fedbench.simulation.simulator import Simulation, prepare
from fedbench.tools import _plain

NAMES = 10  # how many client names a message shows


def open_run(run_dir: str | Path, overrides: Sequence[str] = (), config_dir: str | None = None) -> Simulation:
    """Open a run at its last checkpoint: data, model, algorithm and every client's state.

    Args:
        run_dir: The run folder.
        overrides: Your own classes ("model._target_=my_package.MyNet") and a pickle that the run trusts
            ("dataset.trust=MNIST").  No other class or pickle of yours is used.
        config_dir: A folder of your own options, whose classes need no overrides.
    """
    values, _ = resume.prepare(Path(run_dir), list(overrides), config_dir)
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


def number_of(sim: Simulation, client: int | str) -> int:
    """Return the number of a client given by name or number; ConfigError if there is none."""
    names = sim.split.names or ()
    if not isinstance(client, str):
        return int(client)
    if client in names:
        return names.index(client)
    named_by_number = any(name.isdecimal() for name in names)  # then numbers are names
    listed = f"{', '.join(names[:NAMES])}{', ...' if len(names) > NAMES else ''}"
    shown = f", or a name ({listed})" if names else ""
    require(
        re.fullmatch(r"\d{1,18}", client) is not None and not named_by_number,
        f"--client must be the number of a client, a whole number >= 0{shown}, got {client!r}",
    )
    return int(client)


def client_state(
    run_dir: str | Path,
    client: int | str,
    overrides: Sequence[str] = (),
    merged: bool = False,
    config_dir: str | None = None,
) -> dict[str, Tensor]:
    """Return the state_dict of the model that a client deploys, including frozen weights.

    With an adapter it is that of the adapted module.  Without one, load it with strict=False if the module has integer
    counters (BatchNorm), which rows do not contain.

    Args:
        run_dir: The run folder.
        client: Number or name of the client.
        overrides: See `open_run`.
        merged: Return the whole state_dict of the bare module, with the adapter added to its weights.
        config_dir: See `open_run`.

    Raises:
        ConfigError: The adapter cannot be merged.
    """
    return state_of(open_run(run_dir, overrides, config_dir), client, merged)


def state_of(sim: Simulation, client: int | str, merged: bool = False) -> dict[str, Tensor]:
    """Return `client_state` of an open run."""
    state = _row_state(sim, client)
    if merged:
        bare = _bare(sim)
        _plain.merge(_holding(sim, state), bare, _adapter_key(sim))
        return bare.state_dict()
    # what was frozen is in no row, and may be drawn: without it the file would be worth nothing
    froze = "adapter" in sim.engine.model.columns or sim.cfg.model.get("freeze")
    return {**_holding(sim, state).state_dict()} if froze else state


def client_module(sim: Simulation, client: int | str, merged: bool = False) -> nn.Module:
    """The nn.Module that a client would deploy, with an adapter the adapted one, on the CPU and in evaluation mode.

    merged: the bare module, with the adapter's numbers in its weights; ConfigError where it cannot be merged.
    """
    state = _row_state(sim, client)
    if "adapter" in sim.engine.model.columns and not merged:
        module = _holding(sim, state)
    else:
        module = _bare(sim)
        if merged:
            _plain.merge(_holding(sim, state), module, _adapter_key(sim))
        else:
            module.load_state_dict(state, strict=False)  # what is in no row was drawn, or loaded, as it was for the run
    return module.cpu().eval()


def save_peft(
    run_dir: str | Path,
    client: int | str,
    folder: str | Path,
    overrides: Sequence[str] = (),
    config_dir: str | None = None,
) -> None:
    """Write what a client would deploy as a folder for peft.PeftModel.from_pretrained(module, folder).

    adapter_config.json and adapter_model.safetensors are peft's: what the adapter added, and modules that learned
    beside it.  base_model.safetensors is the state_dict of the bare module, which is frozen but for those: it may have
    been drawn, and the rest is worth nothing without it.  ConfigError where peft has no such adapter.
    """
    save_peft_of(open_run(run_dir, overrides, config_dir), client, folder)


def save_peft_of(sim: Simulation, client: int | str, folder: str | Path) -> None:
    """Run `save_peft` on an open run."""
    try:
        from safetensors.torch import save
    except ImportError as error:
        raise ConfigError("--peft needs safetensors: pip install safetensors") from error
    folder = Path(folder)
    state, bare = _row_state(sim, client), _bare(sim)
    adapted, adapter = _holding(sim, state), part(sim.cfg, "adapter")
    config, tensors = _plain.peft_files(adapted, bare, adapter, _adapter_key(sim), state)
    base = {name: tensor.clone() for name, tensor in bare.state_dict().items()}  # tied ones are refused there
    check_folder("--peft", folder)
    write_file("--peft", folder / "base_model.safetensors", lambda file: file.write(save(base)))
    write_file("--peft", folder / "adapter_model.safetensors", lambda file: file.write(save(tensors)))
    text = json.dumps(config, indent=2) + "\n"
    write_file("--peft", folder / "adapter_config.json", lambda file: file.write(text.encode()))


def saved_round(sim: Simulation) -> str:
    """Describe the round of an open run's models, for readers who expect the best round."""
    saved, best = f"round {sim.done} of {sim.cfg.rounds}, the last that was saved", (sim.best or {}).get("round")
    if best is None:
        return saved
    if best == sim.done:
        return f"{saved} (the best one, too)"
    return f"{saved} (the models of round {best}, the best on test parts, are not kept)"


def _row_state(sim: Simulation, client: int | str) -> dict[str, Tensor]:
    """What a row of this client's says of the module's state_dict."""
    _, rows = deployed(sim, np.array([number_of(sim, client)]))
    row = rows["theta"] if isinstance(rows, dict) else rows
    assert isinstance(row, Tensor)
    return sim.engine.model.state_dict(row if row.dim() == 1 else row[0])


def _holding(sim: Simulation, state: dict[str, Tensor]) -> nn.Module:
    """The run's module with these numbers in it: the run is over, and nothing else reads it."""
    sim.engine.model.module.load_state_dict(state, strict=False)
    return sim.engine.model.module


def _bare(sim: Simulation) -> nn.Module:
    """The run's module without its adapter, as it was drawn."""
    return build_module(sim.cfg, sim.engine.federation)


def _adapter_key(sim: Simulation) -> str:
    return f"adapter={sim.cfg.choices.adapter}"


def predictions(
    run_dir: str | Path, split: str = "test", overrides: Sequence[str] = (), config_dir: str | None = None
) -> dict[str, np.ndarray]:
    """Return every client's logits on its own samples of a split.

    Returns:
        client [n], index [n] (into the data set), target [n, ...], logits [n, C], and names [N] if clients have names.
    """
    return predictions_of(open_run(run_dir, overrides, config_dir), split)


def predictions_of(sim: Simulation, split: str = "test") -> dict[str, np.ndarray]:
    """`predictions` of a run that is open."""
    ids = np.arange(sim.engine.federation.num_clients)
    cohort, rows = deployed(sim, ids)
    part = sim.engine.federation.splits[split]
    logits = torch.cat(cohort.forward(rows, sim.algorithm.predict, split)).cpu().numpy()
    targets = sim.engine.federation.targets.cpu().numpy()[part.indices]
    names = {} if sim.split.names is None else {"names": np.array(sim.split.names[: len(ids)])}
    return {"client": part.owners(), "index": part.indices, "target": targets, "logits": logits, **names}
