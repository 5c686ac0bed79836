"""The sweeper that Hydra finds by this package's place, and loads in a way that dataclasses need real annotations."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from fedbench.app.private_hydra import basic_sweeper


@dataclass
class PlannedConf(basic_sweeper().BasicSweeperConf):
    """checked: every cell has been composed by the command that starts the sweep."""

    _target_: str = "hydra_plugins.fedbench_sweeper.sweeper.Planned"
    checked: bool = False


ConfigStore.instance().store(group="hydra/sweeper", name="planned", node=PlannedConf, provider="fedbench")


class Planned(basic_sweeper().BasicSweeper):
    """Reads every configuration file once: what is edited while the cells run is of no effect on those to come."""

    def __init__(self, checked: bool = False, **basic: Any) -> None:
        super().__init__(**basic)
        self.checked = checked

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Hydra's, before the sweep."""
        from fedbench.app.compose import CachedRepository  # other applications of Hydra load this module, too

        loader: Any = hydra_context.config_loader
        loader.repository = CachedRepository(loader.config_search_path)
        super().setup(hydra_context=hydra_context, task_function=task_function, config=config)

    def validate_batch_is_legal(self, batch: Sequence[Sequence[str]]) -> None:
        """Compose every cell, for nothing but the complaint, where nobody has yet."""
        from fedbench.app.sweep import with_progress

        for cell in with_progress(batch, "cells") if not self.checked else ():
            super().validate_batch_is_legal([cell])
