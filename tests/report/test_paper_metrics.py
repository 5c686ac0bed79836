"""The papers' numbers that are not plain metrics: BMCTA and BTA, and which images count for images/s."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tiny import HEAD, SIZES, engine, mlp, play, ragged

from fedbench.algorithms.apfl import APFL
from fedbench.algorithms.base import Algorithm
from fedbench.algorithms.ditto import Ditto
from fedbench.algorithms.fedavg import FedAvg
from fedbench.algorithms.fedrep import FedRep
from fedbench.algorithms.fedrod import FedRoD
from fedbench.algorithms.lg_fedavg import LGFedAvg
from fedbench.algorithms.per_fedavg import PerFedAvg
from fedbench.algorithms.pfedme import PFedMe
from fedbench.algorithms.pgfed import PGFed
from fedbench.algorithms.pgfed_exact import PGFedExact
from fedbench.engine.cohort import Cohort
from fedbench.report.paper_metrics import METRICS, PrintedCell
from fedbench.report.runs import Run
from fedbench.tasks.scores import summarize_clients

EPOCHS, TOTAL = 2, sum(SIZES)


def counted(algorithm: Algorithm) -> list[int]:
    """Images that a round counts, for three rounds of everybody: batches of 4, 2 local epochs."""
    e = engine(*ragged(), mlp(), columns=HEAD, epochs=EPOCHS, batch_size=4)
    play(e, algorithm, 0)
    found = []
    for r in range(3):
        cohort = Cohort(e, np.arange(len(SIZES)), r)
        algorithm.round(cohort)
        found.append(cohort.cost.samples)
    return found


@pytest.mark.parametrize("make", [FedAvg, APFL, LGFedAvg, FedRoD, PFedMe, PGFed, PGFedExact, Ditto])
def test_every_image_counts_once_per_local_epoch(make) -> None:
    """Not again for APFL's second gradient, PGFed's pass over the whole split, pFedMe's inner steps, Ditto's
    second model: such work is what makes a method slower."""
    assert counted(make()) == [EPOCHS * TOTAL] * 3


def test_the_epochs_of_fedrep_are_its_own() -> None:
    """The head's epochs and the body's are different epochs."""
    assert counted(FedRep(head_epochs=3)) == [(3 + EPOCHS) * TOTAL] * 3


@pytest.mark.parametrize("mode, parts", [("fo", 2), ("hf", 3)])
def test_per_fedavg_counts_the_part_of_a_batch_that_defines_the_step(mode: str, parts: int) -> None:
    """A client with n samples makes floor(n / (4 parts)) steps an epoch (one, of all n, where n is smaller)."""
    used = [n // min(n, 4 * parts) * min(n, 4 * parts) for n in SIZES]
    assert counted(PerFedAvg(mode)) == [round(EPOCHS * sum(used) / parts)] * 3


def test_bmcta_and_bta_are_maxima_of_their_own(tmp_path: Path) -> None:
    """Two clients with 1 and 9 test images: the mean is best at round 1, the pooled accuracy at round 3."""
    per_client = np.array([[1.0, 0.5], [0.8, 0.6], [0.2, 0.8]])
    names = ["personal/accuracy", "personal/accuracy_weighted"]
    lines = [",".join(["round", *names])]
    for t, accuracy in enumerate(per_client, start=1):
        found = summarize_clients({names[0]: accuracy}, np.array([1, 9]))
        lines.append(",".join([str(t), *(repr(found[name]) for name in names)]))
    (tmp_path / "metrics.csv").write_text("\n".join([*lines, ""]))
    run = Run(tmp_path)
    question = PrintedCell("fedsld_practical", {"metric": "", "dataset": "MNIST", "setting": "practical"})
    assert METRICS["BMCTA_pct"](run, question).value == pytest.approx(75.0)
    assert METRICS["BTA_pct"](run, question).value == pytest.approx(100 * (0.1 * 0.2 + 0.9 * 0.8))
