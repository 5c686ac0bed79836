"""Export from a run: the model of a client for PyTorch or peft, and the predictions of all clients.

The models are those of the last checkpoint.  The run is rebuilt from its configuration and checkpoint, without
executing stored code.
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

from fedbench.adapters.lora import cut_to_rank
from fedbench.app import resume
from fedbench.core.destination import check_folder, write_file
from fedbench.core.options import ConfigError, listed, require
from fedbench.engine.cohort import Cohort
from fedbench.simulation import checkpoint
from fedbench.simulation.build_model import build_module
from fedbench.simulation.instantiate import component
from fedbench.simulation.simulator import Simulation, prepare
from fedbench.tools import _export_formats


def open_run(run_dir: str | Path, overrides: Sequence[str] = (), config_dir: str | None = None) -> Simulation:
    """Return a run as it was at its last checkpoint: data, model, algorithm and every client's state.

    Args:
        run_dir: The run folder.
        overrides: Classes of your own that the run uses ("model._target_=my_package.MyNet") and a pickle that it trusts
            ("dataset.trust=MNIST"), repeated.  For safety, no class or pickle is loaded because config.yaml names it.
        config_dir: A folder with your own options, whose classes need no overrides.

    Raises:
        ConfigError: The run has no checkpoint, or needs a class or pickle that is not repeated.
    """
    values, _ = resume.prepare(Path(run_dir), list(overrides), config_dir)  # and whether the run is finished
    # tables=False: the CSV files of the run are not checked, because nothing is appended to them
    return prepare(OmegaConf.create(values), Path(run_dir), checkpoint.load(Path(run_dir), tables=False))


def deployed(sim: Simulation, ids: np.ndarray) -> tuple[Cohort, object]:
    """Return the cohort of some clients, and what they deploy.

    Args:
        sim: The open run.
        ids: The indices of the clients [k], at least one.

    Returns:
        The cohort, and the result of the algorithm's `personalized`: rows, the clients' trained numbers [k, P], or one
        row [P] for all of them; or a dict that has these rows as "theta".

    Raises:
        ConfigError: There is no such client.
    """
    n = sim.engine.federation.num_clients
    unknown = [i for i in ids.tolist() if not 0 <= i < n]
    require(
        bool(len(ids)) and not unknown,
        f"client {(unknown or ['none'])[0]} is not among the {n} clients, which are 0 to {n - 1}: choose one of these",
    )
    last_round = max(sim.done - 1, 0)  # counted from 0
    cohort = Cohort(sim.engine, ids, last_round, mode="evaluation")
    is_last_round = sim.done == sim.cfg.rounds  # some methods fine-tune then
    with torch.no_grad():  # with_personal_factors: clients may keep LoRA factors of their own
        return cohort, cohort.with_personal_factors(sim.algorithm.personalized(cohort, is_last_round))


def index_of(sim: Simulation, client: int | str) -> int:
    """Return the index of a client.

    Args:
        sim: The open run.
        client: An index, its digits as text, or a name.  If names of clients are numbers, text is a name only.

    Raises:
        ConfigError: A text is neither a name nor an index.  Whether an index exists is not checked.
    """
    names = sim.split.names or ()
    if not isinstance(client, str):
        return int(client)
    if client in names:
        return names.index(client)
    are_names_numbers = any(name.isdecimal() for name in names)
    or_name = f", or a name ({listed(names)})" if names else ""
    require(
        re.fullmatch(r"\d{1,18}", client) is not None and not are_names_numbers,
        f"--client must be the index of a client, an integer from 0 to {sim.split.num_clients - 1}{or_name}, got "
        f"{client!r}: fedbench partition lists the clients",
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

    With an adapter, it is that of the adapted module, unless ``merged``.  Without one, it lacks integer counters, such
    as num_batches_tracked of BatchNorm: load it with strict=False if the module has any.

    Args:
        run_dir: The run folder.
        client: Index or name of the client.
        overrides: Classes of your own that the run needs, such as "model._target_=my_package.MyNet".
        merged: Whether to return the state_dict of the module without the adapter, with the adapter merged into its
            weights.
        config_dir: A folder with your own options, whose classes need no overrides.

    Raises:
        ConfigError: The adapter cannot be merged.
    """
    return state_of(open_run(run_dir, overrides, config_dir), client, merged)


def state_of(sim: Simulation, client: int | str, merged: bool = False) -> dict[str, Tensor]:
    """Return the state_dict of the model that a client deploys, including frozen weights.

    Args:
        sim: The open run.
        client: Index or name of the client.
        merged: Whether to return the state_dict of the module without the adapter, with the adapter merged into its
            weights.

    Raises:
        ConfigError: There is no such client, or the adapter cannot be merged.
    """
    if merged:
        return client_module(sim, client, merged=True).state_dict()
    state = _row_state(sim, client)
    # A client's row does not contain frozen weights, which may be random: without them, the file would be useless.
    # model.columns: the named groups of trained parameters; one is "adapter" if the model has an adapter
    has_frozen_weights = "adapter" in sim.engine.model.columns or sim.cfg.model.get("freeze")
    return dict(_run_module_with(sim, state, client).state_dict()) if has_frozen_weights else state


def client_module(sim: Simulation, client: int | str, merged: bool = False) -> nn.Module:
    """Return the module that a client deploys, on the CPU and in evaluation mode.

    Args:
        sim: The open run.
        client: Index or name of the client.
        merged: Whether to return the module without the adapter, with the adapter merged into its weights.

    Raises:
        ConfigError: There is no such client, or the adapter cannot be merged.
    """
    state = _row_state(sim, client)  # the trained tensors by name
    if merged:
        module = _bare_module(sim)  # without the adapter
        _export_formats.merge(_run_module_with(sim, state, client), module, _adapter_key(sim))
    elif "adapter" in sim.engine.model.columns:  # the model has an adapter
        module = _run_module_with(sim, state, client)
    else:
        module = _bare_module(sim)
        module.load_state_dict(state, strict=False)  # frozen weights are those of the run: same seed, or same file
    return module.cpu().eval()


def save_peft(
    run_dir: str | Path,
    client: int | str,
    folder: str | Path,
    overrides: Sequence[str] = (),
    config_dir: str | None = None,
) -> None:
    """Write what a client deploys as a folder for peft.PeftModel.from_pretrained(module, folder).

    adapter_config.json and adapter_model.safetensors contain the adapter and other trained modules, in peft's format.
    base_model.safetensors is the state_dict of the module without the adapter.  It is needed, too, because frozen
    weights may be random.  For a network of transformers that was read from a folder, this folder takes its place.

    Args:
        run_dir: The run folder.
        client: Index or name of the client.
        folder: The folder to write.
        overrides: Classes of your own that the run needs, such as "model._target_=my_package.MyNet".
        config_dir: A folder with your own options, whose classes need no overrides.

    Raises:
        ConfigError: peft has no such adapter, or a file cannot be written.
    """
    save_peft_of(open_run(run_dir, overrides, config_dir), client, folder)


def save_peft_of(sim: Simulation, client: int | str, folder: str | Path) -> str:
    """Write the model that a client deploys as a folder for peft.  The files are those of `save_peft`.

    Args:
        sim: The open run.
        client: Index or name of the client.
        folder: The folder to write.

    Returns:
        The file or folder with the module that the adapter belongs to.

    Raises:
        ConfigError: peft has no such adapter, or a file cannot be written.
    """
    try:
        from safetensors.torch import save
    except ImportError as error:
        raise ConfigError(
            "--peft needs the package safetensors, which is not installed: run pip install safetensors"
        ) from error
    folder = Path(folder)
    state, bare = _row_state(sim, client), _bare_module(sim)
    adapted, adapter = _run_module_with(sim, state, client), component(sim.cfg, "adapter")
    config, tensors = _export_formats.peft_files(adapted, bare, adapter, _adapter_key(sim), trained=state.keys())
    check_folder("--peft", folder)
    network = bare.get_submodule(bare.library_module) if isinstance(bare, _export_formats.HasLibraryModule) else bare
    sync = sim.engine.lora_sync
    changed = sync is not None and sync.backbone is not None  # whether rounds changed the frozen weights
    if changed:
        _export_formats.with_frozen_weights(bare, adapted)
    # the folder model.weights, from which a network of transformers was read, has its frozen weights
    if network is not bare and sim.cfg.model.get("weights") and not changed:
        base_model = config["base_model_name_or_path"] = str(Path(sim.cfg.model.weights).resolve())
    else:
        base_model = "base_model.safetensors"
        base = {name: tensor.clone() for name, tensor in network.state_dict().items()}  # copies share no memory
        write_file("--peft", folder / "base_model.safetensors", lambda file: file.write(save(base)))
    write_file("--peft", folder / "adapter_model.safetensors", lambda file: file.write(save(tensors)))
    text = json.dumps(config, indent=2) + "\n"
    write_file("--peft", folder / "adapter_config.json", lambda file: file.write(text.encode()))
    return base_model


def saved_round(sim: Simulation) -> str:
    """Return text about the saved models, such as "round 9 of 10, the last that was saved (the best one, too)"."""
    saved, best = f"round {sim.done} of {sim.cfg.rounds}, the last that was saved", (sim.best or {}).get("round")
    if best is None:
        return saved
    if best == sim.done:
        return f"{saved} (the best one, too)"
    return f"{saved} (the models of round {best}, the best by test scores, are not saved)"


def _row_state(sim: Simulation, client: int | str) -> dict[str, Tensor]:
    """Return the trained parameters and running statistics that a client deploys, by their names in the module.

    Args:
        sim: The open run.
        client: Index or name of the client.
    """
    _, rows = deployed(sim, np.array([index_of(sim, client)]))
    # rows: the client's trained numbers [P] or [1, P]; of a dict of several models, "theta" is the main one
    row = rows["theta"] if isinstance(rows, dict) else rows
    assert isinstance(row, Tensor)
    return sim.engine.model.state_dict(row if row.dim() == 1 else row[0])


def _run_module_with(sim: Simulation, state: dict[str, Tensor], client: int | str) -> nn.Module:
    """Load values into the module of the open run, and return this module, which nothing else may use afterwards.

    If clients have different ranks of LoRA, its adapted layers are cut to the rank of the client.

    Args:
        sim: The open run.
        state: Tensors by name.  Others of the module, such as frozen weights, keep their values.
        client: Index or name of the client.
    """
    sim.engine.model.module.load_state_dict(state, strict=False)
    if sim.engine.client_ranks is not None:
        cut_to_rank(sim.engine.model.module, int(sim.engine.client_ranks.of(np.array([index_of(sim, client)]))))
    return sim.engine.model.module


def _bare_module(sim: Simulation) -> nn.Module:
    """Return a new module of a run's model, without its adapter and with the weights that it had before training."""
    return build_module(sim.cfg, sim.engine.federation)


def _adapter_key(sim: Simulation) -> str:
    """Return the override that chose the adapter of a run, such as "adapter=lora"."""
    return f"adapter={sim.cfg.choices.adapter}"


def predictions(
    run_dir: str | Path, split: str = "test", overrides: Sequence[str] = (), config_dir: str | None = None
) -> dict[str, np.ndarray]:
    """Return the logits of every client's model for its own samples of a split.

    Args:
        run_dir: The run folder.
        split: "train", "val" or "test".
        overrides: Classes of your own that the run needs, such as "model._target_=my_package.MyNet".
        config_dir: A folder with your own options, whose classes need no overrides.

    Returns:
        A dict of arrays over the samples of all clients: client [n], index [n] (into the data set), target [n, ...],
        logits [n, C, ...]; and names [N] if clients have names.
    """
    return predictions_of(open_run(run_dir, overrides, config_dir), split)


def predictions_of(sim: Simulation, split: str = "test") -> dict[str, np.ndarray]:
    """Return the logits of every client's model for its own samples of a split.

    Args:
        sim: The open run.
        split: "train", "val" or "test".

    Returns:
        The dict of arrays that `predictions` describes.
    """
    ids = np.arange(sim.engine.federation.num_clients)
    cohort, rows = deployed(sim, ids)
    samples = sim.engine.federation.splits[split]
    # forward: for each client, the logits of its samples of the split
    logits = torch.cat(cohort.forward(rows, sim.algorithm.predict, split)).cpu().numpy()
    targets = sim.engine.federation.targets.cpu().numpy()[samples.indices]
    # the names of new clients, which are the last ones, are left out
    names = {} if sim.split.names is None else {"names": np.array(sim.split.names[: len(ids)])}
    # owners: the client of each sample
    return {"client": samples.owners(), "index": samples.indices, "target": targets, "logits": logits, **names}
