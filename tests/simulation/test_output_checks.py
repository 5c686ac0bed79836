"""What a model must return, checked once before round 1, and what its constructor is given."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import arrays_of, compose, ragged, split_of
from torch import Tensor, nn

from fedbench.config.check import check
from fedbench.core.options import ConfigError
from fedbench.nn.flat import FlatModel
from fedbench.simulation import build, simulator
from fedbench.simulation.output_checks import check_outputs

CLASSES = 3


class Net(nn.Module):
    """Two layers on flattened inputs, `outputs` wide (default: right)."""

    outputs = 0

    def __init__(self, input_shape: tuple, num_classes: int):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(int(np.prod(input_shape)), 8), nn.ReLU())
        self.head = nn.Linear(8, self.outputs or num_classes)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.body(x))


class TooMany(Net):
    outputs = 20


class TooFew(Net):
    outputs = 2


class NotANumber(Net):
    def __init__(self, input_shape: tuple, num_classes: int):
        super().__init__(input_shape, num_classes)
        nn.init.constant_(self.head.weight, float("nan"))


class Infinite(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / 0


class Nothing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1)[:, :CLASSES]


class Frozen(Net):
    def __init__(self, input_shape: tuple, num_classes: int):
        super().__init__(input_shape, num_classes)
        self.requires_grad_(False)


class Double(Net):
    def __init__(self, input_shape: tuple, num_classes: int):
        super().__init__(input_shape, num_classes)
        self.double()


class DoubleBuffer(Net):
    def __init__(self, input_shape: tuple, num_classes: int):
        super().__init__(input_shape, num_classes)
        self.register_buffer("scale", torch.ones(1, dtype=torch.float64))


class Lazy(Net):
    def __init__(self, input_shape: tuple, num_classes: int):
        super().__init__(input_shape, num_classes)
        self.head = nn.LazyLinear(num_classes)


class Pair(Net):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x), x


class Triple(Net):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x), x, x


class Dictionary(Net):
    def forward(self, x: Tensor) -> Any:
        return {"logits": super().forward(x)}


class Silent(Net):
    def forward(self, x: Tensor) -> Any:
        super().forward(x)


class Scalar(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).mean()


class OneSample(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[:1]


class Pixels(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[..., None]


class Doubled(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).double()


class Choices(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).argmax(1, keepdim=True).expand(-1, CLASSES)


class Detached(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).detach()


class OnlyInTraining(Net):
    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        return (y, y) if self.training else y


class Misfit(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(x.flatten(1))


class Broken(Net):
    def __init__(self, input_shape: tuple, num_classes: int):
        raise RuntimeError("no such\n  thing in\nthe table")


class Uninitialized(nn.Module):
    def __init__(self, input_shape: tuple, num_classes: int):
        self.head = nn.Linear(3, 3)


def number(input_shape: tuple, num_classes: int) -> int:
    return 5


def engine(name: str, **keys: Any) -> Any:
    arrays, split = ragged()
    values = [f"model.{key}={value}" for key, value in keys.items()]
    cfg = compose([f"model._target_={__name__}.{name}", "hardware.executor=loop", *values])
    return build.engine(cfg, arrays, split)


@pytest.mark.parametrize(
    "name, words",
    [
        ("TooMany", "has too many outputs, 20 for 3 classes"),
        ("TooFew", "has too few outputs, 2 for 3 classes"),
        ("NotANumber", r"NaN or infinite outputs for 5 of 5 training samples .* parameter head\.weight is not finite"),
        ("Infinite", "NaN or infinite outputs for 5 of 5 .* all its parameters are finite"),
        ("Nothing", "has no parameter to train: add a layer with parameters$"),
        ("Frozen", "has no parameter to train: all 4 have requires_grad=False"),
        ("Double", r"body\.1\.weight is float64, .* float32: .* self\.float\(\)"),
        ("DoubleBuffer", "scale is float64"),
        ("Lazy", "head.weight has no shape yet"),
        (
            "Triple",
            r"returns a tuple of 3: its forward pass must return logits \[5, 3\], or a tuple of logits",
        ),
        (
            "Pair",
            r"an extra loss \[5, 1, 4, 4\] of float32: the extra loss must be one float32 number",
        ),
        ("Dictionary", r"returns a dict \(logits\)"),
        ("Silent", "returns None"),
        ("Scalar", r"returns a single number, expected \[5, 3\]"),
        ("OneSample", r"returns \[1, 3\], expected \[5, 3\] for 5 samples of 3 classes: the first dimension"),
        ("Pixels", r"returns \[5, 3, 1\], expected \[5, 3\]"),
        ("Doubled", r"returns float64, expected float32 .* \.float\(\)"),
        ("Choices", "returns int64, expected float32"),
        ("Detached", "do not depend on any trained parameter"),
        ("OnlyInTraining", r"an extra loss \[5, 3\]"),
        (
            "Misfit",
            r"cannot compute 5 training samples of shape \(1, 4, 4\): RuntimeError: .*16.*"
            r"\(in head, a Linear; test_output_checks\.py, line \d+\)",
        ),
        ("Broken", r"cannot be built: RuntimeError: no such thing in the table \(test_output_checks\.py, line \d+\)"),
        ("Uninitialized", r"cannot be built: AttributeError: cannot assign module before"),
        ("number", r"builds an object of type int, expected a torch\.nn\.Module"),
    ],
)
def test_a_model_that_cannot_be_trained_is_one_sentence(name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=f"^model._target_={__name__}.{name}.*{words}") as caught:
        engine(name)
    assert "\n" not in str(caught.value) and type(caught.value) is ConfigError


class Branch(Net):
    """Which way it goes depends on the data: a loop over clients computes that."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        return self.head(y * 2 if y.sum() > 0 else y)


class Moody(Net):
    """Its own dropout, a batch norm, a counter and an activation that it keeps."""

    def __init__(self, input_shape: tuple, num_classes: int):
        super().__init__(input_shape, num_classes)
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += len(x)
        self.last = self.norm(self.body(x) * torch.rand(8))
        return self.head(self.last)


def test_a_branch_on_the_data_is_computed() -> None:
    assert engine("Branch").model.size


def test_the_check_leaves_no_trace() -> None:
    arrays, split = ragged()
    cfg = compose([f"model._target_={__name__}.Moody"])
    f = build.federation(cfg, arrays, split, torch.device("cpu"))
    model = build.model(cfg, f)
    before, drawn = copy.deepcopy(model.module.state_dict()), torch.get_rng_state()
    inputs, row = f.inputs.clone(), model.init_row()  # type: ignore
    check_outputs(model, f, "it")
    after = model.module.state_dict()
    assert all(torch.equal(after[n], t) for n, t in before.items())
    assert torch.equal(torch.get_rng_state(), drawn)
    assert torch.equal(f.inputs, inputs) and torch.equal(model.init_row(), row)  # type: ignore
    assert not model.module.training and not hasattr(model.module, "last")


@pytest.mark.parametrize("classes", [2, 4, 5, 6])
def test_samples_and_classes_are_never_mistaken_for_one_another(classes: int) -> None:
    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(16, classes)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(x.flatten(1)).T

    cfg = compose([])
    arrays, split = ragged(classes=classes)
    f = build.federation(cfg, arrays, split, torch.device("cpu"))
    with pytest.raises(ConfigError, match="the first dimension must be the samples"):
        check_outputs(FlatModel(Turned()), f, "it")


@pytest.mark.parametrize(
    "task, targets, outputs",
    [
        ("multilabel", np.eye(3, dtype=np.float32)[np.arange(12) % 3], (3,)),
        ("segmentation", np.arange(12 * 16).reshape(12, 4, 4) % 3, (3, 4, 4)),
    ],
)
def test_every_task_says_what_a_model_must_return(task: str, targets: np.ndarray, outputs: tuple) -> None:
    class Fits(nn.Module):
        def __init__(self, shape: tuple) -> None:
            super().__init__()
            self.shape, self.head = shape, nn.Linear(16, int(np.prod(shape)))

        def forward(self, x: Tensor) -> Tensor:
            return self.head(x.flatten(1)).view(-1, *self.shape)

    arrays = arrays_of(np.ones((12, 1, 4, 4), np.float32), targets, 3, task=task)
    f = build.federation(compose([]), arrays, split_of([3, 3]), torch.device("cpu"))
    check_outputs(FlatModel(Fits(outputs)), f, "it")
    with pytest.raises(ConfigError, match=r"too many outputs, 4 for 3 classes"):
        check_outputs(FlatModel(Fits((4, *outputs[1:]))), f, "it")
    with pytest.raises(ConfigError, match=re.escape(f"expected {[5, *outputs]}")):
        check_outputs(FlatModel(Fits((*outputs, 2))), f, "it")


# -- what a constructor is given ---------------------------------------------------------------------------------


class Fixed(Net):
    def __init__(self, width: int = 8):
        super().__init__((1, 4, 4), CLASSES)
        self.width = width


class ClassesOnly(Net):
    def __init__(self, *, num_classes: int):
        super().__init__((1, 4, 4), num_classes)


class PassedOn(Net):
    def __init__(self, width: int = 4, **options: Any):
        super().__init__(**options)
        self.given = sorted(options)


class Named(Net):
    def __init__(self, input_shape: tuple, num_classes: int, template: str, **options: Any):
        super().__init__(input_shape, num_classes)
        self.given = [template, *options]


def function(**options: Any) -> nn.Module:
    return PassedOn(**options)


def picky(**options: Any) -> nn.Module:
    """As torchvision's makers: what its **kwargs may be only a call can tell."""
    return ClassesOnly(**options)


def test_a_constructor_gets_only_what_its_signature_takes() -> None:
    assert engine("Fixed", width=7).model.module.width == 7
    assert engine("ClassesOnly").model.module.head.out_features == CLASSES
    assert engine("PassedOn").model.module.given == ["input_shape", "num_classes"]
    assert engine("Named").model.module.given == ["a photo of a {}."]
    assert engine("function").model.module.given == ["input_shape", "num_classes"]
    assert engine("picky").model.module.head.out_features == CLASSES


def test_what_was_not_injected_is_not_left_out() -> None:
    with pytest.raises(ConfigError, match="unexpected keyword argument 'depth'"):
        engine("picky", depth=3)


# -- parts of the wrong kind, and what needs no data -------------------------------------------------------------


class Source:
    def load(self) -> Any:
        return 3


class Unreadable:
    def load(self) -> Any:
        raise OSError("cannot\n  read it")


class Empty:
    pass


class Options:
    def __init__(self, **options: Any): ...


def nothing() -> dict:
    return {}


@pytest.fixture
def untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Data must not be loaded."""

    def load(cfg: Any) -> Any:
        raise AssertionError("data were loaded")

    monkeypatch.setattr(build, "data", load)


@pytest.mark.parametrize(
    "overrides, words",
    [
        (["algorithm._target_={}.Empty"], "algorithm.* makes an object of type Empty, expected a fedbench.*Algorithm"),
        (["algorithm._target_={}.nothing"], "algorithm.* makes an object of type dict, expected a fedbench.*Algorithm"),
        (["optimizer._target_={}.Options"], "optimizer.* of type Options, expected a fedbench.engine.optim.Optimizer"),
        (["partition._target_={}.Empty"], "partition.* of type Empty, expected a partition, which has assign"),
        (["dataset._target_={}.Empty"], "dataset.* is not a data source, because it has no method load"),
        (["model._target_={}.Empty"], r"model.* is not a torch\.nn\.Module"),
        (["algorithm=scaffold", "optimizer.momentum=0.9"], "algorithm=scaffold needs plain SGD"),
        (["algorithm=pfedmoap"], "pfedmoap needs the parameter group 'prompt', but model.columns has base, head"),
        (["finetune.epochs=1", "finetune.part=tail"], "finetune.part needs the parameter group 'tail'"),
        (["algorithm.mu=[1,2]"], "algorithm.mu lists 2 values, and there are 20 training clients"),
        (["optimizer.momentum=0", "optimizer.nesterov=true"], "optimizer.nesterov=true needs"),
        (["hardware.device=cuda:99"], "hardware.device=cuda:99"),
        (["hardware.graphs=true", "hardware.device=cpu"], "hardware.graphs=true: CUDA graphs need"),
    ],
)
def test_what_needs_no_data_is_said_before_they_are_loaded(
    overrides: list[str], words: str, tmp_path: Path, untouched: None
) -> None:
    cfg = compose([text.replace("{}", __name__) for text in overrides])
    with pytest.raises(ConfigError, match=words):
        simulator.prepare(cfg, tmp_path, None)


@pytest.mark.parametrize(
    "override, words",
    [
        ("clients_per_round=21", "clients_per_round=21 must be at most the number of training clients, 20"),
        ("new_clients.count=20", "new_clients.count=20 must be less than the number of clients, 20"),
        ("optimizer.lr=[0.1,0.2]", "optimizer.lr lists 2 rates, and there are 20 clients to train"),
    ],
)
def test_what_needs_no_torch_is_said_by_the_configuration(override: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check(compose([override]))
    check(compose([override, "partition=domain"]))  # the data say how many there are


@pytest.mark.parametrize(
    "name, words",
    [
        ("Source", r"load\(\) returns an object of type int, expected fedbench\.data\.base\.Arrays"),
        ("Unreadable", r"cannot load its data: OSError: cannot read it \(test_output_checks\.py, line \d+\)"),
        ("nothing", r"makes an object of type dict, expected a data source, which has load\(\)"),
    ],
)
def test_a_source_that_gives_no_arrays(name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=f"^dataset._target_={__name__}.{name}.*{words}"):
        build.data(compose([f"dataset._target_={__name__}.{name}"]))


@pytest.mark.parametrize("option", ["num_classes", "n"])
def test_data_that_do_not_fit_in_memory(option: str) -> None:
    with pytest.raises(ConfigError, match=rf"do not fit in memory \(.*\): lower dataset\.{option}=100000000000$"):
        build.data(compose(["dataset=synthetic", f"dataset.{option}=100000000000"]))


def test_a_picture_size_that_does_not_fit_in_memory(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", X=np.zeros((6, 8, 8), np.uint8), y=np.arange(6) % 2)
    path = [f"dataset.path={tmp_path / 'a.npz'}", f"data_dir={tmp_path}"]
    with pytest.raises(ConfigError, match=r"do not fit in memory .*: lower dataset\.resize=100000000$"):
        build.data(compose(["dataset=npz", *path, "dataset.resize=100000000"]))


def test_a_method_refuses_before_executors_are_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def time(*args: Any) -> None:
        raise AssertionError("executors were timed")

    monkeypatch.setattr(build, "choose_executor", time)
    with pytest.raises(ConfigError, match="it needs model=clip_prompt"):
        simulator.prepare(compose(["algorithm=pfedmoap", "model.columns.prompt=[head.*]"]), tmp_path, None)


@pytest.mark.parametrize(
    "override, words",
    [
        (f"algorithm._target_={__name__}.Net", "is not a fedbench.algorithms.base.Algorithm"),
        (f"partition._target_={__name__}.Net", "is not a partition"),
        ("dataset._target_=fedbench.models.mlp.MLP", "is not a data source"),
        ("algorithm._target_=fedbench.engine.optim.SGD", "is not a fedbench.algorithms.base.Algorithm"),
        ("model._target_=fedbench.data.arrays.npz.Npz", r"is not a torch\.nn\.Module"),
        ("optimizer._target_=torch.optim.SGD", "optimizer.params must be given"),  # called Optimizer as well
        (f"model._target_={__name__}.Net model.depth=3", "model.depth is unknown"),
    ],
)
def test_the_kind_of_a_class_comes_before_its_options(override: str, words: str) -> None:
    """What is asked of a class that has no place there would lead astray: algorithm.input_shape must be given."""
    with pytest.raises(ConfigError, match=words):
        check(compose(override.split()))
