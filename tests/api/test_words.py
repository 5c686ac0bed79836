"""Python values are the words that the command line would be given, and Hydra reads them back as these values."""

import random
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest

from fedbench.api.words import words_of
from fedbench.app.compose import Composer
from fedbench.core.options import ConfigError
from fedbench.models.mlp import MLP


@pytest.mark.parametrize(
    ("typed", "values", "words"),
    [
        (["algorithm=pgfed", "seed=0"], {}, "algorithm=pgfed|seed=0"),
        (["algorithm=pgfed seed=0  name='a b'"], {}, "algorithm=pgfed|seed=0|name=a b"),
        ([], {"rounds": 5, "name": None, "optimizer.lr": 1e-5}, "rounds=5|name=null|optimizer.lr=1e-05"),
        ([], {"local": {"epochs": 2, "drop_last": True}}, "local.epochs=2|local.drop_last=true"),
        ([], {"model": OrderedDict(columns={"head": ["fc.*"]})}, "model.columns.head=['fc.*']"),
        ([], {"model": {"columns": {}}}, "model.columns={}"),
        ([], {"algorithm": "pgfed", "algorithm.mu": 0.1}, "algorithm=pgfed|algorithm.mu=0.1"),
        ([], {"experiment": "debug"}, "+experiment=debug"),
        ([], {"model": MLP}, "model._target_=fedbench.models.mlp.MLP"),
        ([], {"task._target_": "my.Task"}, "task._target_=my.Task"),
        ([], {"optimizer": {"lr": [0.1, 0.2]}}, "optimizer.lr=[0.1,0.2]"),
        ([], {"rounds": np.int64(5), "a": np.float64(0.1), "b": np.arange(2)}, "rounds=5|a=0.1|b=[0,1]"),
        ([], {"name": "5", "a": "true", "b": "a,b", "c": ""}, "name='5'|a='true'|b='a,b'|c=''"),
    ],
)
def test_words(typed: list[str], values: dict[str, Any], words: str) -> None:
    assert words_of(typed, values) == words.split("|")


def test_a_list_is_swept_over_in_a_sweep() -> None:
    values = {"seed": range(3), "algorithm": ("fedavg", "pgfed"), "optimizer": {"lr": [[0.1, 0.2], 0.3]}, "rounds": 2}
    words = ["seed=0,1,2", "algorithm=fedavg,pgfed", "optimizer.lr=[0.1,0.2],0.3", "rounds=2"]
    assert words_of([], values, swept=True) == words
    assert words_of([], {"model": [MLP, MLP]}, swept=True) == [
        f"model._target_={','.join(['fedbench.models.mlp.MLP'] * 2)}"
    ]


def test_any_text_is_read_back_as_it_is() -> None:
    draw = random.Random(0)
    letters = "ab1.\\'\" ,=[]{}():-+%@/~é"
    texts = ["".join(draw.choices(letters, k=draw.randint(0, 6))) for _ in range(300)]
    texts += ["null", "NULL", "True", "inf", "-inf", "nan", "1", "-1", ".5", "1e5", "0x1", "C:\\data\\", "\\'"]
    read = Composer().parse(words_of([], {f"k{i}": text for i, text in enumerate(texts)}))
    assert [override.value() for override in read] == texts
    assert not any(override.is_sweep_override() for override in read)


@pytest.mark.parametrize(
    ("typed", "values", "sentence"),
    [
        (["-m"], {}, "-m is a flag of the command line"),
        (["rounds=1 --cfg job"], {}, "--cfg is a flag of the command line"),
        (["name='a"], {}, "cannot read"),
        ([5], {}, "an override is text"),
        ([], {"rounds": object()}, "rounds must be a number, text, None, a list, a dict or a class, got an object of"),
        ([], {"model": type("Net", (), {"__module__": "__main__"})}, "model=Net: its options, .* write the class into"),
        ([], {"model": type("<lambda>", (), {})}, "model=<lambda>: its options"),
    ],
)
def test_what_is_no_word(typed: list[Any], values: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        words_of(typed, values)
    with pytest.raises(ConfigError, match=r"seed=\[\] is no value at all"):
        words_of([], {"seed": []}, swept=True)
    with pytest.raises(ConfigError, match="model lists classes beside names of options"):
        words_of([], {"model": [MLP, "mlp"]}, swept=True)
