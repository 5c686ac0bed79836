"""Runs as objects: what their files hold, as frames and as small tables."""

import csv
import json
import shutil
import sys
from pathlib import Path

import pytest

import fedbench
from fedbench.core.options import ConfigError


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    words = "algorithm=local rounds=2 local.epochs=1 model.hidden=[8] hardware.executor=vmap tracking=disabled"
    return fedbench.run(words, **{"hydra.run.dir": str(folder)}).path


@pytest.fixture
def run(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> fedbench.Run:
    """A copy of a run of two rounds, in the working directory."""
    shutil.copytree(finished, tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    return fedbench.Run("run")


@pytest.mark.parametrize(("name", "rows"), [("metrics", 2), ("clients", 40), ("costs", 2)])
def test_frames_are_the_files(run: fedbench.Run, name: str, rows: int) -> None:
    pytest.importorskip("pandas")
    frame = getattr(run, name)
    with open(run.path / f"{name}.csv", newline="") as file:
        header, *lines = csv.reader(file)
    assert list(frame.columns) == header and len(frame) == len(lines) == rows
    for i, line in enumerate(lines):
        for name, cell in zip(header, line):
            value = frame[name].iloc[i]
            assert repr(value.item()) == cell if cell else value != value  # to the last digit


def test_a_frame_is_read_as_the_file_is_now(run: fedbench.Run) -> None:
    pytest.importorskip("pandas")
    path = run.path / "metrics.csv"
    with path.open("a") as file:
        file.write("3,0.5")  # a line that is being written
    assert len(run.metrics) == 2
    path.write_text("")
    assert run.metrics.empty
    path.unlink()
    assert run.metrics.empty
    path.write_text("a,b\n1,2,3\n4\n")
    with pytest.raises(ConfigError, match=r"metrics\.csv is damaged"):
        _ = run.metrics.x


def test_pandas_is_asked_for_in_one_sentence(run: fedbench.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ConfigError, match=r"tables of runs need pandas: pip install"):
        _ = run.costs
    assert run.summary["rounds"] == 2 and "rounds 2 of 2" in repr(run)  # nothing else needs it


def test_a_small_table_for_notebooks(run: fedbench.Run) -> None:
    best = run.summary["best"]["values"]["personal/accuracy"]
    shown = run._repr_html_()
    assert "<th>method</th><td>local</td>" in shown and f"<td>{best:.4f}</td>" in shown
    assert "<th>path</th><td>run</td>" in shown  # nothing of this machine
    summary = run.summary | {"name": "<b>&"}
    (run.path / "summary.json").write_text(json.dumps(summary))
    assert "<td>&lt;b&gt;&amp;</td>" in run._repr_html_()
    both = fedbench.Runs([run, run])
    assert both._repr_html_().count("<tr>") == 3 and both._repr_html_().count("&lt;b&gt;") == 2
    assert len(both[:1]) == 1 and both[0] is run and list(both) == [run, run] and repr(both).startswith("Runs([Run(")


def test_a_damaged_run_says_so(run: fedbench.Run) -> None:
    (run.path / "summary.json").write_text("{")
    assert "status damaged: summary.json cannot be read" in repr(run)
    (run.path / "config.yaml").unlink()
    with pytest.raises(ConfigError, match=r"run is not a run folder: it has no config\.yaml"):
        fedbench.Run("run")


def test_no_runs_have_no_table() -> None:
    with pytest.raises(ConfigError, match="there are no runs for a table"):
        fedbench.Runs([]).table()


def test_a_client_has_a_number(run: fedbench.Run) -> None:
    for client in ("0", True, 1.0):
        with pytest.raises(ConfigError, match="client must be the number or the name of a client"):
            run.model(client)  # type: ignore[arg-type]
