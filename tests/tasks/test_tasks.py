"""Classification, several labels, masks of pixels, several inputs, classes of one's own: loss, training, evaluation."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tiny import HEAD, PLANS, arrays_of, close, deployed, engine, mlp, play, seeded, split_of
from torch import Tensor, nn

from fedbench.algorithms.base import Algorithm
from fedbench.algorithms.fedavg import FedAvg
from fedbench.algorithms.fedper import FedPer
from fedbench.algorithms.pgfed import PGFed
from fedbench.core.options import ConfigError
from fedbench.engine.cohort import Cohort
from fedbench.engine.engine import Engine
from fedbench.engine.training import LocalTraining
from fedbench.simulation import evaluate
from fedbench.tasks.base import task_for
from fedbench.tasks.classification import Classification
from fedbench.tasks.multilabel import MultiLabel
from fedbench.tasks.segmentation import Segmentation

SIZES, TEST, VAL = (7, 12, 3, 9), (4, 6, 2, 5), (0, 2, 0, 3)
N = sum(SIZES) + sum(TEST) + sum(VAL)
C = 4
RNG = np.random.default_rng(0)


class Pixels(nn.Module):
    """[B, 1, H, W] -> [B, C, H, W]."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), nn.ReLU())
        self.head = nn.Conv2d(6, C, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


class Question(nn.Module):
    """An image and the words of a question."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleDict({"image": nn.Linear(16, 8), "words": nn.Embedding(9, 8)})
        self.head = nn.Linear(8, C)

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        z = self.body["image"](inputs["image"].flatten(1)) + self.body["words"](inputs["tokens"]).mean(1)
        return self.head(z.tanh())


def named_classes() -> dict:
    """Each client a silo with three of the four classes; all its labels are among them."""
    mask = np.array([[1, 1, 1, 0], [0, 1, 1, 1], [1, 0, 1, 1], [1, 1, 0, 1]], bool)
    split = split_of(SIZES, TEST, VAL)
    domain = np.empty(N, np.int64)
    for part in (split.train, split.val, split.test):
        domain[part.indices] = np.repeat(np.arange(4), part.sizes)
    return {"class_mask": mask, "domain": domain}


def images() -> np.ndarray:
    return RNG.normal(size=(N, 1, 4, 4)).astype(np.float32)


def labels(own: dict) -> np.ndarray:
    return np.array([RNG.choice(np.flatnonzero(own["class_mask"][d])) for d in own["domain"]])


def make(kind: str, plan: str = "vmap") -> Engine:
    global RNG
    RNG = np.random.default_rng(0)
    own = named_classes()
    if kind == "multilabel":
        arrays = arrays_of(images(), (RNG.random((N, C)) < 0.4).astype(np.float32), C, task="multilabel")
    elif kind == "multilabel, masked":
        arrays = arrays_of(images(), (RNG.random((N, C)) < 0.4).astype(np.float32), C, task="multilabel", **own)
    elif kind == "segmentation":
        arrays = arrays_of(images(), RNG.integers(0, C, (N, 4, 4)), C, task="segmentation")
    elif kind == "segmentation, masked":
        y = np.stack([RNG.choice(np.flatnonzero(own["class_mask"][d]), (4, 4)) for d in own["domain"]])
        arrays = arrays_of(images(), y, C, task="segmentation", **own)
    elif kind == "dict":
        x = {"image": images(), "tokens": RNG.integers(0, 9, (N, 5))}
        arrays = arrays_of(x, RNG.integers(0, C, N), C)
    elif kind == "masked":
        arrays = arrays_of(images(), labels(own), C, **own)
    else:
        arrays = arrays_of(images(), RNG.integers(0, C, N), C)
    module = seeded(Pixels) if "segmentation" in kind else seeded(Question) if kind == "dict" else mlp(classes=C)
    return engine(arrays.check(), split_of(SIZES, TEST, VAL), module, plan=plan, columns=HEAD, eval_batch=4)


KINDS = ("classification", "masked", "multilabel", "multilabel, masked", "segmentation", "segmentation, masked", "dict")


def by_hand(kind: str, logits: Tensor, y: Tensor, mask: Tensor | None) -> Tensor:
    """Mean loss of one client, in the words of the task: only the client's own classes exist."""
    valid = torch.ones(C, dtype=torch.bool) if mask is None else mask
    if kind.startswith("multilabel"):
        p = logits[:, valid].sigmoid()
        return -(y[:, valid] * p.log() + (1 - y[:, valid]) * (1 - p).log()).mean()
    place = torch.cumsum(valid, 0) - 1
    return F.cross_entropy(logits[:, valid], place[y])


def client(e: Engine, i: int, split: str = "train") -> tuple:
    x, y = e.federation.gather(torch.from_numpy(e.federation.splits[split][i]))
    return x, y, None if e.federation.class_mask is None else e.federation.class_mask[i]


@pytest.mark.parametrize("kind", KINDS)
def test_a_full_batch_step_by_hand(kind: str) -> None:
    """theta - lr grad of the mean loss over the client's samples and own classes; gradient() and loss() agree."""
    e = make(kind)
    cohort, start = Cohort(e, np.array([3, 0, 2]), 0), e.model.init_row()
    out = cohort.train(start, how=LocalTraining(batch_size=20, epochs=1))
    g, f = cohort.gradient(start)
    for j, i in enumerate([3, 0, 2]):
        x, y, mask = client(e, i)
        row = start.clone().requires_grad_()
        loss = by_hand(kind, e.model.predict(row, x), y, mask)
        (grad,) = torch.autograd.grad(loss, row)
        close(f[j], loss.detach())
        close(g[j], grad)
        close(out.theta[j], start - 0.1 * grad)
        close(cohort.loss(start)[j], loss.detach())


METHODS: dict[str, type[Algorithm]] = {"fedavg": FedAvg, "fedper": FedPer, "pgfed": PGFed}


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("kind", KINDS)
def test_methods_run_on_every_task_alike_under_every_plan(kind: str, name: str) -> None:
    rows = {}
    for plan in PLANS:
        e = make(kind, plan)
        algorithm = play(e, METHODS[name](), 2, [[0, 1, 3], [1, 2, 3]])
        rows[plan] = deployed(e, algorithm)
        assert torch.isfinite(rows[plan]).all()
        found = evaluate.personal(algorithm, e, np.arange(4), 1, True)
        assert all(len(v) == 4 for v in found.values()) and (found["loss"] > 0).all()
        assert ((found["accuracy"] >= 0) & (found["accuracy"] <= 1)).all()
    for plan in PLANS:
        close(rows[plan], rows["loop"])
    moved = (rows["vmap"] - make(kind).model.init_row()).abs().sum(1)
    assert (moved > 0).all() or name != "fedavg"


@pytest.mark.parametrize("part", ["test", "val"])
@pytest.mark.parametrize("shared", [True, False], ids=["shared", "personal"])
@pytest.mark.parametrize("kind", KINDS)
def test_scores_by_hand(kind: str, shared: bool, part: str) -> None:
    """Loss and accuracy of each client on its own samples and classes; nothing to be tested on is NaN."""
    e = make(kind)
    rows = e.model.init_row() + 0.3 * torch.randn(4, e.model.size, generator=torch.Generator().manual_seed(0))
    found = (
        evaluate.shared(rows[0], e, np.arange(4), 0, part)
        if shared
        else evaluate.score(Cohort(e, np.arange(4), 0, "evaluation"), rows, e.model.__class__.predict, part)
    )
    for i in range(4):
        x, y, mask = client(e, i, part)
        if not len(y):
            assert np.isnan(found["loss"][i]) and np.isnan(found["accuracy"][i])
            continue
        logits = e.model.predict(rows[0 if shared else i], x)
        assert found["loss"][i] == pytest.approx(by_hand(kind, logits, y, mask).item(), abs=1e-5)
        valid = torch.ones(C, dtype=torch.bool) if mask is None else mask
        if kind.startswith("multilabel"):
            right = ((logits > 0) == (y > 0.5))[:, valid]
        else:
            shape = (1, C) + (1,) * (logits.dim() - 2)
            right = logits.masked_fill(~valid.view(shape), -np.inf).argmax(1) == y
        assert found["accuracy"][i] == pytest.approx(right.float().mean().item(), abs=1e-6)


@pytest.mark.parametrize("kind", ["classification", "segmentation", "dict"])
def test_a_bag_with_a_shared_row_is_scored(kind: str) -> None:
    """personalized may return a dict: rows per client, and rows [P] that all share."""

    class Mixed(FedAvg):
        def personalized(self, cohort, final):
            return {"theta": self.w, "own": self.v[cohort.index]}

        def predict(self, model, rows, inputs):
            return model.predict(rows["theta"], inputs) + model.predict(rows["own"], inputs)

    e = make(kind)
    algorithm = play(e, Mixed())
    algorithm.v = e.model.init_row() + torch.randn(4, e.model.size)
    found = evaluate.personal(algorithm, e, np.array([1, 3]), 0, True)
    for j, i in enumerate([1, 3]):
        x, y, _ = client(e, i, "test")
        logits = e.model.predict(algorithm.w, x) + e.model.predict(algorithm.v[i], x)
        assert found["loss"][j] == pytest.approx(by_hand(kind, logits, y, None).item(), abs=1e-5)


def test_evaluation_in_slices_is_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in KINDS:
        e = make(kind)
        algorithm = play(e, FedPer())
        whole = evaluate.personal(algorithm, e, np.arange(4), 0, True, "val")
        with monkeypatch.context() as m:
            m.setattr(evaluate, "SLICE_BYTES", 1)  # one client at a time; 0 and 2 have no val samples
            sliced = evaluate.personal(algorithm, e, np.arange(4), 0, True, "val")
        assert whole.keys() == sliced.keys()
        for name in whole:
            np.testing.assert_allclose(whole[name], sliced[name], rtol=1e-5)


# -- losses alone ----------------------------------------------------------------------------------------
def test_losses_on_any_leading_axes() -> None:
    logits, y = torch.randn(3, 5, C), torch.randint(0, C, (3, 5))
    close(Classification().loss(logits, y)[1], Classification().loss(logits[1], y[1]))
    many = torch.rand(3, 5, C).round()
    close(MultiLabel().loss(logits, many)[1], MultiLabel().loss(logits[1], many[1]))
    pixels, masks = torch.randn(3, 5, C, 2, 3), torch.randint(0, C, (3, 5, 2, 3))
    close(Segmentation().loss(pixels, masks)[1], Segmentation().loss(pixels[1], masks[1]))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("rows", [5, 300])
def test_cross_entropy_and_its_gradient(rows: int, masked: bool) -> None:
    """The closed form and the narrow kernel are F.cross_entropy."""
    logits = torch.randn(3, rows, C, requires_grad=True)
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1], [1, 0, 1, 1]], dtype=torch.bool) if masked else None
    y = torch.zeros(3, rows, dtype=torch.long) if masked else torch.randint(0, C, (3, rows))
    weight = torch.rand(3, rows)
    task = Classification()
    cut = logits if mask is None else logits.masked_fill(~mask[:, None], float("-inf"))
    expected = F.cross_entropy(cut.reshape(-1, C), y.reshape(-1), reduction="none").view(3, rows)
    (grad,) = torch.autograd.grad((expected * weight).sum(), logits)
    own = task.loss(logits, y, mask)
    close(own, expected)
    close(torch.autograd.grad((own * weight).sum(), logits)[0], grad)
    loss, direct = task.loss_and_gradient(logits.detach(), y, weight, mask)
    close(loss, expected.detach())
    close(direct, grad)


def test_an_unknown_task() -> None:
    with pytest.raises(
        ConfigError, match=r"task is 'ranking', but must be one of classification, denoising, mixed, multilabel"
    ):
        task_for("ranking")
