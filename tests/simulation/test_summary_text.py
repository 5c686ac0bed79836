"""The ending of a run says what ran, what came out and what to do next."""

import subprocess
import sys
from pathlib import Path

import pytest

from fedbench.simulation.summary_text import duration, ending, ending_line


def summary(**changes) -> dict:
    values = {
        "personal/accuracy": 0.9,
        "personal/accuracy_std": 0.05,
        "personal/accuracy_worst": 0.8,
        "personal/auc": float("nan"),
        "global/accuracy": 0.7,
    }
    base = {
        "name": "pgfed+ft",
        "algorithm": "pgfed",
        "dataset": "digits",
        "partition": "dirichlet",
        "model": "mlp",
        "seed": 3,
        "rounds": 30,
        "rounds_done": 30,
        "num_clients": 20,
        "cohort": 5,
        "last": values,
        "best": {"metric": "personal/accuracy", "round": 21, "values": values | {"personal/accuracy": 0.95}},
        "cost": {"images_per_s": 12345.6, "total_s": 75.2, "bytes_down": 2.5e6, "bytes_up": 1.25e6},
    }
    return base | changes


def test_importing_progress_does_not_import_rich():
    code = "import sys, fedbench.simulation.summary_text; assert not {'rich', 'torch', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_ending_says_what_compression_made_of_the_bytes(capsys):
    cost = summary()["cost"]
    ending(summary(cost=cost | {"dense_down": 2.5e6, "dense_up": 10e6}), Path("runs/pgfed/digits/2026-01-01"))
    assert "2.5 MB down, 1.2 MB up (12.5% of uncompressed)" in capsys.readouterr().out


def test_ending(capsys):
    ending(summary(), Path("runs/pgfed/digits/2026-01-01"))
    text = capsys.readouterr().out
    for part in (
        "pgfed+ft on digits, dirichlet partition: 20 clients, 5 per round, 30 rounds, model mlp, seed 3",
        "12,346 images/s",
        "1:15 in total",
        "2.5 MB down, 1.2 MB up",
        "mean per client and round: 16.3 KiB down, 8.1 KiB up",
        "runs/pgfed/digits/2026-01-01",
        "python -m fedbench report runs ",
        "algorithm=local,fedavg,pgfed",
    ):
        assert part in text
    rows = {line[:30].strip(): line[30:].split() for line in text.splitlines()}
    assert rows["mean personalized accuracy"] == ["0.9000", "0.9500"]
    assert rows["worst tenth of the clients"] == ["0.8000", "0.8000"]
    assert rows["global accuracy"] == ["0.7000", "0.7000"]
    assert rows["round"] == ["30", "21"]


def test_the_ending_says_over_how_many_clients_a_mean_is(capsys):
    values = summary()["last"] | {"personal/accuracy_clients": 3}
    few = summary(last=values, num_clients=6, evaluated_clients=5)
    ending(few, Path("run"))
    rows = {line[:30].strip(): line[30:].split() for line in capsys.readouterr().out.splitlines()}
    assert rows["clients in these means"] == ["3", "of", "6", "5", "of", "6"]
    assert ending_line(few, Path("sweeps/cell")) == "cell: mean personalized accuracy 0.9000 last (3 of 6 clients)"
    best = summary(best_val={"round": 2, "values": {"personal/accuracy": 0.85}})
    assert ending_line(best, Path("c")) == "c: mean personalized accuracy 0.9000 last, 0.8500 best by validation"


def test_paths_are_as_short_as_can_be_typed(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ending(summary(), tmp_path / "runs" / "pgfed" / "digits" / "now")
    assert "files: runs/pgfed/digits/now " in capsys.readouterr().out


def test_ending_without_a_global_model(capsys):
    values = {"personal/accuracy": 0.9}
    ending(summary(last=values, best=None), Path("elsewhere/cell"))
    text = capsys.readouterr().out
    assert "none: this method has no global model" in text
    assert "report elsewhere " in text


def test_a_class_of_ones_own_is_no_option_to_type(capsys):
    ending(summary(algorithm="Mine", classes={"algorithm": "my.Mine"}), Path("runs/Mine/digits/now"))
    text = capsys.readouterr().out
    assert "algorithm=local,fedavg seed=0,1,2" in text and "report runs " in text
    ending(summary(dataset="Mine", classes={"dataset": "my.Mine"}), Path("runs/pgfed/Mine/now"))
    assert "-m algorithm" not in capsys.readouterr().out


@pytest.mark.parametrize("same", [True, False])
def test_ending_where_personal_equals_global(capsys, same):
    ending(summary(personal_is_global=same), Path("runs"))
    assert ("personal equals global" in capsys.readouterr().out) == same


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0 s"), (59.4, "59 s"), (59.6, "1:00"), (3725, "1:02:05")])
def test_duration(seconds, text):
    assert duration(seconds) == text
