"""Run one check of fedbench.testing as a test.

A skipped check fails the test unless SKIPPED lists it with its reason.
"""

from __future__ import annotations

import re
import sys
from types import ModuleType
from typing import Any

import pytest
from conftest import ROOT

from fedbench.testing._suite import Report, Suite

# reason (a part of the message): (kind, check, classes)
SKIPPED: dict[str, list[tuple[str, str, tuple[str, ...]]]] = {
    "and this model has none": [("algorithm", "executor_batch_statistics", ("fedpia",))],
    "gives every client two adapters": [("algorithm", "executor_batch_statistics", ("feddat",))],
    "needs the parameter group 'prompt'": [
        ("algorithm", "executor_batch_statistics", ("fedotp", "pfedmoap", "pfedprompt", "zero_shot"))
    ],
    "the method trains nothing": [
        ("algorithm", "training_moves_rows", ("zero_shot",)),
        ("algorithm", "no_step_waits_for_the_device", ("zero_shot",)),
    ],
    "Sinkhorn's algorithm checks its convergence": [
        ("algorithm", "no_step_waits_for_the_device", ("fedotp",)),
    ],
    "lets clients compute with each other's samples": [("algorithm", "nothing_bypasses_upload", ("pgfed_exact",))],
    "PCS embeds the client index": [("algorithm", "renumbering_clients", ("lc_fed", "lc_fed_lcrepnet"))],
    "needs at least two clients": [("algorithm", "a_single_client", ("pgfed_exact",))],
    "a client has only 2 training samples": [("algorithm", "clients_of_two_samples", ("per_fedavg_hf",))],
    "the module computes rows itself": [
        ("model", "one_client_is_the_module", ("clip_prompt", "clip_prompt_tiny")),
    ],
    "it has no linear layer named head": [
        (
            "model",
            "features_enter_the_head",
            ("clip_prompt", "clip_prompt_tiny", "fcn", "hf_causal", "noise_predictor", "resnet18", "unet"),
        ),
    ],
    "it declares no column group that is a subset": [("model", "columns_are_respected", ("hf_causal", "logistic"))],
    "its targets are not classes": [("task", "class_mask_confines", ("denoising", "regression"))],
    "its attribute `neutral` is false": [
        (
            "adapter",
            "outputs_are_the_models_at_first",
            ("compacter", "prompt", "prompt places=['blocks.0'] tokens=2 tap=output reparam=true"),
        ),
    ],
    "it adds nothing": [("adapter", check, ("none",)) for check in ("a_row_holds_what_learns", "what_is_added_learns")],
    "its attribute `unbiased` is false": [
        (
            "compression",
            "unbiased_rows_average_to_the_input",
            (
                *("topk", "topk share=1", "topk share=0.5", "randk", "sign", "chain"),
                *("stc", "stc variant=pfednet share=0.2"),
                *("cer", "cer solver=smoothing gamma=50 gamma_rel=null block=7"),
                *("ternary clip=2.5", "lowrank", "lowrank warm_start=true"),
            ),
        ),
    ],
    "its attribute `error_feedback` is false": [
        (
            "compression",
            "error_feedback_transmits_residuals",
            (
                *("qsgd", "qsgd levels=65536", "qsgd norm=l2 levels=3 code=fixed", "dadaquant"),
                *("ternary", "ternary clip=2.5", "randk share=0.2 unbiased=true error_feedback=false"),
                *("cer", "cer solver=smoothing gamma=50 gamma_rel=null block=7"),
            ),
        ),
    ],
    "with its options, it assumes no wrong upload": [("aggregator", "wrong_uploads_do_not_move_it_far", ("mean",))],
    "its attribute `scale_free` is false": [
        ("aggregator", "it_scales_with_the_uploads", ("centered_clipping tau=2.0", "norm_bound bound=2.0")),
    ],
    "it has no options min_size and min_test": [
        (
            "partition",
            "sizes_are_kept",
            (
                *("class_disjoint", "iid", "pachinko", "pathological", "practical"),
                *("domain", "domain_dirichlet", "domain_officehome"),
                *("delta", "delta_luna16", "domain_counts", "file"),
            ),
        ),
    ],
}


def skipped() -> dict[tuple[str, str, str], str]:
    """Return the reason of every skipped (kind, check, class)."""
    return {
        (kind, check, name): reason
        for reason, entries in SKIPPED.items()
        for kind, check, names in entries
        for name in names
    }


def require_passed(suite: Suite[Any], check: str, name: str, case: Any) -> None:
    """Fail if the check fails, or is skipped without an entry in SKIPPED."""
    outcome = suite.outcome(check, case)
    assert outcome.status != "failed", outcome.message
    reason = skipped().get((suite.kind, check, name))
    if outcome.status == "skipped":
        assert reason is not None, f"{check} is skipped for {name} ({outcome.message}): add it to SKIPPED in {__file__}"
        assert reason in outcome.message
        pytest.skip(outcome.message)
    assert reason is None, f"{check} is no longer skipped for {name}: remove it from SKIPPED in {__file__}"


def assert_failed(report: Report, check: str, message: str) -> None:
    """Assert that a check failed, and that its message contains a text."""
    assert check in report.failed, report
    assert message in report.failed[check], report.failed[check]


def import_example(monkeypatch: pytest.MonkeyPatch, page: str, name: str) -> None:
    """Make a Python example of a page of docs importable as a module; its first line is a comment with its name."""
    module = ModuleType(name)
    exec(
        re.search(rf"```python\n(# {name}\.py\n.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL)[1], vars(module)
    )
    monkeypatch.setitem(sys.modules, name, module)
