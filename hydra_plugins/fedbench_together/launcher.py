"""The launcher that Hydra finds by this package's place, and loads in a way that dataclasses need real annotations."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn, configure_log, env_override, run_job, setup_globals
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, open_dict


@dataclass
class TogetherConf:
    """at_once: runs that meet; more wait until one has ended."""

    _target_: str = "hydra_plugins.fedbench_together.launcher.Together"
    at_once: int = 8


ConfigStore.instance().store(group="hydra/launcher", name="together", node=TogetherConf, provider="fedbench")


class Together(Launcher):
    """Runs the cells of a sweep jointly (fedbench/engine/joint.py)."""

    def __init__(self, at_once: int = 8) -> None:
        self.at_once = at_once

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Hydra's, before launch."""
        self.context, self.task, self.config = hydra_context, task_function, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run every list of overrides; JobReturn for each, in order."""
        from fedbench.engine.joint import JointRuns

        setup_globals()
        hydra = self.config.hydra
        configure_log(hydra.hydra_logging, hydra.verbose)
        Path(str(hydra.sweep.dir)).mkdir(parents=True, exist_ok=True)
        jobs = [self._job(initial_job_idx + i, list(words)) for i, words in enumerate(job_overrides)]
        with env_override(hydra.job.env_set):  # of all: none restores what another one still needs
            return JointRuns(self.at_once).run(jobs)

    def _job(self, number: int, overrides: list[str]) -> Callable[[], JobReturn]:
        def job() -> JobReturn:
            full = self.context.config_loader.load_sweep_config(self.config, overrides)
            with open_dict(full):
                full.hydra.job.id, full.hydra.job.num = f"{full.hydra.job.name}_{number}", number
            HydraConfig.instance().set_config(full)
            return run_job(
                hydra_context=self.context,
                config=full,
                task_function=self.task,
                job_dir_key="hydra.sweep.dir",
                job_subdir_key="hydra.sweep.subdir",
            )

        return job
