"""Checks of a user's model: a correct one passes, and each check finds its mistake."""

from __future__ import annotations

import numpy as np
import pytest
from contract import assert_failed
from torch import nn

from fedbench.testing import check_model, model


class Net(nn.Module):
    def __init__(self, input_shape, num_classes, width=6):
        super().__init__()
        size = int(np.prod(input_shape))
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(size, width), nn.GELU(), nn.LayerNorm(width), nn.Dropout(0.1))
        self.head = nn.Linear(width, num_classes)

    def forward(self, x):
        return self.head(self.body(x))


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
        return self.head(self.body(x) + 0.1 * float(np.random.rand()))  # noqa: NPY002


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
        self.head.weight.data.mul_(float(np.random.rand()))  # noqa: NPY002


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


MISTAKES = [
    (Centered, "samples_are_independent", "may be padding"),
    (NumpyNoise, "draws_are_keyed", "NumPy"),
    (InPlace, "inputs_are_unchanged", "in place"),
    (After, "features_enter_the_head", "Remedy: return the outputs of the layer head"),
    (Unkeyed, "initialization_is_keyed", "Remedy: use torch's random numbers"),
    (Unused, "columns_are_respected", "'idle' changes none"),
    (Plain, "one_client_is_the_module", "of a row and of the module differ"),
    (FirstForAll, "many_clients_are_each_one", "in evaluation"),
    (FirstForAll, "gradients_agree", "3 clients at once"),
    (GradientIsNaN, "gradients_agree", "and of autograd differ by nan"),
    (FirstForAll, "training_agrees", "by the plan vmap"),
]


def test_a_correct_one_passes() -> None:
    report = check_model(Net, {"width": 5}, columns={"base": ["body.*"], "head": ["head.*"]})
    report.raise_if_failed()
    assert report.skipped == {} and "traced graph" in report.setting


@pytest.mark.parametrize("cls, check, message", MISTAKES)
def test_a_mistake_is_found(cls: type, check: str, message: str) -> None:
    columns = {"idle": ["idle.*"]} if cls is Unused else None
    assert_failed(check_model(cls, columns=columns, only=[check]), check, message)


def test_every_check_finds_a_mistake() -> None:
    assert {check for _, check, _ in MISTAKES} == set(model.SUITE.checks)
