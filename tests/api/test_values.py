"""Python values of a run are a configuration's; those of a sweep are words that Hydra reads back as these values."""

import random
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedbench.api.values import choices_and_values, split_overrides, sweep_overrides
from fedbench.app.compose import Composer
from fedbench.core.options import ConfigError
from fedbench.models.mlp import MLP


@pytest.mark.parametrize(
    ("values", "choices", "others"),
    [
        ({"rounds": 5, "name": None, "optimizer.lr": 1e-5}, [], {"rounds": 5, "name": None, "optimizer.lr": 1e-5}),
        ({"local": {"epochs": 2, "drop_last": True}}, [], {"local.epochs": 2, "local.drop_last": True}),
        ({"model": OrderedDict(columns={"head": ["fc.*"]})}, [], {"model.columns.head": ["fc.*"]}),
        ({"model": {"columns": {}}}, [], {"model.columns": {}}),
        ({"algorithm": "pgfed", "algorithm.mu": 0.1}, ["algorithm=pgfed"], {"algorithm.mu": 0.1}),
        ({"experiment": "debug"}, ["+experiment=debug"], {}),
        ({"model": MLP}, [], {"model._target_": "fedbench.models.mlp.MLP"}),
        ({"task._target_": "my.Task"}, [], {"task._target_": "my.Task"}),
        ({"optimizer": {"lr": (0.1, 0.2)}}, [], {"optimizer.lr": [0.1, 0.2]}),
        ({"a": np.int64(5), "b": np.float64(0.1), "c": np.arange(2)}, [], {"a": 5, "b": 0.1, "c": [0, 1]}),
        ({"name": "a, b", "a": Path("x") / "y"}, [], {"name": "a, b", "a": "x/y"}),
    ],
)
def test_values_of_a_run(values: dict[str, Any], choices: list[str], others: dict[str, Any]) -> None:
    got = choices_and_values(values)
    assert got == (choices, others)
    assert {key: type(value) for key, value in got[1].items()} == {key: type(value) for key, value in others.items()}


def test_words_are_split_as_by_a_shell() -> None:
    assert split_overrides(["algorithm=pgfed seed=0  name='a b'", "rounds=1"]) == [
        *("algorithm=pgfed", "seed=0", "name=a b", "rounds=1")
    ]


def test_a_list_is_swept_over_in_a_sweep() -> None:
    values = {"seed": range(3), "algorithm": ("fedavg", "pgfed"), "optimizer": {"lr": [[0.1, 0.2], 0.3]}, "rounds": 2}
    words = ["seed=0,1,2", "algorithm=fedavg,pgfed", "optimizer.lr=[0.1,0.2],0.3", "rounds=2"]
    assert sweep_overrides(values) == words
    assert sweep_overrides({"model": [MLP, MLP]}) == [f"model._target_={','.join(['fedbench.models.mlp.MLP'] * 2)}"]


def test_any_text_is_read_back_as_it_is() -> None:
    draw = random.Random(0)
    letters = "ab1.\\'\" ,=[]{}():-+%@/~é"
    texts = ["".join(draw.choices(letters, k=draw.randint(0, 6))) for _ in range(300)]
    texts += ["null", "NULL", "True", "inf", "-inf", "nan", "1", "-1", ".5", "1e5", "0x1", "C:\\data\\", "\\'"]
    read = Composer().parse(sweep_overrides({f"k{i}": text for i, text in enumerate(texts)}))
    assert [override.value() for override in read] == texts
    assert not any(override.is_sweep_override() for override in read)


@pytest.mark.parametrize(
    ("typed", "values", "sentence"),
    [
        (["-m"], {}, "-m is a flag of the command line"),
        (["rounds=1 --cfg job"], {}, "--cfg is a flag of the command line"),
        (["name='a"], {}, "cannot be split into overrides .No closing quotation.: close its quotes"),
        ([5], {}, "an override must be text"),
        ([], {"rounds": object()}, "rounds must be a number, text, None, a list, a dict or a class, got an object of"),
        (
            [],
            {"model": type("Net", (), {"__module__": "__main__"})},
            "model=Net: the class must be in a file",
        ),
        ([], {"model": type("<lambda>", (), {})}, "model=<lambda>: the class must be in a file"),
    ],
)
def test_what_is_no_word(typed: list[Any], values: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        split_overrides(typed)
        choices_and_values(values)
    with pytest.raises(ConfigError, match=r"seed=\[\] has no values"):
        sweep_overrides({"seed": []})
    with pytest.raises(ConfigError, match="model mixes classes and names of options"):
        sweep_overrides({"model": [MLP, "mlp"]})
