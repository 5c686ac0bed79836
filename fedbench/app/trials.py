"""Start runs that a search proposes, by Hydra's launcher."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hydra.core.plugins import Plugins
from hydra.types import HydraContext
from omegaconf import DictConfig, open_dict

from fedbench.app.compose import Composer, explain
from fedbench.app.loader import restore_hydra
from fedbench.app.private_hydra import Callbacks
from fedbench.app.single import checked, folder_key, make_folder
from fedbench.app.sweep import RunTask, name_run_folders
from fedbench.config.override_text import quoted
from fedbench.core.options import ConfigError
from fedbench.simulation.simulate import interruptible


class RunLauncher:
    """Start runs of a sweep, whose configuration is ``master``, by its launcher; several at once if it is parallel.

    Args:
        composer: Composes the configurations.
        overrides: The overrides that all runs have in common, among them those of the launcher and ``sweep_dir``.
        searched: The keys in which runs differ, which come first in the names of their folders.
        command: The command as typed, for summary.json.
        subfolder: A folder below ``sweep_dir`` for the runs; "" for ``sweep_dir`` itself.

    Attributes:
        folder: The folder of the sweep.

    Raises:
        ConfigError: An override is invalid, or the folder cannot be made.
    """

    def __init__(
        self, composer: Composer, overrides: list[str], searched: list[str], command: str, subfolder: str = ""
    ) -> None:
        self.composer, self.started = composer, 0
        with restore_hydra():
            self.master = composer.compose(overrides, multirun=True)
            name_run_folders(self.master, searched)
            self.folder = make_folder(Path(folder_key(self.master, "hydra.sweep.dir")) / subfolder, fresh=False)
            with open_dict(self.master.hydra):
                self.master.hydra.overrides.hydra.append(f"hydra.sweep.dir={quoted(str(self.folder))}")
                self.master.hydra.sweep.dir = str(self.folder)
        group = self.folder.parent.name if subfolder else self.folder.name  # one group of W&B for the whole search
        self.task = RunTask(command, total=None, scored=False, quiet=True, group=group)

    def compose(self, run: Sequence[str]) -> DictConfig:
        """Return the composed configuration of a run, with its key hydra (Hydra's own options).

        Args:
            run: All overrides of the run.

        Raises:
            ConfigError: An override is invalid.
        """
        with restore_hydra():
            return self.composer.compose_run(self.master, list(run))

    def check(self, run: Sequence[str]) -> None:
        """Raise ConfigError if the configuration of a run, given by all of its overrides, is invalid."""
        full = self.compose(run)
        with open_dict(full.hydra.job):
            full.hydra.job.num, full.hydra.job.id = 0, "check"
        checked(full, full.hydra)

    def run_folder(self, run: Sequence[str]) -> Path:
        """Return the folder that a run, given by all of its overrides, has or would have.  It need not exist yet."""
        return self.folder / folder_key(self.compose(run), "hydra.sweep.subdir")

    def __call__(self, runs: Sequence[Sequence[str]]) -> list[Path]:
        """Start, resume or skip runs, and wait until all have ended.

        Args:
            runs: All overrides of each run.

        Returns:
            The folder of each run.  Its status.json says whether the run failed.

        Raises:
            KeyboardInterrupt: The command was interrupted.
            ConfigError: The launcher failed.
        """
        different = [list(run) for run in dict.fromkeys(map(tuple, runs))]
        folders = {tuple(run): self.run_folder(run) for run in different}
        with restore_hydra(), interruptible():
            context = HydraContext(config_loader=self.composer.loader, callbacks=Callbacks(self.master))
            launcher = Plugins.instance().instantiate_launcher(
                hydra_context=context, task_function=self.task, config=self.master
            )
            try:
                launcher.launch(different, initial_job_idx=self.started)
            except Exception as error:  # of the launcher: failures of runs are in their status files
                raise ConfigError(
                    f"the launcher of the sweep stopped ({explain(error)}): repeat the command to go on, or add "
                    "hydra/launcher=basic"
                ) from error
        self.started += len(different)
        return [folders[tuple(run)] for run in runs]
