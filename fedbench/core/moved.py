"""Names that modules had before the house got its wings, so that what users have stored goes on working.

A stored config says ``_target_: fedbench.optim.SGD``, and a method of one's own imports ``fedbench.options``: both are
found under their new names (`current`), and importing an old name gives the very module that stands at the new one.
Hashes of configurations are taken over the old names (`original`), so that they stay what they were.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType

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
    "fused": "nn.compiled",
    "rows": "engine.rows",
    "federation": "engine.federation",
    "local": "engine.step",
    "engine.local": "engine.step",
    "optim": "engine.optim",
    "gradients": "engine.gradients",
    "executor": "engine.executor",
    "balance": "engine.threads",
    "ranks": "engine.ranks",
    "together": "engine.joint",
    "per_client": "engine.per_client",
    "privacy": "engine.privacy",
    "cohort": "engine.cohort",
    "finetune": "algorithms._finetune",
    "transport": "algorithms._transport",
    "simulator": "simulation.simulator",
    "build": "simulation.build",
    "evaluate": "simulation.evaluate",
    "checkpoint": "simulation.checkpoint",
    "tracking": "simulation.tracking",
    "progress": "simulation.progress",
    "matrices": "simulation.recorder",
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


class _OldNames(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports ``fedbench.<old name>`` as the module that stands at the new one."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """A spec for a name that moved; None for any other."""
        package, _, name = fullname.partition(".")
        moved = package == PACKAGE and name in MOVED
        return importlib.machinery.ModuleSpec(fullname, self) if moved else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """The module at the new name."""
        module = importlib.import_module(current(spec.name))
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Nothing: it has been executed under its own name, which it keeps."""
        module.__spec__ = self._spec


def install() -> None:
    """Find old names from now on, behind everything else that finds modules."""
    if not any(isinstance(finder, _OldNames) for finder in sys.meta_path):
        sys.meta_path.append(_OldNames())
