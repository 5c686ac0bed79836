"""Removed options, with the value that has no effect, and a sentence about what replaces them.

Runs of earlier releases stored these options.  When such a run is read, an option at the listed value is deleted, and
any other value is refused.  The hash of a configuration includes the listed values, so that hashes do not change.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fedbench.core.moved import current
from fedbench.core.options import ConfigError

# class: {option: (value without effect, sentence about what is always done, or what to set instead)}
REMOVED: dict[str, dict[str, tuple[Any, str]]] = {
    "fedbench.adapters.compacter.Compacter": {
        "std": (0.01, "The shared factors A always start with a standard deviation of 0.01."),
    },
    "fedbench.adapters.prompt.Prompt": {
        "hidden": (192, "With adapter.reparam=true, the hidden layer always has 192 units, as in FedDAT's code."),
    },
    "fedbench.algorithms.apple.APPLE": {
        "prox_half": (False, "For the former value true, set algorithm.mu to half of its value."),
        "lamb": (
            1.0,
            "With algorithm.bandwidth, the preference for core models with large |d_ij| always grows with the round.",
        ),
        "init": ("independent", "The core models always start from different random values."),
        "scale_lr": ("none", "The gradient of core model c_i always includes the factor d_ii."),
    },
    "fedbench.algorithms.fedamp.FedAMP": {
        "start": (
            "own",
            "FedAMP always starts from the client's model; algorithm=heurfedamp starts from the server's mixture.",
        ),
        "peers": ("everyone", "The server always mixes the last uploads of all clients."),
    },
    "fedbench.algorithms.feddat.FedDAT": {
        "refresh": (False, "A client always deploys the adapter that it last received and trained with."),
        "deploy": ("mixture", "A client always deploys the mean of both adapters."),
    },
    "fedbench.algorithms.fedotp.FedOTP": {
        "max_iter": (100, "Sinkhorn's algorithm always makes at most 100 iterations."),
        "thresh": (1e-3, "Sinkhorn's algorithm always ends when log v changes by less than 0.001."),
        "mode": ("cot", "For balanced optimal transport, set algorithm.gamma=1."),
        "first_round": ("everyone", "All clients always train in round 1."),
    },
    "fedbench.algorithms.fedpia.FedPIA": {
        "activation": ("per_sample", "A hidden unit is always described by its values on single samples."),
        "site": ("pre", "Hidden units are always compared by their values before the nonlinearity."),
        "anchor": ("samples", "For equal weights, set client_weights=uniform, which is for the whole run."),
        "weights": ("normalized", "The weights of the aligned adapters are always normalized to sum 1."),
        "metric": ("euclidean", "Hidden units are always compared by Euclidean distance."),
        "solver": (
            "assignment",
            "The transport plan is always computed by SciPy's assignment solver, which gives the same plan.",
        ),
    },
    "fedbench.algorithms.fedsld.FedSLD": {
        "counts": ("all", "The label distribution is always that of all clients."),
    },
    "fedbench.algorithms.heurfedamp.HeurFedAMP": {
        "start": (
            "cloud",
            "HeurFedAMP always starts from the server's mixture; algorithm=fedamp starts from the client's model.",
        ),
        "peers": ("everyone", "The server always mixes the last uploads of all clients."),
    },
    "fedbench.algorithms.l2gd.L2GD": {
        "alpha": (None, "Set optimizer.lr to alpha / (N (1 - pr)), with N clients and pr=algorithm.pr."),
    },
    "fedbench.algorithms.per_fedavg.PerFedAvg": {
        "weights": ("samples", "For equal weights, set client_weights=uniform, which is for the whole run."),
        "adapt": (
            "alpha",
            "To adapt with the learning rate, set algorithm.alpha=null: both step sizes are then optimizer.lr.",
        ),
    },
    "fedbench.algorithms.pfedmoap.PFedMoAP": {
        "pool": (
            "stride",
            "Features are always reduced to algorithm.d_feature values by taking every n-th one.",
        ),
        "normalize": (
            False,
            "T_MoE always enters the logits by an inner product, not by a cosine, as in the released code.",
        ),
    },
    "fedbench.algorithms.pfednet.PFedNet": {
        "group": ("model", "The fusion penalty always is the norm of the whole difference of two clients' z."),
        "order": ("x_first", "A round always trains x before z, as in the paper."),
        "x_epochs": (None, "Set local.epochs, which is for x and for z."),
        "z_epochs": (None, "Set local.epochs, which is for x and for z."),
        "tau": (None, "Set the weight of the fusion penalty by algorithm.lam."),
        "rho": (None, "ADMM's penalty parameter is always computed from the network of clients."),
        "max_iterations": (200, "ADMM always makes at most 200 iterations."),
        "tolerance": (1e-5, "ADMM always ends when its residuals are below 1e-5 of ||V - mean V||."),
        "warm_start": (False, "ADMM always starts from 0."),
        "graph": (
            "knn",
            "Set algorithm.k for the k nearest neighbours, or list the pairs of clients in algorithm.edges.",
        ),
        "metric": (
            None,
            "Label histograms are always compared by the l2 distance, and other sketches by the l1 distance.",
        ),
        "symmetrize": (
            "union",
            "Two clients are always neighbours if at least one of them is among the other's nearest.",
        ),
    },
    "fedbench.algorithms.pfedprompt.PFedPrompt": {
        "mode": ("logits", "The attention over the client's images is always added to the logits."),
        "in_training": (False, "The prompt is always trained without the attention over the client's images."),
    },
    "fedbench.algorithms.pgfed_ce.PGFedCE": {
        "mode": ("server_alpha", "The coefficients are always updated by the server."),
    },
    "fedbench.compression.cer.CER": {
        "eta": (1e-3, "Change compression.gamma, the weight of the total variation."),
        "tolerance": (1e-6, "Leave compression.solver=exact, which needs no iterations."),
        "max_iterations": (1000, "Leave compression.solver=exact, which needs no iterations."),
    },
    "fedbench.compression.deflate.Deflate": {
        "level": (6, "zlib always compresses at its default level, 6."),
    },
    "fedbench.data.scans.brats17.BraTS17": {
        "channels": (None, "A sample always has all four modalities as channels."),
        "clip": (3.0, "Intensities are always clipped at three standard deviations, which become 1."),
    },
    "fedbench.data.tables.clinical.Clinical": {
        "informative": (12, "The table always has 12 features that depend on the class."),
        "separation": (
            0.8,
            "The clusters of samples always have their centres at the corners of a hypercube of side 1.6.",
        ),
        "missing": (0.02, "One cell in 50 always has no value."),
    },
    "fedbench.data.images.digits_clip.DigitsCLIP": {
        "classes": (30, "The classes always are the 30 pairs of a colour and a digit."),
    },
    "fedbench.data.scans.luna16.Luna16": {
        "candidates": ("candidates.csv", "Put candidates.csv or candidates_V2.csv into the folder dataset.path."),
        "channels": (3, "A patch always has three equal channels."),
    },
    "fedbench.data.text.shakespeare.Shakespeare": {
        "share": (1.0, "For a part of the samples, set dataset.subset."),
        "seed": (0, "All speakers with enough text are always used, so that nothing is random."),
    },
    "fedbench.data.synthetic.Synthetic": {
        "noise": (0.3, "The noise always has a standard deviation of 0.3."),
        "test_share": (0.0, "Use dataset.split=merged, because the generated data have no published test part."),
    },
    "fedbench.data.text.synthetic_dialogue.SyntheticDialogue": {
        "words": (200, "The generated language always has 200 word stems."),
        "dialect": (0.3, "Each role always has an ending of its own for 30% of the word stems."),
        "test": (0.2, "The last fifth of each role's samples always is its test part."),
    },
    "fedbench.data.scans.tumours.Tumours": {
        "labels": ("whole", "The label 1 always is the whole tumour."),
        "channels": (
            None,
            "A sample always has all four modalities as channels; to remove one from some clients, set dataset.lack.",
        ),
        "single_modality": (False, "For clients with one modality each, use dataset=brats17 dataset.mode=official."),
        "noise": (0.1, "The noise always has a standard deviation of 0.1."),
        "contrast": (0.45, "The opacity of a tumour always is a random number from 0.45 to 1."),
        "clip": (3.0, "Intensities are always clipped at three standard deviations, which become 1."),
    },
    "fedbench.models.albef.ALBEF": {
        "mlp_ratio": (4, "The hidden layer of a block's MLP always is 4 times as wide as model.width."),
    },
    "fedbench.models.clip_prompt.CLIPPrompt": {
        "position": ("end", "The context always stands before the class name."),
    },
    "fedbench.models.logistic.Logistic": {
        "zero_init": (False, "The layer is always initialized by PyTorch's default."),
    },
    "fedbench.models.recurrent.LSTM": {
        "forget_bias": (1.0, "The forget gates always start with a bias of 1, as in LEAF."),
    },
    "fedbench.models.unet.UNet": {
        "official_head": (False, "The loss always gets logits, without the sigmoid of the released code."),
    },
    "fedbench.models.vilt.ViLT": {
        "mlp_ratio": (4, "The hidden layer of a block's MLP always is 4 times as wide as model.width."),
        "eps": (1e-12, "The layer norms always add 1e-12 to the variance, as in the library transformers."),
    },
    "fedbench.partition.delta.Delta": {
        "fractions": (None, "Set the numbers of samples of each client by partition.counts."),
        "balance": (
            True,
            "Equally many samples of both classes are always drawn first; for another ratio, use partition=file.",
        ),
    },
    "fedbench.partition.delta.DeltaLuna16": {
        "counts": (None, "Use partition=delta, which has partition.counts."),
        "balance": (
            True,
            "Equally many samples of both classes are always drawn first; for another ratio, use partition=file.",
        ),
    },
    "fedbench.partition.dirichlet.Dirichlet": {
        "max_tries": (2000, "The partition is always drawn at most 2,000 times."),
    },
    "fedbench.partition.dirichlet_rarest.DirichletRarest": {
        "max_tries": (1000, "The partition is always drawn at most 1,000 times."),
    },
    "fedbench.partition.domain.Domain": {
        "max_tries": (2000, "The partition of each client site is always drawn at most 2,000 times."),
    },
}


def drop_removed(values: dict[str, Any]) -> None:
    """Delete removed options without effect from stored values, in place.

    Args:
        values: The values, nested or by dotted key.
    """
    for mapping, options in list(_mappings_with_removed(values)):  # nested values
        for name, (neutral, _) in options.items():  # neutral: the value without effect
            if mapping.get(name, ...) == neutral:  # ... stands for an absent option, because None may be a value
                del mapping[name]
    for key in [key for key in values if key.endswith("._target_")]:  # values by dotted key
        prefix = key.removesuffix("_target_")
        for name, (neutral, _) in _options_of(values[key]).items():
            if values.get(prefix + name, ...) == neutral:
                del values[prefix + name]


def with_removed(values: Any) -> Any:
    """Return a copy of nested values, with the removed options of each class added again at the values without effect.

    Hashes of configurations are computed from the result, so that they stay those of earlier releases.
    """
    if not isinstance(values, Mapping):
        return values  # also lists: their options were stored as the user wrote them, without the defaults of conf
    removed = {name: neutral for name, (neutral, _) in _options_of(values.get("_target_")).items()}
    return {**removed, **{key: with_removed(value) for key, value in values.items()}}


def refuse_removed(key: str, values: Any) -> None:
    """Check that nested values have no removed option.

    Args:
        key: The dotted key of the values, for the message.
        values: The options by name, possibly nested.  Values of other types have no options.

    Raises:
        ConfigError: There is a removed option.
    """
    for name, value in values.items() if isinstance(values, Mapping) else ():
        if name in (options := _options_of(values.get("_target_"))):
            _, sentence = options[name]  # what replaces the option
            raise ConfigError(f"{key}.{name} is no longer an option: remove it. {sentence}")
        refuse_removed(f"{key}.{name}", value)


def _mappings_with_removed(values: Any) -> Iterator[tuple[dict[str, Any], Mapping[str, tuple[Any, str]]]]:
    """Yield (mapping, removed options of its class) for each mapping in nested values whose class has such options.

    The removed options are a dict from name to (value without effect, sentence for the user).
    """
    if isinstance(values, dict):
        if options := _options_of(values.get("_target_")):
            yield values, options
        values = list(values.values())
    for value in values if isinstance(values, list) else ():
        yield from _mappings_with_removed(value)


def _options_of(target: Any) -> Mapping[str, tuple[Any, str]]:
    """Return the removed options of a class by name, as listed in REMOVED; {} if it has none.

    Args:
        target: The dotted name of the class in this or an earlier release.  A value that is no text has no options.
    """
    name = current(target) if isinstance(target, str) else None
    return next((options for class_name, options in REMOVED.items() if current(class_name) == name), {})
