"""How the house's own tests run the suites of fedbench.testing: one test for each thing and check.

A check that is skipped fails its test unless it is written down, with the reason, in SKIPPED.  So what is not checked
cannot grow unseen.
"""

from __future__ import annotations

from typing import Any

import pytest

from fedbench.testing._suite import Suite

# By the words of a reason: the (kind of thing, check, things) that are skipped for it.
SKIPPED: dict[str, list[tuple[str, str, tuple[str, ...]]]] = {
    "and this model has none": [("algorithm", "executor_batch_statistics", ("fedpia",))],
    "gives every client two adapters": [("algorithm", "executor_batch_statistics", ("feddat",))],
    "needs the column group 'prompt'": [
        ("algorithm", "executor_batch_statistics", ("fedotp", "pfedmoap", "pfedprompt", "zero_shot"))
    ],
    "the method trains nothing": [
        ("algorithm", "training_moves_rows", ("zero_shot",)),
        ("algorithm", "no_step_waits_for_the_device", ("zero_shot",)),
    ],
    "Sinkhorn's algorithm checks its convergence": [
        ("algorithm", "no_step_waits_for_the_device", ("fedotp",)),
    ],
    "lets clients compute with each other's samples": [("algorithm", "nothing_passes_by_upload", ("pgfed_exact",))],
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
            ("clip_prompt", "clip_prompt_tiny", "fcn", "noise_predictor", "resnet18", "unet"),
        ),
    ],
    "it declares no group of some of its columns": [("model", "columns_are_respected", ("logistic",))],
    "its targets are no classes": [("task", "class_mask_confines", ("denoising", "regression"))],
    "it does not say that it is neutral": [
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
            ("topk", "topk share=1", "topk share=0.5", "randk", "sign", "chain"),
        ),
        (
            "compression",
            "unbiased_rows_average_to_the_input",
            ("stc", "stc variant=pfednet share=0.2", "cer"),
        ),
        (
            "compression",
            "unbiased_rows_average_to_the_input",
            ("cer solver=smoothing gamma=50 gamma_rel=null block=7",),
        ),
        (
            "compression",
            "unbiased_rows_average_to_the_input",
            ("ternary clip=2.5", "lowrank", "lowrank warm_start=true"),
        ),
    ],
    "its attribute `error_feedback` is false": [
        (
            "compression",
            "error_feedback_transmits_residuals",
            ("qsgd", "qsgd levels=65536", "ternary", "ternary clip=2.5"),
        ),
        ("compression", "error_feedback_transmits_residuals", ("qsgd norm=l2 levels=3 code=fixed", "dadaquant", "cer")),
        (
            "compression",
            "error_feedback_transmits_residuals",
            ("cer solver=smoothing gamma=50 gamma_rel=null block=7",),
        ),
        ("compression", "error_feedback_transmits_residuals", ("randk share=0.2 unbiased=true error_feedback=false",)),
    ],
    "it has no options min_size and min_test": [
        ("partition", "sizes_are_kept", ("class_disjoint", "iid", "pachinko", "pathological", "practical")),
        ("partition", "sizes_are_kept", ("domain", "domain_dirichlet", "domain_officehome")),
        ("partition", "sizes_are_kept", ("delta", "delta_luna16", "domain_counts", "file")),
    ],
}


def skipped() -> dict[tuple[str, str, str], str]:
    """The reason of every (kind, check, thing) that is skipped."""
    return {
        (kind, check, thing): reason
        for reason, written in SKIPPED.items()
        for kind, check, things in written
        for thing in things
    }


def require_held(suite: Suite[Any], check: str, thing: str, subject: Any) -> None:
    """Fail where the check is broken, or skipped without being written down."""
    outcome = suite.outcome(check, subject)
    assert outcome.status != "broken", outcome.sentence
    reason = skipped().get((suite.kind, check, thing))
    if outcome.status == "skipped":
        assert reason is not None, f"{check} is skipped for {thing} ({outcome.sentence}): write it down in {__file__}"
        assert reason in outcome.sentence
        pytest.skip(outcome.sentence)
    assert reason is None, f"{check} is no longer skipped for {thing}: take it out of {__file__}"
