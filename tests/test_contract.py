"""What every method, model, adapter, task, partition, operator and callback keeps.  New files of conf are found.

The checks are those of fedbench.testing, which everybody's own class gets too.
"""

from __future__ import annotations

import functools
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml
from cases import METHODS, case
from contract import require_passed, skipped

from fedbench.config.conf_tree import group_options
from fedbench.testing import adapter, algorithm, callback, compression, model, partition, task

ADAPTERS = [  # every file of conf/adapter, and options that take another path
    *group_options("adapter"),
    "lora places=['*.qkv'] rank=3 alpha=12",
    "houlsby places=['*.proj','optional:norm'] train=['norm.*','head.*'] activation=gelu",
    "parallel places=['optional:embed','*.attn'] scale=2.0",
    "prompt places=['blocks.0'] tokens=2 tap=output reparam=true",
    "fusion places=['*.proj','optional:embed'] adapters=3 activation=gelu scale=2.0",
]
MODELS = group_options("model")
CALLBACKS = [  # importing MLflow takes seconds
    pytest.param(name, marks=pytest.mark.slow) if name == "mlflow" else name
    for name in group_options("callbacks")
    if name != "none"
]
PARTITIONS = group_options("partition")
TASKS = [  # every file of conf/task, and options that take another path
    *group_options("task"),
    "classification class_weights=balanced label_smoothing=0.1",
    "classification class_weights=[1.0,2.0,3.0,0.5]",
    "multilabel micro_f1=true",
    "regression loss=huber standardize=false",
    "regression loss=mae",
    "segmentation loss=dice_ce ignore=0 per_class=true",
    "segmentation loss=dice empty=one",
    "segmentation empty=zero",
]
COMPRESSIONS = [  # likewise
    *group_options("compression"),
    "topk share=1",
    "topk share=0.5",
    "randk share=0.2 unbiased=true error_feedback=false",
    "qsgd norm=l2 levels=3 code=fixed",
    "qsgd levels=65536",
    "ternary clip=2.5",
    "lowrank warm_start=true",
    "stc variant=pfednet share=0.2",
    "cer solver=smoothing gamma=50 gamma_rel=null block=7",
]
TINY = {  # options with which models are small and load nothing
    "mlp": {"hidden": [8]},
    "resnet": {"widths": [4]},
    "unet": {"width": 2},
    "dnet": {"growth": 2, "layers": 2},
    "noise_predictor": {"width": 8},
    "albef_tiny": {"width": 8, "heads": 2},
    "albef_b16": {"patch": 8, "width": 8, "depth": 2, "fusion_layer": 1, "heads": 2, "vocab": 32},
    "lstm": {"hidden": 8},
    "gru": {"hidden": 8},
    "vilt_tiny": {"width": 8, "heads": 2},
    "vilt_b32": {"patch": 8, "width": 8, "depth": 1, "heads": 2, "vocab": 32},
    "clip_prompt": {"backbone": "tiny-clip", "pretrained": None, "context": 4},
    "clip_prompt_tiny": {"pretrained": None, "context": 4},
}
FITTING = {  # options that suit 1,800 samples of 10 classes; the files ask for more
    "dirichlet_pgfed": {"num_clients": 15},
    "practical": {"num_clients": 4},
    "delta_luna16": {
        "_target_": "fedbench.partition.delta.Delta",  # whose counts may be others
        "counts": [[26, 13], [26, 13], [20, 20], [13, 26], [13, 26]],
    },
    "dirichlet_prompt": {"num_clients": 10, "min_test": 1},
    "domain_officehome": {"min_size": 30},
    "file": {"path": str(Path(__file__).parent / "partition" / "owners.npy")},
    "pachinko": {"num_clients": 10, "coarse": [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]},
}
LARGE = [  # 11 million numbers and more; networks by name have tests of their own
    pytest.param(m, marks=pytest.mark.slow) if m in ("resnet18", "hf", "timm", "torchvision") else m for m in MODELS
]


@functools.cache
def model_case(name: str) -> Any:
    return model.case_for(name, TINY.get(name))


# The costly checks are made of every third method by default, of all where slow tests are asked for.
COSTLY = (
    *("executor_batch_statistics", "executor_loop", "no_closure_over_the_cohort"),
    *("nothing_passes_by_upload", "bytes_are_counted"),
)
METHOD_CHECKS = [
    pytest.param(check, name, marks=pytest.mark.slow if check in COSTLY and i % 3 else ())
    for check in algorithm.SUITE.checks
    for i, name in enumerate(METHODS)
]


@pytest.mark.parametrize("check, name", METHOD_CHECKS)
def test_a_method_keeps(check: str, name: str) -> None:
    assert case(name).reason is None, "no model of conf/model suits it"
    require_passed(algorithm.SUITE, check, name, case(name))


@pytest.mark.parametrize("name", LARGE)
@pytest.mark.parametrize("check", model.SUITE.checks)
def test_a_model_keeps(check: str, name: str) -> None:
    require_passed(model.SUITE, check, name, model_case(name))


@pytest.mark.parametrize("words", TASKS)
@pytest.mark.parametrize("check", task.SUITE.checks)
def test_a_task_keeps(check: str, words: str) -> None:
    require_passed(task.SUITE, check, words.split()[0], task.case_for(*parsed(words)))


def parsed(words: str) -> tuple[str, dict[str, Any]]:
    """The name of an option, and what it is given."""
    name, *options = words.split()
    return name, {key: yaml.safe_load(value) for key, value in (option.split("=") for option in options)}


@pytest.mark.parametrize("words", COMPRESSIONS)
@pytest.mark.parametrize("check", compression.SUITE.checks)
def test_an_operator_keeps(check: str, words: str) -> None:
    require_passed(compression.SUITE, check, words, compression.case_for(*parsed(words)))


@functools.cache
def callback_case(name: str) -> Any:
    return callback.case_for(name)


@pytest.mark.parametrize("check", callback.SUITE.checks)
@pytest.mark.parametrize("name", CALLBACKS)
def test_a_callback_keeps(check: str, name: str) -> None:
    require_passed(callback.SUITE, check, name, callback_case(name))


@pytest.mark.parametrize("words", ADAPTERS)
@pytest.mark.parametrize("check", adapter.SUITE.checks)
def test_an_adapter_keeps(check: str, words: str) -> None:
    require_passed(adapter.SUITE, check, words, adapter.case_for(*parsed(words)))


@pytest.mark.parametrize("name", PARTITIONS)
@pytest.mark.parametrize("check", partition.SUITE.checks)
def test_a_partition_keeps(check: str, name: str) -> None:
    require_passed(partition.SUITE, check, name, partition.case_for(name, FITTING.get(name)))


def test_what_is_skipped_is_counted() -> None:
    """Each for a reason that stands in contract.py; of so many checks of all things."""
    things = {"algorithm": METHODS, "model": MODELS, "task": TASKS, "partition": PARTITIONS}
    things |= {"compression": COMPRESSIONS, "adapter": ADAPTERS}
    suites = (algorithm.SUITE, model.SUITE, adapter.SUITE, task.SUITE, partition.SUITE, compression.SUITE)
    checks = {suite.kind: suite.checks for suite in suites}
    counts = {"algorithm": 14, "model": 9, "task": 2, "partition": 12, "compression": 22, "adapter": 5}
    assert all(check in checks[kind] and thing in things[kind] for kind, check, thing in skipped())
    assert Counter(kind for kind, _, _ in skipped()) == counts
    assert sum(len(checks[kind]) * len(things[kind]) for kind in checks) > 1000
