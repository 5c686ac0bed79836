"""What a command asks for and nothing can do is one sentence, not silence and no traceback."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from fedbench.adapters.lora import LoRA
from fedbench.commands import main
from fedbench.core.options import ConfigError
from fedbench.core.weights import read_weights
from fedbench.models.mlp import MLP

NET = "import torch\nclass Net(torch.nn.Module):\n    def __init__(self, num_classes): ...\n"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(sys, "argv", ["fedbench"])
    return tmp_path


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("bare.sub.net.Net", None),
        ("bare.sub.net.Nt", "model._target_: bare.sub.net has no Nt; did you mean Net?"),
        ("bare.sub.nt.Net", "model._target_: there is no module for 'bare.sub.nt.Net'"),
        ("bare.sub", "model._target_: there is no module for 'bare.sub'"),
    ],
)
def test_modules_in_folders_without_init(
    target: str, said: str | None, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "bare" / "sub").mkdir(parents=True)
    (here / "bare" / "sub" / "net.py").write_text(NET)
    assert main([f"model._target_={target}", "--cfg", "job"]) == (0 if said is None else 2)
    assert (said or "") in capsys.readouterr().err


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"x": "defaults: [x, _self_]\nwidth: 3\n"}, "include themselves by their defaults: model/x"),
        ({"x": "defaults: [y]\n", "y": "defaults: [x]\n"}, "include themselves by their defaults: model/x, model/y"),
        ({"x": "defaults: [/model/x]\n"}, "include themselves by their defaults: model/x"),
    ],
)
def test_an_option_that_includes_itself(
    files: dict[str, str], said: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "options" / "model").mkdir(parents=True)
    for name, text in files.items():
        (here / "options" / "model" / f"{name}.yaml").write_text(text)
    assert main(["--config-dir", "options", "model=x"]) == 2
    assert said in capsys.readouterr().err and not (here / "runs").exists()


@pytest.mark.parametrize("words", [["fold=1"], ["-m", "fold=0,1", "sweep_dir=s"]])
def test_a_fold_of_nothing(words: list[str], here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert "fold=1 is a fold of cross-validation and needs the number of folds" in capsys.readouterr().err
    assert not list(here.iterdir())


@pytest.mark.parametrize("name", ["checkpoint.pt", "checkpoint.prev.pt", "metrics.csv"])
def test_a_folder_in_the_place_of_a_file(name: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "run" / name).mkdir(parents=True)
    said = f"run/{name} is a folder, but the run writes a file of that name: move the folder"
    assert main(["hydra.run.dir=run", "rounds=1"]) == 2
    assert said in capsys.readouterr().err and [path.name for path in (here / "run").iterdir()] == [name]
    (here / "run" / "config.yaml").touch()
    assert main(["resume=run"]) == 2
    assert said in capsys.readouterr().err


def test_an_adapter_that_is_to_train_nothing_there() -> None:
    lora = LoRA(rank=2, alpha=2, places=["body.*"], train=["head.*", "zz"])
    with pytest.raises(ConfigError, match=r"adapter\.train=\['head\.\*', 'zz'\]: no parameter of the model matches"):
        lora.insert(MLP((1, 8, 8), 10, [8]))


class Foreign:
    """No tensor."""


def test_damaged_weights_are_not_advised_to_be_trusted(here: Path) -> None:
    torch.save({"a": torch.ones(3), "b": Foreign()}, "foreign.pt")
    torch.save({"a": torch.ones(100)}, "cut.pt")
    Path("cut.pt").write_bytes(Path("cut.pt").read_bytes()[:300])
    Path("text.pt").write_bytes(b"hello")
    for name in ("foreign.pt", "cut.pt", "text.pt", "."):
        with pytest.raises(ValueError) as error:
            read_weights(Path(name))
        assert "weights_only" not in str(error.value) and "\n" not in str(error.value)
    with pytest.raises(
        ValueError, match="the file is damaged, or contains other objects than tensors and plain values"
    ):
        read_weights(Path("foreign.pt"))
