"""Classes of a user's, outside the package: right ones hold, and what is wrong with the others is named."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from conftest import ROOT

from fedbench import commands
from fedbench.core.options import ConfigError
from fedbench.testing import Report, check_algorithm, check_model, check_partition, check_task, model, partition, task

RIGHT = '''
import numpy as np
import torch
from torch import nn

from fedbench.algorithms.base import Algorithm
from fedbench.core.options import NonNegative, Positive
from fedbench.core.split import Ragged
from fedbench.tasks.base import Task, mean_loss
from fedbench.tasks.classification import Classification


class FedNova(Algorithm):
    """Wang et al., NeurIPS 2020: differences divided by each client's number of local steps."""

    def __init__(self, server_lr: Positive = 1.0):
        self.server_lr = server_lr

    def setup(self, federation, model, rows):
        self.w = model.init_row()                                     # [P]
        self.momentum = torch.zeros_like(self.w)                      # [P]
        self.steps = rows("steps", default=torch.zeros(()))           # lazy [N], how many in all

    def round(self, cohort):
        w = cohort.broadcast(w=self.w).w
        out = cohort.train(w)
        d = (out.theta - w) / out.steps[:, None]                      # [K, P]
        up = cohort.upload(d=d, relative_to={"d": None})
        tau = cohort.upload(tau=out.steps, relative_to={"tau": None}).tau    # [K]
        self.momentum = 0.5 * self.momentum + cohort.mean(tau) * cohort.mean(up.d)
        self.w = self.w + self.server_lr * self.momentum
        self.steps[cohort.ids] = self.steps[cohort.ids] + out.steps

    def personalized(self, cohort, final):
        return self.w

    def global_row(self):
        return self.w


class Focal(Classification):
    """Lin et al., ICCV 2017: (1 - p)^gamma times the cross-entropy."""

    def __init__(self, gamma: NonNegative = 2.0):
        super().__init__()
        self.gamma = gamma

    def loss(self, logits, y, class_mask=None):
        each = super().loss(logits, y, class_mask)                    # [..., B]
        return (1 - (-each).exp()) ** self.gamma * each

    loss_and_gradient = Task.loss_and_gradient                        # by autograd


class Quantiles(Task):
    """The pinball loss of three quantiles; coverage: how often the target is between the outer ones."""

    kind = "regression"
    primary = "loss"
    higher_is_better = {"loss": False, "coverage": True}
    fractions = frozenset(("coverage",))

    def __init__(self, quantiles=(0.1, 0.5, 0.9)):
        self.quantiles = list(quantiles)

    def outputs(self, num_classes):
        return len(self.quantiles)

    def loss(self, logits, y, class_mask=None):
        below = y.view(*logits.shape[:-1], 1) - logits                # [..., B, R]
        q = torch.tensor(self.quantiles, device=logits.device)
        return torch.maximum(q * below, (q - 1) * below).mean(-1)

    def sample_statistics(self, logits, y, class_mask=None):
        target = y.view(logits.shape[:-1])
        inside = (logits.amin(-1) <= target) & (target <= logits.amax(-1))
        return {"loss": self.loss(logits, y), "inside": inside.float()}

    def scores(self, statistics, offsets, class_mask=None):
        return {"loss": mean_loss(statistics["loss"], offsets), "coverage": mean_loss(statistics["inside"], offsets)}


class Blocks:
    """Clients in blocks of neighbours, after a shuffle."""

    def assign(self, labels, pools, num_clients, rng, domain=None):
        dealt = []
        for pool in pools:
            shuffled = rng.permutation(pool)
            dealt.append(Ragged.from_lists(np.array_split(shuffled, num_clients)))
        return dealt


class Net(nn.Module):
    def __init__(self, input_shape, num_classes, width=6):
        super().__init__()
        size = int(np.prod(input_shape))
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(size, width), nn.GELU(), nn.LayerNorm(width), nn.Dropout(0.1))
        self.head = nn.Linear(width, num_classes)

    def forward(self, x):
        return self.head(self.body(x))
'''

BROKEN = '''
import numpy as np
import torch
from torch import nn

from fedbench.algorithms.fedavg import FedAvg
from fedbench.tasks.base import mean_loss
from fedbench.tasks.classification import Classification
from fedbench.tasks.regression import Regression


class Closure(FedAvg):
    """Reads a tensor with a row for each client past cohort.train."""

    def round(self, cohort):
        w = cohort.broadcast(w=self.w).w
        strength = 0.01 * (1 + cohort.index[:, None])                 # [K, 1]
        out = cohort.train(w, extra_grad=lambda s: strength[: s.k] * (s.theta - w))
        self.w = cohort.mean(cohort.upload(theta=out.theta, relative_to={"theta": "w"}).theta)


class Misfit(FedAvg):
    """Reads one whose rows do not even fit those of a step."""

    def round(self, cohort):
        w = cohort.broadcast(w=self.w).w
        anchor = w.expand(len(cohort), -1)                            # [K, P]
        out = cohort.train(w, extra_grad=lambda s: s.theta - anchor)
        self.w = cohort.mean(cohort.upload(theta=out.theta, relative_to={"theta": "w"}).theta)


class Unsaved(FedAvg):
    """Keeps the server's momentum in a list, which no checkpoint holds."""

    def setup(self, federation, model, rows):
        super().setup(federation, model, rows)
        self.history = []

    def round(self, cohort):
        before = self.w
        super().round(cohort)
        self.history.append(self.w - before)
        self.w = self.w + 0.1 * sum(self.history)


class Outside(FedAvg):
    """Trains the head, and pulls the whole row."""

    requires = ("head",)

    def round(self, cohort):
        w = cohort.broadcast(w=self.w).w

        def step(s, batch):
            s.descend(s.grad(batch))
            s.theta.sub_(0.1 * s.lr * s.theta)

        out = cohort.train(w, step=step, columns=cohort.model.columns["head"])
        self.w = cohort.mean(cohort.upload(theta=out.theta, relative_to={"theta": "w"}).theta)


class Unweighted(FedAvg):
    """The loss of a batch is the mean over all of its slots."""

    def round(self, cohort):
        w = cohort.broadcast(w=self.w).w
        out = cohort.train(w, loss=lambda s, rows, batch: s.task_loss(s.forward(rows, batch), batch).mean(1))
        self.w = cohort.mean(cohort.upload(theta=out.theta, relative_to={"theta": "w"}).theta)


class Copied(FedAvg):
    """Measures its uploads from a copy of what clients were sent."""

    def round(self, cohort):
        w = cohort.broadcast(w=self.w).w.clone()
        self.w = cohort.mean(cohort.upload(theta=cohort.train(w).theta, relative_to={"theta": w}).theta)


class Drawing(FedAvg):
    """Noise from the global generator."""

    def round(self, cohort):
        super().round(cohort)
        self.w = self.w + 1e-3 * torch.randn_like(self.w)


class WithoutWeight(Classification):
    """A gradient by hand that forgets the weight."""

    def loss_and_gradient(self, logits, y, weight, class_mask):
        real = torch.ones_like(weight) / weight.shape[1]
        return super().loss_and_gradient(logits, y, real, class_mask)


class Normalized(Classification):
    """Divides by the largest loss of the batch."""

    def loss(self, logits, y, class_mask=None):
        each = super().loss(logits, y, class_mask)
        return each / each.detach().amax(-1, keepdim=True)


class Averaged(Classification):
    def loss(self, logits, y, class_mask=None):
        return super().loss(logits, y, class_mask).mean(-1)


class HalfDone(Classification):
    """Another loss, and the gradient of the old one."""

    def loss(self, logits, y, class_mask=None):
        return super().loss(logits, y, class_mask) ** 2

    def loss_and_gradient(self, logits, y, weight, class_mask):
        return self.loss(logits, y, class_mask), Classification().loss_and_gradient(logits, y, weight, class_mask)[1]


class Unmasked(Classification):
    def loss(self, logits, y, class_mask=None):
        return super().loss(logits, y)


class Undeclared(Classification):
    def scores(self, statistics, offsets, class_mask=None):
        return super().scores(statistics, offsets, class_mask) | {"confidence": np.zeros(len(offsets) - 1)}


class Pooled(Classification):
    """Accuracy relative to that of all clients."""

    def scores(self, statistics, offsets, class_mask=None):
        scores = super().scores(statistics, offsets, class_mask)
        return scores | {"accuracy": scores["accuracy"] / max(np.nanmax(scores["accuracy"]), 1e-9)}


class PerBatch(Classification):
    """Statistics of a sample that depend on its batch."""

    def sample_statistics(self, logits, y, class_mask=None):
        statistics = super().sample_statistics(logits, y, class_mask)
        return statistics | {"logits": statistics["logits"] - statistics["logits"].mean(1, keepdim=True)}


class Zero(Classification):
    def scores(self, statistics, offsets, class_mask=None):
        return {name: np.nan_to_num(v) for name, v in super().scores(statistics, offsets, class_mask).items()}


class OtherLoss(Classification):
    def scores(self, statistics, offsets, class_mask=None):
        scores = super().scores(statistics, offsets, class_mask)
        return scores | {"loss": 2 * scores["loss"]}


class Upside(Regression):
    """Calls a large error a good one."""

    higher_is_better = {"loss": False, "distance": True}

    def __init__(self):
        super().__init__(primary="distance")

    def scores(self, statistics, offsets, class_mask=None):
        scores = super().scores(statistics, offsets, class_mask)
        return {"loss": scores["loss"], "distance": scores["rmse"]}


class Ascending(Classification):
    """A sign that is wrong, in the loss's graph alone."""

    def loss(self, logits, y, class_mask=None):
        return super().loss(2 * logits.detach() - logits, y, class_mask)


class Restless(Classification):
    """A number of its own for each task."""

    def setup(self, federation):
        self.weights = torch.rand(federation.num_classes)


class Peeking(Classification):
    def setup(self, federation):
        self.weights = 1 + torch.bincount(federation.targets, minlength=federation.num_classes)


class Noisy(Classification):
    def loss(self, logits, y, class_mask=None):
        return super().loss(logits + 0.1 * torch.randn_like(logits), y, class_mask)


class Wordy(Classification):
    def labels(self, targets, num_classes):
        return targets.astype(np.float32)


class First(Classification):
    """The loss of the first client goes to everybody."""

    def loss(self, logits, y, class_mask=None):
        each = super().loss(logits, y, class_mask)
        return each * torch.arange(1, len(each) + 1).view(-1, *[1] * (each.dim() - 1)) if each.dim() > 1 else each

    loss_and_gradient = Classification.__mro__[1].loss_and_gradient


class Shuffled:
    """Shuffles the pools that it is given, by NumPy's global generator."""

    def assign(self, labels, pools, num_clients, rng, domain=None):
        for pool in pools:
            np.random.shuffle(pool)
        return [np.array_split(pool, num_clients) for pool in pools]


class Forgetting:
    """Deals half of the samples, and one of them twice."""

    def assign(self, labels, pools, num_clients, rng, domain=None):
        dealt = [np.array_split(pool[: len(pool) // 2], num_clients) for pool in pools]
        if hasattr(self, "twice"):
            dealt[0][1] = np.append(dealt[0][1], dealt[0][0][0])
        return dealt


class Twice(Forgetting):
    twice = True


class Crossed:
    """Gives training samples out as test samples."""

    def assign(self, labels, pools, num_clients, rng, domain=None):
        return [np.array_split(pool, num_clients) for pool in pools[::-1]]


class Uneven:
    """Keeps no promise about sizes."""

    min_size = 50

    def assign(self, labels, pools, num_clients, rng, domain=None):
        return [np.split(pool, [20, *range(40, 20 * num_clients, 20)]) for pool in pools]


class Fragile:
    """Cannot divide among one."""

    def assign(self, labels, pools, num_clients, rng, domain=None):
        share = len(pools[0]) // (num_clients - 1)
        return [np.array_split(pool, num_clients) for pool in pools]


class Greedy:
    """The first client has everything."""

    def assign(self, labels, pools, num_clients, rng, domain=None):
        return [[pool, *[pool[:0]] * (num_clients - 1)] for pool in pools]


class Base(nn.Module):
    def __init__(self, input_shape, num_classes):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(int(np.prod(input_shape)), 6))
        self.head = nn.Linear(6, num_classes)

    def forward(self, x):
        return self.head(self.body(x))


class Centered(Base):
    def forward(self, x):
        return self.head(self.body(x - x.mean(0, keepdim=True)))


class NumpyNoise(Base):
    def forward(self, x):
        return self.head(self.body(x) + 0.1 * float(np.random.rand()))


class InPlace(Base):
    def forward(self, x):
        x.mul_(2)
        return self.head(self.body(x))


class After(Base):
    def forward(self, x):
        return 2 * self.head(self.body(x))


class Unkeyed(Base):
    def __init__(self, input_shape, num_classes):
        super().__init__(input_shape, num_classes)
        self.head.weight.data.mul_(float(np.random.rand()))


class Unused(Base):
    def __init__(self, input_shape, num_classes):
        super().__init__(input_shape, num_classes)
        self.idle = nn.Linear(2, 2)


class ForMany(Base):
    """Computes many clients itself, with the heads that `heads` returns."""

    def run(self, params, inputs, many, context, until=None):
        x = inputs[0].flatten(2 if many else 1)
        weight, bias = params["body.1.weight"], params["body.1.bias"]
        head, shift = params["head.weight"], params["head.bias"]
        if not many:
            return (x @ weight.T + bias) @ head.T + shift
        hidden = x @ weight.transpose(1, 2) + bias[:, None]
        heads, shifts = self.heads(head, shift)
        return hidden @ heads.transpose(1, 2) + shifts[:, None]


class FirstForAll(ForMany):
    """All clients have the first one's head."""

    def heads(self, head, shift):
        return head[:1], shift[:1]


class GradientIsNaN(ForMany):
    """Right logits, and no number as their gradient."""

    def heads(self, head, shift):
        return head, shift + (0 * shift).sqrt()


class Plain(Base):
    """A number that learns nothing and is no parameter, but moves in training."""

    def __init__(self, input_shape, num_classes):
        super().__init__(input_shape, num_classes)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.head(self.body(x)) / (1 + 0.1 * self.calls)
'''


@pytest.fixture(scope="module", autouse=True)
def theirs(tmp_path_factory: pytest.TempPathFactory):
    """Two modules of a user's on sys.path."""
    folder = tmp_path_factory.mktemp("theirs")
    (folder / "right_things.py").write_text(RIGHT)
    (folder / "broken_things.py").write_text(BROKEN)
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))
    for name in ("right_things", "broken_things"):
        sys.modules.pop(name, None)


def sentence(report: Report, check: str, *words: str) -> None:
    """The check is broken, and its sentence has these words."""
    assert check in report.broken, f"{check} is not among {report.broken}"
    for word in words:
        assert word in report.broken[check], report.broken[check]


# -- right ones ------------------------------------------------------------------------------------------
def test_a_method_like_fednova_holds() -> None:
    report = check_algorithm("right_things.FedNova", {"server_lr": 0.7})
    report.raise_if_broken()
    assert report.ok and report.skipped == {} and len(report.held) > 20


def test_a_partition_holds() -> None:
    report = check_partition("right_things.Blocks", num_clients=7)
    report.raise_if_broken()
    assert list(report.skipped) == ["sizes_are_kept"]


@pytest.mark.parametrize("options", [{}, {"gamma": 0.5}])
def test_a_focal_loss_holds(options: dict) -> None:
    report = check_task("right_things.Focal", options)
    report.raise_if_broken()
    assert report.skipped == {} and "on classification targets" in report.setting


def test_a_quantile_loss_holds() -> None:
    report = check_task("right_things.Quantiles", {"quantiles": [0.25, 0.5, 0.75]})
    report.raise_if_broken()
    assert list(report.skipped) == ["class_mask_confines"] and "on regression targets" in report.setting


def test_a_module_holds() -> None:
    report = check_model("right_things.Net", {"width": 5}, columns={"base": ["body.*"], "head": ["head.*"]})
    report.raise_if_broken()
    assert report.skipped == {} and "traced graph" in report.setting


# -- broken ones -----------------------------------------------------------------------------------------
def test_a_closure_over_the_cohort_is_named() -> None:
    report = check_algorithm("broken_things.Closure", only=["no_closure_over_the_cohort", "executor_loop", "resume"])
    sentence(report, "no_closure_over_the_cohort", "reads strength,", "cohort.train(strength=strength)", "s.strength")
    assert report.held == ["resume"]


def test_a_closure_whose_rows_do_not_fit_is_named() -> None:
    report = check_algorithm("broken_things.Misfit", only=["no_closure_over_the_cohort"])
    sentence(report, "no_closure_over_the_cohort", "reads anchor,", "cohort.train(anchor=anchor)", "s.anchor")


def test_state_that_is_not_saved_is_named() -> None:
    report = check_algorithm("broken_things.Unsaved")
    assert list(report.broken) == ["resume"]
    sentence(report, "resume", "self.history changed and came back otherwise", "tensors on self")


def test_a_gradient_outside_of_its_columns_is_named() -> None:
    report = check_algorithm("broken_things.Outside")
    assert list(report.broken) == ["only_trained_columns_move"]
    sentence(report, "only_trained_columns_move", "27 of 163 columns", "body.1.weight, body.1.bias", "s.descend")


def test_a_loss_that_ignores_the_weight_of_padding_is_named() -> None:
    report = check_algorithm("broken_things.Unweighted", only=["padding_is_ignored", "resume", "a_seed_repeats"])
    sentence(report, "padding_is_ignored", "batch.weight", "per sample")
    assert list(report.broken) == ["padding_is_ignored"]


def test_a_draw_from_the_global_generator_is_named() -> None:
    report = check_algorithm("broken_things.Copied", only=["references_are_what_was_sent"])
    sentence(report, "references_are_what_was_sent", "upload(theta=..., relative_to=...): a Tensor is not", "('w')")
    report = check_algorithm("broken_things.Drawing", only=["no_global_generator", "a_seed_repeats", "executor_loop"])
    sentence(report, "no_global_generator", "global generator of torch", "cohort.random")
    assert {"no_global_generator", "a_seed_repeats"} <= set(report.broken)


SLIPS_OF_TASKS = [
    ("WithoutWeight", "padding_is_ignored", "multiply each sample's gradient by its weight"),
    ("Normalized", "samples_are_independent", "the other samples of its batch"),
    ("Averaged", "loss_is_per_sample", "return one of each"),
    ("HalfDone", "gradient_is_autograds", "the gradient of `loss_and_gradient`"),
    ("Unmasked", "class_mask_confines", "class_mask excludes"),
    ("Undeclared", "scores_are_declared", "differ in confidence"),
    ("Pooled", "clients_are_scored_alone", "for client"),
    ("PerBatch", "scores_are_streamed", "statistics are of each"),
    ("Zero", "nobody_without_samples_is_scored", "not NaN"),
    ("OtherLoss", "the_loss_is_a_score", "the mean of `loss`"),
    ("Upside", "descent_improves_the_primary_score", "distance gets worse: it is declared as better high"),
    ("Ascending", "descent_improves_the_primary_score", "does not lower the loss"),
    ("Restless", "it_has_a_key", "other keys"),
    ("Peeking", "only_training_data_are_seen", "measures test samples"),
    ("Noisy", "nothing_is_drawn", "draws at random"),
    ("Wordy", "targets_have_labels", "float32"),
    ("First", "training_agrees", "mixes clients"),
]


@pytest.mark.parametrize("name, check, words", SLIPS_OF_TASKS)
def test_what_is_wrong_with_a_task_is_named(name: str, check: str, words: str) -> None:
    sentence(check_task(f"broken_things.{name}", only=[check]), check, words)


def test_every_check_of_tasks_finds_a_slip() -> None:
    assert {check for _, check, _ in SLIPS_OF_TASKS} == set(task.SUITE.checks)


SLIPS_OF_PARTITIONS = [
    ("Shuffled", "no_global_generator", "numpy"),
    ("Shuffled", "inputs_are_unchanged", "in place"),
    ("Shuffled", "a_seed_repeats", "another partition"),
    ("Forgetting", "every_sample_once", "given to nobody"),
    ("Twice", "every_sample_once", "given away twice"),
    ("Crossed", "every_sample_once", "not in the pool"),
    ("Crossed", "published_parts_stay_apart", "the i-th division"),
    ("Uneven", "sizes_are_kept", "min_size=50"),
    ("Greedy", "nobody_is_empty", "fewer than 2 samples"),
    ("Fragile", "hard_requests_are_met_or_refused", "1 client(s) of 1,800 samples: ZeroDivisionError"),
]


@pytest.mark.parametrize("name, check, words", SLIPS_OF_PARTITIONS)
def test_what_is_wrong_with_a_partition_is_named(name: str, check: str, words: str) -> None:
    sentence(check_partition(f"broken_things.{name}", only=[check]), check, words)


def test_every_check_of_partitions_finds_a_slip() -> None:
    """But for subjects, which are kept whole where clients' samples are cut, behind any partition's back."""
    assert {check for _, check, _ in SLIPS_OF_PARTITIONS} == set(partition.SUITE.checks) - {"subjects_stay_whole"}


SLIPS_OF_MODELS = [
    ("Centered", "samples_are_independent", "padding would show"),
    ("NumpyNoise", "draws_are_keyed", "NumPy"),
    ("InPlace", "inputs_are_unchanged", "in place"),
    ("After", "features_enter_the_head", "after the layer head"),
    ("Unkeyed", "initialization_is_keyed", "by torch"),
    ("Unused", "columns_are_respected", "'idle' moves none"),
    ("Plain", "one_client_is_the_module", "away from the module's"),
    ("FirstForAll", "many_clients_are_each_one", "in evaluation"),
    ("FirstForAll", "gradients_agree", "3 clients at once"),
    ("GradientIsNaN", "gradients_agree", "the gradient is inf away"),
    ("FirstForAll", "training_agrees", "by the plan vmap"),
]


@pytest.mark.parametrize("name, check, words", SLIPS_OF_MODELS)
def test_what_is_wrong_with_a_model_is_named(name: str, check: str, words: str) -> None:
    columns = {"idle": ["idle.*"]} if name == "Unused" else None
    sentence(check_model(f"broken_things.{name}", columns=columns, only=[check]), check, words)


def test_every_check_of_models_finds_a_slip() -> None:
    assert {check for _, check, _ in SLIPS_OF_MODELS} == set(model.SUITE.checks)


# -- reports and the command -----------------------------------------------------------------------------
def test_a_class_is_a_target_as_its_path_is() -> None:
    import right_things  # type: ignore[import-not-found]

    report = check_partition(right_things.Blocks, only=["every_sample_once"])
    assert report.target == "right_things.Blocks" and report.held == ["every_sample_once"]


def test_a_report_raises_with_its_table() -> None:
    report = check_partition("broken_things.Twice", only=["every_sample_once", "inputs_are_unchanged"])
    with pytest.raises(AssertionError, match=r"BROKEN  every_sample_once .*\n +sample 0 is given away twice"):
        report.raise_if_broken()
    assert str(report).endswith("2 checks: 1 hold, 1 broken, 0 skipped")


def test_the_command_prints_a_table_and_says_by_its_status_what_holds(capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main(["check", "right_things.Blocks", "--clients", "5"]) == 0
    assert "for 5 clients on 1,800 samples" in capsys.readouterr().out
    assert commands.main(["check", "broken_things.Drawing", "--only", "no_global_generator,resume"]) == 1
    shown = capsys.readouterr().out
    assert "BROKEN  no_global_generator" in shown and "held    resume" not in shown.splitlines()[0]


def test_the_page_shows_what_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """But for numbers with decimals, which rounding may change."""
    page = (ROOT / "docs" / "checks.md").read_text()
    source, printed = (
        re.search(rf"```{begin}(.*?)```", page, re.DOTALL)[1] for begin in ("python\n", "text\n(?=algorithm )")
    )
    (tmp_path / "my_package.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    assert commands.main(["check", "my_package.MyMethod"]) == 1
    assert re.sub(r"0\.\d+", "x", capsys.readouterr().out) == re.sub(r"0\.\d+", "x", printed)
    monkeypatch.delitem(sys.modules, "my_package")


def test_the_command_speaks_to_programs(capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main(["check", "partition=dirichlet", "alpha=0.5", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["kind"] == "partition" and told["ok"] is True
    assert told["held"] == len(told["checks"]) and told["broken"] == told["skipped"] == 0
    assert {"name", "status", "says", "sentence"} == set(told["checks"][0])


def test_the_command_lists_all_checks(capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main(["check", "--list"]) == 0
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("padding_is_ignored", "gradients_agree", "subjects_stay_whole"))


@pytest.mark.parametrize(
    "words, said",
    [
        (["pgfed"], "did you mean algorithm=pgfed?"),
        (["no.such.Class"], "check: there is no module for 'no.such.Class'"),
        (["pathlib.Path"], "of no kind that can be checked"),
        (["algorithm=nosuch"], "conf/algorithm has apfl,"),
        (["data=x"], "data is none of algorithm"),
        (["right_things.FedNova", "lam=1"], "unexpected keyword argument 'lam'"),
        (["right_things.FedNova", "lam"], "written key=value"),
        (["right_things.FedNova", "--only", "nosuch"], "is called nosuch"),
        (["right_things.Blocks", "--model", "mlp"], "model is for another kind"),
        (["right_things.Net", "--input", "3,x"], "no shape"),
        (["right_things.Focal", "gamma=2", "--input", "3"], "input_shape is for another kind"),
        ([], "name what to check"),
    ],
)
def test_mistakes_are_one_sentence(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main(["check", *words]) == 2
    told = capsys.readouterr().err
    assert said in told and told.startswith("fedbench: ") and told.count("\n") == 1


def test_a_class_inside_a_function_is_refused() -> None:
    class Inside:
        pass

    with pytest.raises(ConfigError, match="stands inside a function"):
        check_partition(Inside)
