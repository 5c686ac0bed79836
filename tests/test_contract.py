"""All checks of fedbench.testing over all options of conf.  New files of conf are found automatically."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from cases import METHODS, case
from contract import require_passed, skipped

from fedbench.config.conf_tree import group_options
from fedbench.testing import adapter, aggregator, algorithm, callback, compression, model, partition, task
from fedbench.testing._suite import Suite

ADAPTERS = [  # with options that run other code
    *group_options("adapter"),
    "lora places=['*.qkv'] rank=3 alpha=12",
    "lora sync=ffa",
    "houlsby places=['*.proj','optional:norm'] train=['norm.*','head.*'] activation=gelu",
    "parallel places=['optional:embed','*.attn'] scale=2.0",
    "prompt places=['blocks.0'] tokens=2 tap=output reparam=true",
    "fusion places=['*.proj','optional:embed'] adapters=3 activation=gelu scale=2.0",
]
TASKS = [
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
COMPRESSIONS = [
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
AGGREGATORS = [
    *group_options("aggregator"),
    *(f"{name} pre={pre}" for name in group_options("aggregator") if name != "mean" for pre in ("nnm", "bucketing")),
    "trimmed_mean f=5",
    "multi_krum f=4 m=2",
    "krum f=5 neighbors=n-f-1",
    "centered_clipping tau=2.0",
    "norm_bound bound=2.0",
]
TINY = {  # options that make models small, without stored weights
    "mlp": {"hidden": [8]},
    "resnet": {"widths": [4]},
    "unet": {"width": 2},
    "dnet": {"growth": 2, "layers": 2},
    "noise_predictor": {"width": 8},
    "albef_tiny": {"width": 8, "heads": 2},
    "albef_b16": {"patch": 8, "width": 8, "depth": 2, "fusion_layer": 1, "heads": 2, "vocab": 32},
    "hf_causal": {
        "name": "llama",
        "options": {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2},
    },
    "hf_text": {
        "name": "bert",
        "options": {"vocab_size": 32, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2},
    },
    "lstm": {"hidden": 8},
    "gru": {"hidden": 8},
    "vilt_tiny": {"width": 8, "heads": 2},
    "vilt_b32": {"patch": 8, "width": 8, "depth": 1, "heads": 2, "vocab": 32},
    "clip_prompt": {"backbone": "tiny-clip", "pretrained": None, "context": 4},
    "clip_prompt_tiny": {"pretrained": None, "context": 4},
}
FITTING = {  # options for the 1,800 samples of 10 classes of the checks
    "dirichlet_pgfed": {"num_clients": 15},
    "practical": {"num_clients": 4},
    "delta_luna16": {
        "_target_": "fedbench.partition.delta.Delta",  # the subclass requires other counts
        "counts": [[26, 13], [26, 13], [20, 20], [13, 26], [13, 26]],
    },
    "dirichlet_prompt": {"num_clients": 10, "min_test": 1},
    "domain_officehome": {"min_size": 30},
    "file": {"path": str(Path(__file__).parent / "partition" / "owners.npy")},
    "pachinko": {"num_clients": 10, "coarse": [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]},
}

SLOW_CHECKS = (  # each runs for a third of the methods by default
    *("executor_batch_statistics", "executor_loop", "no_closure_over_the_cohort"),
    *("nothing_bypasses_upload", "bytes_are_counted"),
)
SLOW_NAMES = (
    "resnet18",
    "hf",
    "hf_causal",
    "hf_text",
    "timm",
    "torchvision",
    "mlflow",
)  # large models, and an import of seconds


def parsed(text: str) -> tuple[str, dict[str, Any]]:
    """Split "name key=value ..." into the name of an option and its arguments."""
    name, *options = text.split()
    return name, {key: yaml.safe_load(value) for key, value in (option.split("=") for option in options)}


class Kind(NamedTuple):
    """The checks of a kind, the options of conf, and the function that returns the case of an option."""

    suite: Suite[Any]
    names: list[str]
    case: Callable[[str], Any]


KINDS = {
    "algorithm": Kind(algorithm.SUITE, METHODS, case),
    "model": Kind(model.SUITE, group_options("model"), lambda name: model.case_for(name, TINY.get(name))),
    "task": Kind(task.SUITE, TASKS, lambda text: task.case_for(*parsed(text))),
    "compression": Kind(compression.SUITE, COMPRESSIONS, lambda text: compression.case_for(*parsed(text))),
    "aggregator": Kind(aggregator.SUITE, AGGREGATORS, lambda text: aggregator.case_for(*parsed(text))),
    "callback": Kind(
        callback.SUITE, [name for name in group_options("callbacks") if name != "none"], callback.case_for
    ),
    "adapter": Kind(adapter.SUITE, ADAPTERS, lambda text: adapter.case_for(*parsed(text))),
    "partition": Kind(
        partition.SUITE, group_options("partition"), lambda name: partition.case_for(name, FITTING.get(name))
    ),
}


def all_checks() -> Iterator[Any]:
    """Yield kind, check and option of every test."""
    for kind, (suite, names, _) in KINDS.items():
        for i, name in enumerate(names):
            for j, check in enumerate(suite.checks):
                # of a method, every second check by default; which ones alternates between methods
                is_slow = name in SLOW_NAMES or (
                    kind == "algorithm" and (i + j) % (3 if check in SLOW_CHECKS else 2) != 0
                )
                yield pytest.param(kind, check, name, marks=pytest.mark.slow if is_slow else ())


@functools.cache
def cached_case(kind: str, name: str) -> Any:
    return KINDS[kind].case(name)


@pytest.mark.parametrize("kind, check, name", list(all_checks()))
def test_an_option_passes(kind: str, check: str, name: str) -> None:
    if kind == "algorithm":
        assert case(name).reason is None, f"no model of conf/model suits {name}"
    key = name.split()[0] if kind == "task" else name
    require_passed(KINDS[kind].suite, check, key, cached_case(kind, name))


def test_skipped_checks_exist() -> None:
    for kind, check, name in skipped():
        assert check in KINDS[kind].suite.checks and name in KINDS[kind].names
