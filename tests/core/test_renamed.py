"""Options that were renamed: old names are accepted, stored runs are read, and hashes stay."""

import logging

import pytest

from fedbench.algorithms.fedavg import FedAvg
from fedbench.app.compose import compose
from fedbench.commands import main
from fedbench.compression.topk import TopK
from fedbench.config.choices import _warn_of_old_name
from fedbench.core.options import ConfigError
from fedbench.core.renamed import rename_options
from fedbench.core.settings import config_hash, update_stored, updated_flat
from fedbench.simulation import build
from fedbench.tasks.classification import Classification

OLD = ["algorithm=fedavg", "weights=uniform", "compression=topk", "compression.memory=false"]
NEW = ["algorithm=fedavg", "client_weights=uniform", "compression=topk", "compression.error_feedback=false"]


def test_old_names_are_accepted_with_one_sentence(caplog: pytest.LogCaptureFixture) -> None:
    _warn_of_old_name.cache_clear()
    with caplog.at_level(logging.WARNING):
        old = [compose(OLD) for _ in range(2)]
    assert old[0] == old[1] == compose(NEW) and "weights" not in old[0] and "memory" not in old[0].compression
    assert old[0].client_weights == "uniform" and old[0].compression.error_feedback is False
    assert caplog.messages == [
        "weights is now called client_weights: use the new name, because the old one is accepted for one release only",
        "compression.memory is now called compression.error_feedback: use the new name, because the old one is "
        "accepted for one release only",
    ]


def test_both_names_are_refused() -> None:
    with pytest.raises(ConfigError, match="client_weights is given twice, as weights=uniform and client_weights=sa"):
        compose(["weights=uniform", "client_weights=samples"])


def test_an_option_of_the_users_class_keeps_its_name() -> None:
    values = {"compression": {"_target_": "mine.Compressor", "memory": True}, "client_weights": "samples"}
    assert rename_options(values) == [] and values["compression"]["memory"]


def test_hashes_are_those_of_the_old_names() -> None:
    new = compose(NEW)
    assert config_hash(new) == "9919e48359c2fd13c2f6d7fc2818e5c1bd6a50b9391465f285eb176254481f64"


def test_stored_runs_are_read_by_their_new_names() -> None:
    values = {"weights": "uniform", "compression": {"_target_": "fedbench.compression.topk.TopK", "memory": False}}
    flat = updated_flat({"weights": "uniform", "compression.memory": False})
    assert flat["client_weights"] == "uniform" and flat["compression.error_feedback"] is False
    update_stored(values)
    assert values["client_weights"] == "uniform" and values["compression"]["error_feedback"] is False


def test_cfg_shows_the_new_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*OLD, "--cfg", "job"]) == 0
    shown = capsys.readouterr().out
    assert "\nclient_weights: uniform\n" in shown and "\nweights:" not in shown and "memory" not in shown


def test_classes_with_former_names_are_refused() -> None:
    """Nothing would read these attributes."""
    with pytest.raises(
        ConfigError, match=r"test_renamed\.Mine defines leaks, which is now called bypasses_upload: rename it"
    ):
        type("Mine", (FedAvg,), {"__module__": __name__, "leaks": "a reason"})
    with pytest.raises(ConfigError, match="tally, which is now called sample_statistics"):
        type("Mine", (Classification,), {"tally": lambda self, logits, y: {}})
    with pytest.raises(ConfigError, match="pack, which is now called compress"):
        type("Mine", (TopK,), {"pack": lambda self, x, draws, message: x})


class SetsFormerName(FedAvg):
    def __init__(self) -> None:
        self.leaks = "clients compare their samples"


def test_former_names_that_a_constructor_sets_are_refused() -> None:
    """Privacy would not refuse this method: the reason would be read by nobody."""
    cfg = compose([f"algorithm._target_={__name__}.SetsFormerName"])
    with pytest.raises(ConfigError, match=r"SetsFormerName defines leaks, which is now called bypasses_upload"):
        build.algorithm(cfg)
