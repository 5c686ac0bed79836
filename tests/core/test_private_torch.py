"""PyTorch's private names: each is there, and what fedbench makes of them does what it says."""

from importlib.metadata import version

import pytest
import torch
from private_names import gone, sentence
from torch import nn

from fedbench.core.private_torch import NAMES, BatchNorm, MoveListener, has_hooks


def test_pytorch_has_them() -> None:
    assert sentence("torch", NAMES, "fedbench/core/private_torch.py") == ""


def test_what_is_gone_is_named_with_the_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch, "_fused_sgd_")
    assert gone(NAMES) == ["torch._fused_sgd_"] and gone(["torch.no_such_module._x"]) == ["torch.no_such_module._x"]
    said = sentence("torch", NAMES, "here.py")
    assert said == f"torch {version('torch')} has no torch._fused_sgd_ any more: mend here.py"


def test_batch_norms_and_no_others() -> None:
    assert isinstance(nn.BatchNorm2d(2), BatchNorm) and not isinstance(nn.GroupNorm(1, 2), BatchNorm)


def test_hooks_are_found_in_every_layer() -> None:
    module = nn.Sequential(nn.Sequential(nn.Linear(2, 2)))
    assert not has_hooks(module)
    handle = module[0][0].register_forward_pre_hook(lambda m, x: None)
    assert has_hooks(module)
    handle.remove()
    module[0].register_forward_hook(lambda m, x, y: None)
    assert has_hooks(module)


def test_a_module_is_told_of_moves() -> None:
    class Counting(MoveListener):
        count = 0

        def on_move(self) -> None:
            self.count += 1

    inner = Counting()
    outer = nn.Sequential(inner, nn.Linear(2, 2))
    assert outer.double() is outer and inner.count == 1 and inner.to("cpu") is inner and inner.count == 2
