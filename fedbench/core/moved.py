"""Names that modules had in earlier releases, so that stored configurations stay valid.

A stored config says ``_target_: fedbench.optim.SGD``; `current` returns the name of today.  Hashes of configurations
are taken over the first names (`original`), so that they stay what they were.
"""

from __future__ import annotations

PACKAGE = "fedbench"
MOVED = {
    "options": "core.options",
    "rng": "core.rng",
    "linalg": "core.linalg",
    "task": "tasks.base",
    "metrics": "tasks.scores",
    "data.files": "data._files",
    "data.images": "data._images",
    "data.bundled": "data._bundled",
    "data.extra": "data._extra",
    "partition.extra": "partition._extra",
    "partition.subjects": "partition._subjects",
    "flat": "nn.flat",
    "network": "nn.program",
    "chain": "nn.chain",
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
_ORIGINAL = {new: old for old, new in reversed(MOVED.items())}  # of two old names the first


def current(path: str) -> str:
    """The dotted path under which what an old one names is found now: ``fedbench.optim.SGD``, say."""
    return _renamed(path, MOVED)


def original(path: str) -> str:
    """The dotted path that something in fedbench had before modules moved."""
    return _renamed(current(path), _ORIGINAL)


def _renamed(path: str, names: dict[str, str]) -> str:
    head, *parts = path.split(".")
    if head != PACKAGE:
        return path
    for cut in range(len(parts), 0, -1):
        if (new := names.get(".".join(parts[:cut]))) is not None:
            return ".".join([head, new, *parts[cut:]])
    return path
