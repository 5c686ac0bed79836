"""Removed options, with the value that has no effect, and what to use instead.

Runs of earlier releases stored these options.  When such a run is read, an option at the listed value is deleted, and
any other value is refused.  The hash of a configuration includes the listed values, so that hashes do not change.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fedbench.core.moved import current
from fedbench.core.options import ConfigError

# class: {option: (value without effect, what to use instead)}
REMOVED: dict[str, dict[str, tuple[Any, str]]] = {
    "fedbench.adapters.compacter.Compacter": {
        "std": (0.01, "A starts from normal random numbers of standard deviation 0.01"),
    },
    "fedbench.adapters.prompt.Prompt": {
        "hidden": (192, "the network of adapter.reparam=true has a hidden layer of 192 numbers, as in FedDAT's code"),
    },
    "fedbench.algorithms.apple.APPLE": {
        "prox_half": (False, "halve algorithm.mu"),
        "lamb": (1.0, "the preference for large |d_ij| grows with the round"),
        "init": ("independent", "the cores start from independent draws"),
        "scale_lr": ("none", "c_i moves by optimizer.lr times d_ii"),
    },
    "fedbench.algorithms.fedamp.FedAMP": {
        "start": ("own", "FedAMP starts from the client's model, algorithm=heurfedamp from the server's mixture"),
        "peers": ("everyone", "the last uploads of all clients are mixed"),
    },
    "fedbench.algorithms.feddat.FedDAT": {
        "refresh": (False, "a client deploys the adapter that it received and trained with"),
        "deploy": ("mixture", "a client deploys the mean of both adapters"),
    },
    "fedbench.algorithms.fedotp.FedOTP": {
        "max_iter": (100, "the plan takes at most 100 iterations"),
        "thresh": (1e-3, "the plan ends when log v changes by less than 0.001"),
        "mode": ("cot", "algorithm.gamma=1 transports everything"),
        "first_round": ("everyone", "all clients train in round 1"),
    },
    "fedbench.algorithms.fedpia.FedPIA": {
        "activation": ("per_sample", "a unit is described by its value on each sample"),
        "site": ("pre", "values before the nonlinearity are compared"),
        "anchor": ("samples", "set client_weights=uniform for the whole run"),
        "weights": ("normalized", "the weights of the matched adapters sum to 1"),
        "metric": ("euclidean", "distances are Euclidean"),
        "solver": ("assignment", "SciPy's assignment gives the same plan"),
    },
    "fedbench.algorithms.fedsld.FedSLD": {
        "counts": ("all", "class shares are those of all clients"),
    },
    "fedbench.algorithms.heurfedamp.HeurFedAMP": {
        "start": ("cloud", "HeurFedAMP starts from the server's mixture, algorithm=fedamp from the client's model"),
        "peers": ("everyone", "the last uploads of all clients are mixed"),
    },
    "fedbench.algorithms.l2gd.L2GD": {
        "alpha": (None, "set optimizer.lr to alpha / (N (1 - pr))"),
    },
    "fedbench.algorithms.per_fedavg.PerFedAvg": {
        "weights": ("samples", "set client_weights=uniform for the whole run"),
        "adapt": ("alpha", "leave algorithm.alpha at null: both steps are then optimizer.lr"),
    },
    "fedbench.algorithms.pfedmoap.PFedMoAP": {
        "pool": ("stride", "features are pooled by stride, as in the released code"),
        "normalize": (False, "T_MoE enters by an inner product, as in the released code"),
    },
    "fedbench.algorithms.pfednet.PFedNet": {
        "group": ("model", "the norm is over all of z"),
        "order": ("x_first", "the x-phase is first, as in the paper"),
        "x_epochs": (None, "both phases take local.epochs"),
        "z_epochs": (None, "both phases take local.epochs"),
        "tau": (None, "set algorithm.lam"),
        "rho": (None, "ADMM's penalty follows from the network"),
        "max_iterations": (200, "ADMM takes at most 200 iterations"),
        "tolerance": (1e-5, "ADMM ends at residuals below 1e-5 of ||V - mean V||"),
        "warm_start": (False, "ADMM starts from 0"),
        "graph": ("knn", "set algorithm.k, or list the pairs in algorithm.edges"),
        "metric": (None, "sketches are compared by l2 for label_hist, else by l1"),
        "symmetrize": ("union", "two clients are neighbours if one of them lists the other"),
    },
    "fedbench.algorithms.pfedprompt.PFedPrompt": {
        "mode": ("logits", "the client's images add to the logits"),
        "in_training": (False, "the prompt is trained without the client's images"),
    },
    "fedbench.algorithms.pgfed_ce.PGFedCE": {
        "mode": ("server_alpha", "the server updates the coefficients"),
    },
    "fedbench.compression.cer.CER": {
        "eta": (1e-3, "scale compression.gamma instead"),
        "tolerance": (1e-6, "compression.solver=exact finds the minimizer"),
        "max_iterations": (1000, "compression.solver=exact finds the minimizer"),
    },
    "fedbench.compression.deflate.Deflate": {
        "level": (6, "zlib compresses at its default level, 6"),
    },
    "fedbench.data.scans.brats17.BraTS17": {
        "channels": (None, "a scan has all four modalities"),
        "clip": (3.0, "three standard deviations become 1"),
    },
    "fedbench.data.tables.clinical.Clinical": {
        "informative": (12, "12 features tell the classes apart"),
        "separation": (0.8, "the clusters of samples are centred at the corners of a hypercube of side 1.6"),
        "missing": (0.02, "one cell in 50 has no value"),
    },
    "fedbench.data.images.digits_clip.DigitsCLIP": {
        "classes": (30, "the classes are the 30 pairs of a colour and a digit"),
    },
    "fedbench.data.scans.luna16.Luna16": {
        "candidates": ("candidates.csv", "put candidates.csv or candidates_V2.csv into dataset.path"),
        "channels": (3, "a patch has three equal channels"),
    },
    "fedbench.data.text.shakespeare.Shakespeare": {
        "share": (1.0, "set dataset.subset"),
        "seed": (0, "no speakers are drawn"),
    },
    "fedbench.data.synthetic.Synthetic": {
        "noise": (0.3, "the noise has standard deviation 0.3"),
        "test_share": (0.0, "the set has no published test part: use dataset.split=merged"),
    },
    "fedbench.data.text.synthetic_dialogue.SyntheticDialogue": {
        "words": (200, "the language has 200 stems"),
        "dialect": (0.3, "each role gives 30% of the stems an ending of its own"),
        "test": (0.2, "the last fifth of a role's samples is its test part"),
    },
    "fedbench.data.scans.tumours.Tumours": {
        "labels": ("whole", "1 is any part of the tumour"),
        "channels": (None, "a scan has all four modalities; dataset.lack names one that clients lack"),
        "single_modality": (False, "use dataset=brats17 dataset.mode=official"),
        "noise": (0.1, "the noise has standard deviation 0.1"),
        "contrast": (0.45, "tumours are blended in by a factor of 0.45 to 1"),
        "clip": (3.0, "three standard deviations become 1"),
    },
    "fedbench.models.albef.ALBEF": {
        "mlp_ratio": (4, "a block's mlp has 4 hidden numbers for each of model.width"),
    },
    "fedbench.models.clip_prompt.CLIPPrompt": {
        "position": ("end", "the context stands in front of the class name"),
    },
    "fedbench.models.logistic.Logistic": {
        "zero_init": (False, "the layer starts as PyTorch initializes it"),
    },
    "fedbench.models.recurrent.LSTM": {
        "forget_bias": (1.0, "1 is added to the forget gates at the beginning, as in LEAF"),
    },
    "fedbench.models.unet.UNet": {
        "official_head": (False, "logits go into the loss as they are"),
    },
    "fedbench.models.vilt.ViLT": {
        "mlp_ratio": (4, "a block's mlp has 4 hidden numbers for each of model.width"),
        "eps": (1e-12, "the layer norms add 1e-12 to the variance, as in transformers"),
    },
    "fedbench.partition.delta.Delta": {
        "fractions": (None, "list the samples of each client in partition.counts"),
        "balance": (True, "a balanced pool is drawn first; partition=file takes any other"),
    },
    "fedbench.partition.delta.DeltaLuna16": {
        "counts": (None, "use partition=delta with partition.counts"),
        "balance": (True, "a balanced pool is drawn first; partition=file takes any other"),
    },
    "fedbench.partition.dirichlet.Dirichlet": {
        "max_tries": (2000, "it is drawn at most 2,000 times"),
    },
    "fedbench.partition.dirichlet_rarest.DirichletRarest": {
        "max_tries": (1000, "it is drawn at most 1,000 times"),
    },
    "fedbench.partition.domain.Domain": {
        "max_tries": (2000, "each silo is drawn at most 2,000 times"),
    },
}


def drop_removed(values: dict[str, Any]) -> None:
    """Delete removed options without effect from stored values, in place.

    Args:
        values: The values, nested or by dotted key.
    """
    for group, options in list(_groups(values)):  # nested values
        for name, (neutral, _) in options.items():
            if group.get(name, ...) == neutral:  # ... stands for an absent option, because None may be a value
                del group[name]
    for key in [key for key in values if key.endswith("._target_")]:  # values by dotted key
        prefix = key.removesuffix("_target_")
        for name, (neutral, _) in _options_of(values[key]).items():
            if values.get(prefix + name, ...) == neutral:
                del values[prefix + name]


def with_removed(values: Any) -> Any:
    """Return a copy of nested values in which each class again has its removed options, at the values without effect.

    Hashes of configurations are computed from the result, so that they stay those of earlier releases.
    """
    if not isinstance(values, Mapping):
        return values  # lists stored what the user wrote, without the defaults of conf
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
            raise ConfigError(f"{key}.{name} was removed, so leave it out. In its place: {options[name][1]}")
        refuse_removed(f"{key}.{name}", value)


def _groups(values: Any) -> Iterator[tuple[dict[str, Any], Mapping[str, tuple[Any, str]]]]:
    """Yield (mapping, removed options of its class) for each mapping in nested values whose class has such options.

    The removed options are a dict from name to (value without effect, what to use instead).
    """
    if isinstance(values, dict):
        if options := _options_of(values.get("_target_")):
            yield values, options
        values = list(values.values())
    for value in values if isinstance(values, list) else ():
        yield from _groups(value)


def _options_of(target: Any) -> Mapping[str, tuple[Any, str]]:
    """Return the removed options of a class by name, as listed in REMOVED; {} if it has none.

    Args:
        target: The dotted name of the class in this or an earlier release.  A value that is no text has no options.
    """
    name = current(target) if isinstance(target, str) else None
    return next((options for class_name, options in REMOVED.items() if current(class_name) == name), {})
