"""The configuration: every file composes, mistakes are one sentence, equal settings have one hash."""

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from fedbench.app.cell_name import NAME_LENGTH, cell_name
from fedbench.app.compose import Composer, compose
from fedbench.config.check import check
from fedbench.config.choices import with_choices
from fedbench.config.conf_tree import GROUPS, find_conf_dir, group_options, target_of
from fedbench.config.schema import check_target
from fedbench.core.nested import flatten
from fedbench.core.options import ConfigError
from fedbench.core.settings import UNHASHED_KEYS, config_hash, load_config, save_config

SNAPSHOT = Path(__file__).parent / "snapshots" / "options.txt"


def mistake(*overrides: str) -> str:
    """The sentence that these overrides are answered with."""
    with pytest.raises(ConfigError) as caught:
        check(compose(list(overrides)))
    sentence = str(caught.value)
    assert "\n" not in sentence
    assert "append" not in sentence
    return sentence


@pytest.fixture(scope="module")
def default() -> DictConfig:
    """The default run."""
    return compose([])


def test_the_default_run_is_valid_and_names_its_choices(default: DictConfig) -> None:
    values = check(default)
    assert values["choices"] == {
        **{"dataset": "digits", "task": "auto", "partition": "dirichlet", "model": "mlp", "adapter": "none"},
        **{
            "algorithm": "pgfed",
            "optimizer": "sgd",
            "server": "average",
            "aggregator": "mean",
            "attack": "none",
            "compression": "none",
            "privacy": "local",
            "hardware": "auto",
            "tracking": "auto",
            "callbacks": "none",
            "experiment": None,
        },
    }
    assert "hydra" not in values


def test_composing_leaves_no_trace() -> None:
    from hydra.core.global_hydra import GlobalHydra

    compose(["seed=3"])
    assert not GlobalHydra.instance().is_initialized()
    assert compose([]).seed == 0


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("algorithm=pgfde", "algorithm=pgfde is not an option: did you mean algorithm=pgfed"),
        ("algorithm.mu=-1", "algorithm.mu must be a number >= 0 or a list, each entry a number >= 0, got -1"),
        ("algorithm.mu=abc", "algorithm.mu must be a number >= 0 or a list, each entry a number >= 0, got 'abc'"),
        ("algorithm.mu=nan", "algorithm.mu must be a number >= 0 or a list, each entry a number >= 0, got nan"),
        ("algorithm.mu=true", "algorithm.mu must be a number >= 0 or a list, each entry a number >= 0, got true"),
        ("algorithm.muu=1", "algorithm.muu is unknown: did you mean algorithm.mu? algorithm=pgfed takes"),
        ("+algorithm.muu=1", "algorithm.muu is unknown: did you mean algorithm.mu? algorithm=pgfed takes"),
        ("++algorithm.muu=1", "algorithm.muu is unknown: did you mean algorithm.mu? algorithm=pgfed takes"),
        ("partition.alpha=0", "partition.alpha must be a number > 0, got 0"),
        ("partition.num_clients=0", "partition.num_clients must be a whole number >= 1"),
        ("partition.num_client=3", "did you mean partition.num_clients?"),
        ("sample_rate=0", "sample_rate must be a number in (0, 1], got 0"),
        ("sample_rate=1.5", "sample_rate must be a number in (0, 1], got 1.5"),
        ("rounds=0", "rounds must be a whole number >= 1"),
        ("rounds=3.0", "rounds must be a whole number >= 1, got 3.0"),
        ("rounds=null", "rounds must be a whole number >= 1, got null"),
        ("rounds=four", "rounds must be a whole number >= 1, got 'four'"),
        (f"rounds={10**23}", f"rounds must be a whole number >= 1, got {10**23}, which is too large"),
        (f"local.epochs={2**63}", "which is too large"),
        (f"partition.seed={2**32}", "partition.seed must be a whole number from 0 to 4294967295, got 4294967296"),
        ("optimizer.lr=inf", "optimizer.lr must be a number > 0 or a list, each entry a number > 0, got inf, which"),
        ("optimizer.lr=[0.1,inf]", "each entry a number > 0, got [0.1, inf]"),
        ("algorithm.mu=inf", "got inf, which is not finite"),
        (f"algorithm.mu={10**23}", f"got {10**23}, which is too large"),
        ("partition.alpha=inf", "got inf, which is not finite"),
        ("model=null", "model=null is not an option: model has albef_b16"),
        ("dataset=null", "dataset=null is not an option: dataset has"),
        ("local=null", "local must be a group of keys (epochs, steps, batch_size, drop_last), got null"),
        ("rouns=3", "rouns is unknown: did you mean rounds?"),
        ("experimnt=debug", "experimnt is unknown: did you mean +experiment?"),
        ("lr=0.1", "lr is unknown: did you mean finetune.lr or new_clients.lr or optimizer.lr?"),
        ("xyzzy=1", "xyzzy is unknown: the keys are adapter, aggregator, algorithm, attack, callbacks"),
        ("seed=-1", "seed must be a whole number >= 0"),
        ("~seed", "seed must be given"),
        ("~xyzzy", "~xyzzy deletes a key that the configuration does not have: correct or remove it"),
        ("seed.x=1", "seed must be a whole number >= 0, got {x: 1}"),
        ("local=3", "local must be a group of keys (epochs, steps, batch_size, drop_last), got 3"),
        ("local.drop_last=1", "local.drop_last must be true or false, got 1"),
        ("~algorithm", "algorithm must be one of its options ("),
        ("algorithm=null", "algorithm=null is not an option"),
        ("pgfed", "'pgfed' is not of the form key=value: did you mean algorithm=pgfed?"),
        ("seed=1,2", "seed=1,2 has several values: add -m"),
        ("seed=[1", "cannot read 'seed=[1'"),
        ("experiment=debug", "write +experiment=debug"),
        ("experiment=debgu", "did you mean +experiment=debug?"),
        ("+experiment=debgu", "did you mean +experiment=debug?"),
        ("+algorithm=fedavg", "+algorithm=fedavg has a plus, which only +experiment needs: write algorithm=fedavg"),
        ("hardware=cudaa", "did you mean hardware=cuda"),
        ("hardware.device=gpu", "hardware.device must be text that is auto, cpu, cuda"),
        ("hardware.executor=loops", "did you mean loop?"),
        ("hydra.nothing=1", "hydra.nothing is not a key: correct or remove it (--cfg all"),
        ("hydra/launcher=jobli", "hydra/launcher=jobli is not an option: did you mean joblib?"),
        ("tracking.tags=[1]", "tracking.tags must be a list, each entry text, got [1]"),
        ("optimizer.schedule.name=cosin", "optimizer.schedule.name must be one of constant, cosine"),
        ("optimizer.schedule.warm=1", "did you mean optimizer.schedule.warmup?"),
        ("optimizer.lr=0", "optimizer.lr must be"),
        ("model.num_classes=3", "model.num_classes is unknown"),
        ("model.hidden=[a]", "model.hidden must be a list, each entry a whole number, got ['a']"),
        ("model.columns.x=3", "model.columns must be a mapping of names to a list"),
        ("model._target_=fedbench.models.mlp.MPL", "fedbench.models.mlp has no MPL; did you mean MLP?"),
        ("model._target_=nowhere.Net", "there is no module for 'nowhere.Net'"),
        (
            "model._target_=fedbench.algorithms.fedavg.FedAvg",
            "fedavg.FedAvg is not a torch.nn.Module",
        ),
        ("model._target_=fedbench.models.mlp", "model._target_=fedbench.models.mlp is a module"),
        ("model._target_=3", "model._target_ must be the path of a class, such as package.module.Class, got 3"),
        ("dataset.split=mergd", "dataset.split must be one of"),
        ("dataset.test_fraction=1", "dataset.test_fraction must be a number in [0, 1), got 1"),
        ("dataset.augment={flip: 3}", "dataset.augment.flip must be true or false, got 3"),
        (
            "data_dir=${nothing}",
            "data_dir refers to another value that cannot be resolved (Interpolation key 'nothing' not found)",
        ),
        ("output_dir=", "output_dir must be text that names a folder, got ''"),
        ("sweep_dir=' '", "sweep_dir must be text that names a folder, got ' '"),
        ("data_dir=", "data_dir must be text that names a folder, got ''"),
        ("name='=1+1'", "name must be text of one line that does not begin with = + - or @ or null, got '=1+1'"),
        ("name='a\nb'", r"name must be text of one line that does not begin with = + - or @ or null, got 'a\nb'"),
    ],
)
def test_a_mistake_is_one_sentence(override: str, words: str) -> None:
    assert words in mistake(override)


OWN = """from torch import nn

class Net(nn.Module):
    def __init__(self, input_shape, num_classes, width: int = 8, hidden: int = 3): ...

class Parts:
    def __init__(self, alpha: float = 2.0): ...
    def assign(self): ...
"""


def test_a_class_of_ones_own_takes_none_of_the_options_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """model=mlp says hidden and columns, for its own class; what is fedbench's own, and what was given, stays."""
    (tmp_path / "ones_own.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    own = "model._target_=ones_own.Net"
    bare = {"_target_": "ones_own.Net", "columns": {}, "freeze": []}
    assert check(compose([own]))["model"] == bare
    assert check(compose([own, "model.width=4", "~model.hidden"]))["model"] == {**bare, "width": 4}
    for said in ("model.columns={head: [a.*]}", "model.columns.head=[a.*]"):
        assert check(compose([own, said]))["model"] == {**bare, "columns": {"head": ["a.*"]}}
    both = check(compose([own, "model.columns.base=[b.*]", "model.columns.head=[a.*]"]))["model"]["columns"]
    assert both == {"base": ["b.*"], "head": ["a.*"]}
    assert "did you mean model.width? ones_own.Net takes columns, freeze, hidden, width" in mistake(
        own, "model.widht=4"
    )
    partition = check(compose(["partition._target_=ones_own.Parts", "partition.num_clients=7"]))["partition"]
    assert partition == {"_target_": "ones_own.Parts", "num_clients": 7, "seed": 1}
    same = "model._target_=fedbench.models.mlp.MLP"
    assert check(compose([same]))["model"] == check(compose([]))["model"]
    nested = ["dataset=apple/mnist", "dataset._target_=fedbench.data.images.mnist.MNIST"]
    assert check(compose(nested))["dataset"] == check(compose(nested[:1]))["dataset"]


METHODS = """from fedbench.algorithms.fedavg import FedAvg

class Mine(FedAvg):
    def __init__(self, strength: float = 1.0): ...

class FedProx(FedAvg): ...

class Maker:
    @classmethod
    def small(cls): ...

def mlp(): ...
"""


@pytest.fixture
def methods(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module of the user's own, ones_methods, and a folder of options."""
    (tmp_path / "ones_methods.py").write_text(METHODS)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    ("overrides", "label"),
    [
        (["algorithm._target_=ones_methods.Mine"], "Mine"),
        (["algorithm=fedprox", "algorithm._target_=ones_methods.Mine"], "Mine"),
        (["algorithm._target_=ones_methods.FedProx"], "ones_methods.FedProx"),  # not what algorithm=fedprox is
        (["algorithm._target_=fedbench.algorithms.fedprox.FedProx"], "fedprox"),
        (["algorithm._target_=ones_methods.Maker.small"], "Maker.small"),
        (["algorithm._target_=fedbench.algorithms.pgfed.PGFed"], "pgfed"),
        (["model._target_=ones_methods.mlp"], "ones_methods.mlp"),
        (["dataset._target_=ones_methods.Mine"], "Mine"),
        (["partition._target_=ones_methods.Mine"], "Mine"),
        (["optimizer._target_=ones_methods.Mine"], "Mine"),
        (["+experiment=own"], "Mine"),
    ],
)
def test_a_run_is_named_after_the_class_that_runs(methods: Path, overrides: list[str], label: str) -> None:
    (methods / "experiment").mkdir()
    text = "# @package _global_\nalgorithm: {_target_: ones_methods.Mine}\n"
    (methods / "experiment" / "own.yaml").write_text(text)
    group = "algorithm" if overrides[-1].startswith("+") else overrides[-1].split(".")[0]
    cfg = compose(overrides, str(methods))
    assert cfg.choices[group] == label
    others = {name: choice for name, choice in compose([]).choices.items() if name not in (group, "experiment")}
    assert {name: cfg.choices[name] for name in others} == others


def test_keys_of_another_method_are_refused(methods: Path) -> None:
    """What nobody asked for (pgfed's mu) is dropped; what the command line, or an experiment, says is not."""
    own = "algorithm._target_=ones_methods.Mine"
    assert check(compose([own]))["algorithm"] == {"_target_": "ones_methods.Mine"}
    assert mistake(own, "algorithm.mu=0.1") == "algorithm.mu is unknown: ones_methods.Mine takes strength"
    (methods / "experiment" / "below").mkdir(parents=True)
    text = "# @package _global_\ndefaults: [below/two, _self_]\nalgorithm: {mu: 0.2}\n"
    (methods / "experiment" / "one.yaml").write_text(text)
    (methods / "experiment" / "below" / "two.yaml").write_text("# @package _global_\nalgorithm: {beta: 0.3}\n")
    for name, key in (("one", "mu"), ("below/two", "beta")):
        with pytest.raises(ConfigError, match=f"algorithm.{key} is unknown: ones_methods.Mine takes strength"):
            check(compose([own, f"+experiment={name}", *(["~algorithm.beta"] if key == "mu" else [])], str(methods)))
    cfg = compose([own, "+experiment=one", "~algorithm.mu", "~algorithm.beta"], str(methods))
    assert check(cfg)["algorithm"] == {"_target_": "ones_methods.Mine"}


def test_an_option_may_stand_on_another_one(methods: Path) -> None:
    (methods / "algorithm").mkdir()
    (methods / "algorithm" / "ours.yaml").write_text("defaults: [pgfed]\nmu: 0.3\n")
    cfg = compose(["algorithm=ours"], str(methods))
    assert (cfg.choices.algorithm, cfg.algorithm.mu) == ("ours", 0.3)
    assert target_of("algorithm", "ours", [find_conf_dir(), methods]) == cfg.algorithm._target_


def test_the_number_of_clients_is_said_once(tmp_path: Path) -> None:
    """Of files and the command line the latter counts; two answers on the command line are refused."""
    assert mistake("clients_per_round=3", "sample_rate=0.5") == (
        "clients_per_round=3 and sample_rate=0.5 both set the clients per round: remove one of them"
    )
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "few.yaml").write_text("# @package _global_\nclients_per_round: 3\n")
    (tmp_path / "experiment" / "half.yaml").write_text("# @package _global_\nsample_rate: 0.5\n")

    def found(*overrides: str) -> tuple[int | None, float]:
        cfg = compose(list(overrides), str(tmp_path))
        return cfg.clients_per_round, cfg.sample_rate

    assert found("+experiment=few") == (3, 0.25)
    assert found("+experiment=few", "sample_rate=0.75") == (None, 0.75)
    assert found("+experiment=half", "clients_per_round=4") == (4, 0.5)
    assert found("clients_per_round=null", "sample_rate=0.75") == (None, 0.75)
    assert found("clients_per_round=4") == (4, 0.25)


def test_a_config_dir_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match="no such folder"):
        compose([], config_dir="/nowhere/at/all")


def test_a_broken_yaml_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "algorithm").mkdir()
    (tmp_path / "algorithm" / "mine.yaml").write_text("mu: [1\n")
    with pytest.raises(ConfigError, match=r"mine\.yaml, line \d"):
        compose(["algorithm=mine"], config_dir=str(tmp_path))


def test_an_experiment_with_an_unknown_option_is_named(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    text = "# @package _global_\ndefaults:\n  - override /algorithm: fedavgg\n"
    (tmp_path / "experiment" / "mine.yaml").write_text(text)
    with pytest.raises(ConfigError, match="algorithm=fedavgg is not an option: did you mean fedavg"):
        compose(["+experiment=mine"], config_dir=str(tmp_path))


@pytest.fixture(scope="module")
def composed() -> dict[str, DictConfig]:
    """Every option of every group -> a run with it; one run shows an option of each group at once.

    Experiments have tests of their own."""
    composer, runs = Composer(), {}
    options = {group: group_options(group) for group in GROUPS[:-1]}
    for k in range(max(map(len, options.values()))):
        chosen = [f"{group}={names[k % len(names)]}" for group, names in options.items()]
        cfg = composer.compose(chosen)
        runs.update(dict.fromkeys(chosen, with_choices(cfg, cfg.hydra)))
    return runs


def test_every_option_fits_its_constructor(composed: dict[str, DictConfig]) -> None:
    """A value that the user must give (???) is asked for by name; here it is given."""
    distinct = {id(cfg): (option, cfg) for option, cfg in composed.items()}
    for option, cfg in distinct.values():
        filled = cfg.copy()
        for key in OmegaConf.missing_keys(cfg):
            OmegaConf.update(filled, key, "given")
        try:
            check(filled)
        except ConfigError as error:
            pytest.fail(f"a run with {option}: {error}")


def test_the_keys_are_those_of_the_snapshot(composed: dict[str, DictConfig], default: DictConfig) -> None:
    """FEDBENCH_UPDATE_SNAPSHOTS=1 writes the file anew: a key that changes is a change users see."""
    own = [key for key in flatten(check(default)) if key.split(".")[0] not in (*GROUPS, "choices")]
    lines = [*own, ""]
    for option, cfg in sorted(composed.items(), key=lambda item: GROUPS.index(item[0].split("=")[0])):
        group = option.split("=")[0]
        lines.append(f"{option}: {' '.join(sorted(flatten(OmegaConf.to_container(cfg[group]))))}")
    if os.environ.get("FEDBENCH_UPDATE_SNAPSHOTS") == "1":
        SNAPSHOT.write_text("\n".join([*lines, ""]))
    assert lines == SNAPSHOT.read_text().splitlines(), "meant? FEDBENCH_UPDATE_SNAPSHOTS=1 rewrites it"


def test_experiment_files_begin_with_their_command() -> None:
    folder = find_conf_dir() / "experiment"
    for path in folder.rglob("*.yaml"):
        name = path.relative_to(folder).with_suffix("").as_posix()
        header = [line for line in path.read_text().splitlines() if line.startswith("#")]
        assert any(re.search(rf"python -m fedbench .*\+experiment=(\[.*,)?{name}\b", line) for line in header), name


@pytest.mark.parametrize(
    ("override", "same"),
    [
        ("output_dir=elsewhere", True),
        ("data_dir=/other", True),
        ("tracking=disabled", True),
        ("tracking.tags=[a]", True),
        ("checkpoint.every=3", True),
        ("hardware=cpu", True),
        ("hardware.chunk=2", True),
        ("name=ours", True),
        ("optimizer.momentum=0", True),  # 0 is 0.0
        ("hardware.precision=tf32", False),
        ("eval.every=2", False),
        ("seed=1", False),
        ("algorithm.mu=0.2", False),
        ("dataset.normalize=false", False),
    ],
)
def test_the_hash_is_of_what_can_change_the_numbers(default: DictConfig, override: str, same: bool) -> None:
    assert (config_hash(compose([override])) == config_hash(default)) is same


def test_data_may_move(default: DictConfig) -> None:
    cfg = default.copy()
    cfg.dataset = {"path": "${data_dir}/x.npz", "data_dir": "${data_dir}"}
    moved = cfg.copy()
    moved.data_dir = "/elsewhere"
    other = cfg.copy()
    other.dataset.path = "${data_dir}/y.npz"
    assert config_hash(cfg) == config_hash(moved) != config_hash(other)


def test_a_saved_config_has_the_same_hash(tmp_path: Path) -> None:
    cfg = compose(["optimizer.lr=1e-5"])
    save_config(cfg, tmp_path / "config.yaml")
    assert config_hash(load_config(tmp_path / "config.yaml")) == config_hash(cfg)
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]


@pytest.mark.parametrize(
    "text",
    ["a: ${oc.env:HOME}", "a: !!python/object/apply:os.system ['true']", "[1, 2]", "a: [1", "a: \udcff"],
)
def test_a_saved_config_that_is_not_plain_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ConfigError, match=r"config\.yaml"):
        load_config(path)


def test_cell_names_are_sorted_safe_short_and_distinct() -> None:
    assert cell_name(["seed=1", "algorithm=local"], []) == "algorithm=local,seed=1"
    assert cell_name(["seed=1", "hardware=cpu", "tracking.mode=offline"], UNHASHED_KEYS) == "seed=1"
    assert cell_name(["tracking=disabled"], UNHASHED_KEYS) == "default"
    assert cell_name(["++algorithm.beta=1"], []) == "algorithm.beta=1"
    nested = cell_name(["+experiment=a/b"], [])
    assert "/" not in nested and nested != cell_name(["+experiment=a_b"], [])
    long = [cell_name([f"dataset.path={'x' * 300}{k}"], []) for k in range(2)]
    assert len(set(long)) == 2 and all(len(name) <= NAME_LENGTH for name in long)


def test_a_long_cell_name_keeps_what_differs(tmp_path: Path) -> None:
    """What all cells have is cut; a folder that was named before that is found."""
    common = ["algorithm=fedprox", "clients_per_round=10", "dataset=synthetic", "optimizer.schedule.warmup=3"]
    common += ["partition.num_clients=100", "rounds=1000"]

    def named(*differs: str) -> str:
        return cell_name([*common, *differs], [], str(tmp_path), [text.partition("=")[0] for text in differs])

    names = [named("algorithm.mu=0.1", f"seed={k}") for k in (0, 1)]
    assert names[0].startswith("algorithm.mu=0.1,seed=0,algorithm=fedprox,clients_per_round=10,")
    assert names[1].startswith("algorithm.mu=0.1,seed=1,") and all(len(name) == NAME_LENGTH for name in names)
    keys = [f"optimizer.schedule.{'k' * 10}{i}={i}" for i in range(5)]  # too long by themselves: by their last parts
    assert named(*keys).startswith("kkkkkkkkkk0=0,kkkkkkkkkk1=1,kkkkkkkkkk2=2,")
    assert re.match(r"x+A,seed=7,", named(f"dataset.path={'x' * 200}A", "seed=7"))  # the ends of values differ
    before = cell_name([*common, "seed=0"], [])
    (tmp_path / before).mkdir()
    assert named("seed=0") == before and named("seed=1").startswith("seed=1,")


def test_options_that_the_yaml_omits_are_accepted_without_a_plus(tmp_path: Path) -> None:
    (tmp_path / "algorithm").mkdir()
    (tmp_path / "algorithm" / "short.yaml").write_text("_target_: fedbench.algorithms.fedprox.FedProx\n")
    composer = Composer(str(tmp_path))
    assert composer.compose(["algorithm=short", "algorithm.mu=0.3"]).algorithm.mu == 0.3


MODULE = """
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Literal, Optional, Sequence, Union
from fedbench.core.options import Positive as Pos
import fedbench.core.options as opt
from .other import *

if TYPE_CHECKING:
    from elsewhere import Shape

Word = Literal["red", "blue"]

class Base:
    def __init__(self, lr: Pos, steps: "opt.Count" = 1, **rest): ...

class Plain(Base):
    pass

class Child(Base):
    def __init__(self, word: Word = "red", **kwargs): ...

@dataclass
class Data:
    path: str
    size: tuple[int, int] = (1, 1)
    tags: list[str] = field(default_factory=list)
    hidden: int = field(default=0, init=False)
    maybe: Optional[float] = None
    either: Union[int, str] = 1
    table: dict[str, int] = field(default_factory=dict)

class Kinds:
    def __init__(self, a: int, b: float, c: bool, d: str, e: float | None = None, f=3, g=(1, 2), h=None,
                 *, i: opt.Probability = 0.5, j: Sequence[float] = ()): ...
    @staticmethod
    def fixed(x: int): ...
    @classmethod
    def made(cls, x: int): ...

class Names:
    def __init__(self, copy: int, model_config: int = 1, _private: "Shape" = None, shapes: "list[Shape]" = ()): ...

class First:
    def __init__(self, first: int = 1, /, depth: int = 1): ...

def build(width: int = 3): ...
"""
OTHER = """
from __future__ import annotations
from dataclasses import dataclass
from fedbench.core.options import UnitInterval as Part

class Starred:
    def __init__(self, z: int): ...

@dataclass
class Base:
    part: Part
"""
DERIVED = """
from __future__ import annotations
from dataclasses import dataclass
from .other import Base

@dataclass
class Derived(Base):
    inner: Base | None = None
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A package with constructors of every kind."""
    root = tmp_path_factory.mktemp("library")
    package = root / "somebodys"
    package.mkdir()
    (package / "__init__.py").write_text("from .models import Kinds as Renamed\nfrom . import models\n")
    (package / "models.py").write_text(MODULE)
    (package / "other.py").write_text(OTHER)
    (package / "derived.py").write_text(DERIVED)
    sys.path.insert(0, str(root))
    yield "somebodys"
    sys.path.remove(str(root))


KINDS = {"a": 1, "b": 1, "c": True, "d": "x"}


@pytest.mark.parametrize(
    ("target", "values", "words"),
    [
        ("models.Kinds", KINDS, None),
        ("Renamed", KINDS, None),
        ("models.Kinds", {**KINDS, "e": None, "f": 4, "g": [1], "h": object(), "i": 1, "j": [1, 2.5]}, None),
        ("models.Kinds", {**KINDS, "a": 1.0}, "k.a must be a whole number, got 1.0"),
        ("models.Kinds", {**KINDS, "b": "1"}, "k.b must be a number, got '1'"),
        ("models.Kinds", {**KINDS, "c": 1}, "k.c must be true or false, got 1"),
        ("models.Kinds", {**KINDS, "d": None}, "k.d must be text, got null"),
        ("models.Kinds", {**KINDS, "e": "no"}, "k.e must be a number or null, got 'no'"),
        ("models.Kinds", {**KINDS, "f": "x"}, "k.f must be a whole number"),
        ("models.Kinds", {**KINDS, "g": 1}, "k.g must be a list, got 1"),
        ("models.Kinds", {**KINDS, "i": 2}, "k.i must be a number in [0, 1], got 2"),
        ("models.Kinds", {**KINDS, "j": ["x"]}, "k.j must be a list, each entry a number"),
        ("models.Kinds", {"a": 1}, "k.b must be given: a number"),
        ("models.Kinds.fixed", {"x": 1}, None),
        ("models.Kinds.made", {"cls": 1}, "k.cls is unknown: made takes x"),
        ("models.Plain", {"lr": 1, "anything": 2}, None),
        ("models.Plain", {"lr": 0}, "k.lr must be a number > 0, got 0"),
        ("models.Plain", {"lr": 1, "steps": 0}, "k.steps must be a whole number >= 1"),
        ("models.Child", {"word": "blue", "lr": 1}, None),
        ("models.Child", {"word": "bluee", "lr": 1}, "k.word must be one of red, blue, got 'bluee'; did"),
        ("models.Child", {"word": "red"}, "k.lr must be given: a number > 0"),
        ("models.Data", {"path": "p", "size": [1, 2], "table": {"a": 1}, "either": "x"}, None),
        ("models.Data", {"path": "p", "size": [1]}, "k.size must be a list of 2"),
        ("models.Data", {"path": "p", "hidden": 1}, "k.hidden is unknown"),
        ("models.Data", {"path": "p", "table": {"a": "x"}}, "k.table must be a mapping of names to a whole"),
        ("models.Data", {"path": "p", "either": 1.5}, "k.either must be a whole number or text, got 1.5"),
        ("models.Data", {}, "k.path must be given: text"),
        ("models.Starred", {"z": 1}, None),
        ("models.Starred", {"z": "1"}, "k.z must be a whole number"),
        ("models.Names", {"copy": 1, "_private": object(), "shapes": 3}, None),
        ("models.Names", {"copy": "x"}, "k.copy must be a whole number, got 'x'"),
        ("models.Names", {"copy": 1, "model_config": True}, "k.model_config must be a whole number, got true"),
        ("models.Names", {"copy": 1, "option_copy": 2}, "k.option_copy is unknown"),
        ("derived.Derived", {"part": 0.5, "inner": {"part": 0}}, None),
        ("derived.Derived", {"part": 1}, "k.part must be a number in [0, 1), got 1"),
        ("derived.Derived", {"part": 0, "inner": {"part": 1}}, "k.inner.part must be a number in [0, 1), got 1"),
        ("derived.Derived", {"part": 0, "inner": {"prt": 1}}, "k.inner.prt is unknown: did you mean k.inner.part?"),
        ("derived.Derived", {"part": 0, "inner": {}}, "k.inner.part must be given: a number in [0, 1)"),
        ("derived.Derived", {"part": 0, "inner": 3}, "k.inner must be a group of keys (part) or null, got 3"),
        ("models.First", {"depth": 2}, None),
        ("models.First", {"first": 2}, "k.first is unknown: First takes depth"),
        ("models.build", {"width": 2}, None),
        ("models.build", {"widht": 2}, "k.widht is unknown: did you mean k.width?"),
        ("models.Nothing", {}, "somebodys.models has no Nothing"),
        ("models.Plain", {"lr": {"_target_": "somebodys.models.build", "width": "x"}}, "k.lr.width must be"),
    ],
)
def test_a_target_is_checked_against_its_signature(
    library: str, target: str, values: dict[str, Any], words: str | None
) -> None:
    given = {"_target_": f"{library}.{target}", **values}
    if words is None:
        return check_target("k", given)
    with pytest.raises(ConfigError) as caught:
        check_target("k", given)
    assert words in str(caught.value)


@pytest.mark.parametrize("target", ["itertools.chain", "torch.nn.Identity"])
def test_a_target_without_a_signature_takes_anything(target: str) -> None:
    check_target("k", {"_target_": target, "anything": 1})
