"""A class of the user's own goes on, and is taken out of a run, however the run was given it."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path

import pytest

import fedbench
from fedbench.api.commands import resume_call
from fedbench.commands import main
from fedbench.core.files import read_json
from fedbench.core.options import ConfigError
from fedbench.report.runs import find_runs
from fedbench.report.summary import unfinished
from fedbench.simulation.status import resume_command
from fedbench.tools import export, export_command

NET = '''
from torch import nn

class TiedNet(nn.Module):
    """Two layers share a weight, and the head goes by a name of its own."""

    def __init__(self, input_shape, num_classes, width: int = 4):
        super().__init__()
        size = input_shape[0] * input_shape[1] * input_shape[2]
        self.enc, self.dec = nn.Linear(size, width, bias=False), nn.Linear(size, width, bias=False)
        self.mix = nn.Linear(width, size, bias=False)
        self.dec.weight = self.enc.weight
        self.top = nn.Linear(width, num_classes)

    def forward(self, x):
        return self.top(self.dec(self.mix(self.enc(x.flatten(1)).relu())))
'''
COLUMNS = 'model.columns={base: ["enc.*","mix.*"], head: ["top.*"]}'
OWN = "model._target_=own_net.TiedNet"
SMALL = ["partition.num_clients=2", "rounds=1", "local.epochs=1", "tracking=disabled", "hardware.executor=loop"]
RUNS = {
    "class": [OWN, "algorithm=fedavg"],
    "columns": [OWN, COLUMNS, "algorithm=fedper"],
    "option": ["--config-dir", "options", "model=tied", "algorithm=fedper"],
    "both": ["--config-dir", "options", "model=tied", COLUMNS, "model.width=3", "algorithm=fedper"],
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with own_net.py, options/ and a run of each kind after its only round."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "options" / "model").mkdir(parents=True)
    (folder / "own_net.py").write_text(NET)
    text = '_target_: own_net.TiedNet\nwidth: 5\ncolumns: {base: ["enc.*", "mix.*"], head: ["top.*"]}\n'
    (folder / "options" / "model" / "tied.yaml").write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        inside(folder, patch)
        for name, words in RUNS.items():
            assert main([*words, *SMALL, f"hydra.run.dir={name}"]) == 0
    return folder


def inside(folder: Path, patch: pytest.MonkeyPatch) -> None:
    patch.chdir(folder)
    patch.setattr(sys, "path", [str(folder), *sys.path])
    patch.setattr(sys, "argv", ["fedbench"])


@pytest.fixture
def here(runs: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    inside(runs, monkeypatch)
    return runs


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if i else ()) for i, name in enumerate(RUNS)]
)
def test_each_kind_goes_on_by_the_printed_command(name: str, here: Path, tmp_path: Path) -> None:
    """Also with more rounds, and with all that the first command gave."""
    shutil.copytree(name, tmp_path / name)
    folder = tmp_path / name
    command = shlex.split(resume_command(folder))
    assert command[:3] == ["python", "-m", "fedbench"]
    assert main(command[3:]) == 0
    typed = [word for word in RUNS[name] if word not in command and not word.startswith("model=")]
    assert main([*command[3:], *typed, "rounds=2"]) == 0
    assert read_json(folder / "summary.json")["rounds"] == 2
    assert main([*command[3:], "model.width=9"]) == 2


@pytest.mark.parametrize("name", RUNS)
def test_each_kind_is_taken_out_of_its_run(
    name: str, here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = "options" if "--config-dir" in RUNS[name] else None
    flags = ["--config-dir", "options"] if options else []
    files = ["--out", str(tmp_path / "0.pt"), "--predictions", str(tmp_path / "p.npz")]
    for given in (flags, [OWN]):  # the folder of options, or the class itself
        assert export_command.main([name, "--client", "0", *files, *given]) == 0, capsys.readouterr().err
        for file in tmp_path.iterdir():
            file.unlink()
    assert type(fedbench.load(name, options).model(0, *([] if options else [OWN]))).__name__ == "TiedNet"  # type: ignore
    assert "top.weight" in export.client_state(name, 0, [] if options else [OWN], config_dir=options)
    for refused in (lambda: fedbench.load(name).model(0), lambda: export.client_state(name, 0)):  # type: ignore
        with pytest.raises(ConfigError, match=r"if you trust it, add model\._target_=own_net\.TiedNet to the command"):
            refused()


def test_options_of_another_folder_are_compared_too(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["resume=option", OWN, "model.width=6", "rounds=2"]) == 2
    assert "the run has model.width=5 (requested: 6)" in capsys.readouterr().err


def test_the_command_is_that_of_the_report_of_a_cell_and_of_python(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["-m", *RUNS["option"], *SMALL, "seed=0", "sweep_dir=sweep"]
    assert main(words) == 0
    cell = next(path.parent for path in Path("sweep").rglob("config.yaml") if path.parent.name != ".hydra")
    (cell / "summary.json").unlink()
    row = unfinished(find_runs([Path("sweep")])).rows[0]  # type: ignore[union-attr]
    assert row["command"] == f"python -m fedbench --config-dir options resume={shlex.quote(str(cell))}"
    assert resume_call(cell) == f"fedbench.run(config_dir='options', resume={str(cell)!r})"
    assert eval(resume_call(cell), {"fedbench": fedbench}).status == "finished"
