"""Module names of earlier releases, so that stored configurations remain valid.

A stored configuration may have ``_target_: fedbench.optim.SGD``; `current` returns its name in this release.  Hashes of
configurations use the first name (`original`), so that they do not change.
"""

from __future__ import annotations

PACKAGE = "fedbench"
MOVED = {
    "options": "core.options",
    "rng": "core.rng",
    "linalg": "core.linalg",
    "task": "tasks.base",
    "metrics": "tasks.scores",
    "data.cifar": "data.images.cifar",
    "data.clip_sets": "data.images.clip_sets",
    "data.digits": "data.images.digits",
    "data.digits_clip": "data.images.digits_clip",
    "data.domain_sets": "data.images.domain_sets",
    "data.image_folder": "data.images.image_folder",
    "data.image_table": "data.images.image_table",
    "data.medmnist": "data.images.medmnist",
    "data.mnist": "data.images.mnist",
    "data.breast_cancer": "data.tables.breast_cancer",
    "data.diabetes442": "data.tables.diabetes442",
    "data.clinical": "data.tables.clinical",
    "data.table_csv": "data.tables.table_csv",
    "data.brats17": "data.scans.brats17",
    "data.luna16": "data.scans.luna16",
    "data.tumours": "data.scans.tumours",
    "data.vqa_rad": "data.questions.vqa_rad",
    "data.med_vqa": "data.questions.med_vqa",
    "data.medvill": "data.questions.medvill",
    "data.omnimedvqa": "data.questions.omnimedvqa",
    "data.fedpia_mixed": "data.questions.fedpia_mixed",
    "data.synthetic_medvqa": "data.questions.synthetic_medvqa",
    "data.shakespeare": "data.text.shakespeare",
    "data.synthetic_dialogue": "data.text.synthetic_dialogue",
    "data.npy": "data.arrays.npy",
    "data.npz": "data.arrays.npz",
    "data.pfllib": "data.arrays.pfllib",
    "partition.extra": "partition._extra",
    "partition.subjects": "partition._subjects",
    "flat": "nn.flat",
    "network": "nn.traced_graph",
    "nn.program": "nn.traced_graph",
    "chain": "nn.manual_backward",
    "nn.chain": "nn.manual_backward",
    "rows": "core.rows",
    "engine.rows": "core.rows",
    "federation": "engine.federation",
    "local": "engine.step",
    "engine.local": "engine.step",
    "optim": "engine.optim",
    "gradients": "engine.gradients",
    "executor": "engine.executor",
    "ranks": "engine.ranks",
    "per_client": "engine.per_client",
    "privacy": "channel.privacy",
    "engine.privacy": "channel.privacy",
    "cohort": "engine.cohort",
    "finetune": "algorithms._finetune",
    "transport": "algorithms._transport",
    "simulator": "simulation.simulator",
    "build": "simulation.build",
    "evaluate": "simulation.evaluate",
    "checkpoint": "simulation.checkpoint",
    "tracking": "simulation.callbacks.tables",
    "progress": "simulation.summary_text",
    "matrices": "simulation.callbacks.matrices",
    "new_clients": "simulation.new_clients",
}
_ORIGINAL = {new: old for old, new in reversed(MOVED.items())}  # the first of several old names


def current(path: str) -> str:
    """Return the dotted path of an object in this release, such as fedbench.engine.optim.SGD.

    Args:
        path: Its dotted path in this or an earlier release, such as fedbench.optim.SGD.
    """
    return _renamed(path, MOVED)  # from an earlier name of a module to its name in this release


def original(path: str) -> str:
    """Return the dotted path of an object in the first release.

    Args:
        path: Its dotted path in any release.
    """
    return _renamed(current(path), _ORIGINAL)  # from a module's name in this release to that in the first one


def _renamed(path: str, names: dict[str, str]) -> str:
    """Replace the longest module name at the beginning of a dotted path for which ``names`` has a new name.

    Args:
        path: The dotted path.  A path outside of fedbench is returned unchanged.
        names: The new name of each module, both without "fedbench.".
    """
    package, *parts = path.split(".")
    if package != PACKAGE:
        return path
    for length in range(len(parts), 0, -1):
        if (new := names.get(".".join(parts[:length]))) is not None:
            return ".".join([package, new, *parts[length:]])
    return path
