"""Log a run to MLflow, in a local folder or on a server.

View a folder with ``MLFLOW_ALLOW_FILE_STORE=true mlflow ui --backend-store-uri runs/mlruns``.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from fedbench.core.nested import flatten
from fedbench.core.options import ConfigError
from fedbench.core.settings import show, to_dict
from fedbench.simulation.callbacks.base import Callback, Status
from fedbench.simulation.callbacks.wandb_names import run_names

if TYPE_CHECKING:
    from fedbench.simulation.run_state import Simulation

LONGEST_PARAM = 500  # characters per parameter, the lowest limit among MLflow's stores
MOST_IN_A_BATCH = 100  # parameters per request


class MLflow(Callback):
    """Log the configuration, scores and costs of a run to MLflow.

    Args:
        uri: A folder, or the address of a server.  Default: the folder mlruns in output_dir.
        experiment: The name of the experiment.  Default: the name of the group in W&B.
    """

    packages: ClassVar = {"mlflow": "mlflow-skinny"}

    def __init__(self, uri: str | None = None, experiment: str | None = None):
        self.uri, self.experiment = uri, experiment
        self._id = ""

    def on_start(self, run: Simulation, saved: str | None) -> None:
        """Continue the run in MLflow with the id ``saved``; create one if it is None, unknown or deleted."""
        from mlflow import MlflowClient
        from mlflow.exceptions import MlflowException

        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")  # MLflow's default of 7 takes minutes
        uri = self.uri or str(Path(run.cfg.output_dir).expanduser().absolute() / "mlruns")
        if "://" not in uri:
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # MLflow 3 refuses folders without it
            uri = Path(uri).expanduser().absolute().as_uri()
        try:
            self._client = MlflowClient(tracking_uri=uri)
            self._id = saved if saved and self._exists(saved) else self._create(run)
            self._client.update_run(self._id, status="RUNNING")
        except MlflowException as error:
            # the first line, without the text of another exception that MLflow appends
            reason = str(error).splitlines()[0].partition(" with exception")[0]
            raise ConfigError(
                f"callbacks.mlflow.uri={uri} cannot be used ({reason}): name a folder that you may write into, or the "
                "address of a running MLflow server"
            ) from error

    def _exists(self, id: str) -> bool:
        """Return whether MLflow has a run with this id that is not deleted."""
        from mlflow.exceptions import MlflowException

        try:
            return self._client.get_run(id).info.lifecycle_stage == "active"
        except MlflowException:
            return False

    def _create(self, run: Simulation) -> str:
        """Create a run in MLflow, with the configuration as its parameters, and return its id."""
        from mlflow.entities import Param

        names = run_names(run.cfg, run.run_dir)
        name = self.experiment or names["group"]
        experiment = self._client.get_experiment_by_name(name)
        experiment_id = experiment.experiment_id if experiment else self._client.create_experiment(name)
        tags = {"run_dir": str(run.run_dir.absolute()), "job_type": names["job_type"]}
        id = self._client.create_run(experiment_id, run_name=names["name"], tags=tags).info.run_id
        params = [Param(key, show(value)[:LONGEST_PARAM]) for key, value in flatten(to_dict(run.cfg)).items()]
        for start in range(0, len(params), MOST_IN_A_BATCH):  # as many as MLflow accepts in a request
            self._client.log_batch(id, params=params[start : start + MOST_IN_A_BATCH])
        return id

    def on_evaluation(self, run: Simulation, metrics: Mapping[str, float], clients: Mapping[str, np.ndarray]) -> None:
        """Log ``metrics``, the scores of round ``run.done``, to MLflow; those of single clients are not logged."""
        self._log(run.done, metrics)

    def on_round_end(self, run: Simulation, costs: Mapping[str, float]) -> None:
        """Log the costs of round ``run.done`` to MLflow, under the names cost/NAME, except those that are None."""
        self._log(run.done, {f"cost/{name}": value for name, value in costs.items() if value is not None})

    def _log(self, round: int, values: Mapping[str, float]) -> None:
        """Log values, {name: value}, to MLflow as metrics of a round (from 1), with the current time."""
        from mlflow.entities import Metric

        now = int(1000 * time.time())  # in milliseconds
        self._client.log_batch(self._id, metrics=[Metric(k, float(v), now, round) for k, v in values.items()])

    def on_checkpoint(self, run: Simulation) -> str:
        """Return the id of the run in MLflow, with which a resumed run continues it."""
        return self._id

    def on_end(self, run: Simulation, status: Status, summary: Mapping[str, Any]) -> None:
        """Set the status of the run in MLflow: FINISHED, FAILED, or KILLED if it was paused or interrupted."""
        self._client.set_terminated(self._id, {"finished": "FINISHED", "failed": "FAILED"}.get(status, "KILLED"))
