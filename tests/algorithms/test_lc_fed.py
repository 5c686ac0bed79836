"""LC-Fed: both plug-ins by hand, trained parameters per batch, and averaged parameters."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from by_hand import OnlyHead, six_clients
from tiny import CPU, all_clients, close, engine_on, equal, play, seeded, split_of
from torch import Tensor, nn

from fedbench.algorithms.lc_fed import LCFed, calibrated, outputs_of, pcs_layers, pixelwise
from fedbench.algorithms.lc_fed_lcrepnet import LCFedLCRepNet
from fedbench.core.options import ConfigError
from fedbench.engine.cohort import Cohort
from fedbench.engine.engine import Engine
from fedbench.engine.federation import Federation
from fedbench.engine.optim import SGD
from fedbench.models.unet import UNet
from fedbench.nn.flat import FlatModel
from fedbench.tasks.segmentation import Segmentation

SIZES = (4, 6, 3)


def scans(**options: Any) -> Engine:
    """Three clients with images [2, 16, 16] whose pixels' class is a threshold of them; U-Nets without batch norm."""
    g = torch.Generator().manual_seed(0)
    x = F.avg_pool2d(torch.randn(2 * sum(SIZES), 2, 20, 20, generator=g), 5, 1) * 4
    y = (x[:, 0] > 0.3).long()
    split = split_of(SIZES)
    parts = {"train": split.train, "test": split.test, "val": split.val}
    federation = Federation(x, y, parts, Segmentation(), 2, ["0", "1"])
    module = seeded(lambda: UNet((2, 16, 16), 2, width=2, norm="group"), 0)
    model = FlatModel(module, {"head": ["head.*"]}, CPU, lambda *key: module)
    return engine_on(federation, model, SGD(lr=0.1), **{"batch_size": 2, "epochs": 1, **options})


def pcs_row(clients: int, channels: int, who: int) -> dict[str, Tensor]:
    torch.manual_seed(0)
    row = {f"pcs.{n}": p.detach() for n, p in pcs_layers(clients, channels).named_parameters()}
    return {**row, "client": F.one_hot(torch.tensor(who), clients).float()}


# -- PCS -------------------------------------------------------------------------------------------------
def test_pcs_by_hand() -> None:
    row, x = pcs_row(3, 32, 1), torch.randn(4, 32, 5, 6)
    m = row["pcs.embed2.weight"] @ row["pcs.embed1.weight"][:, 1].relu()
    assert set(row) == {*(f"pcs.{n}.weight" for n in ("embed1", "embed2", "squeeze", "excite")), "client"}  # no bias
    z = torch.zeros(4, 32)
    for b in range(4):
        for pooled in (x[b].mean((1, 2)), x[b].amax((1, 2))):
            inside = (row["pcs.squeeze.weight"] @ torch.cat([pooled, m])).relu()
            assert inside.shape == (2,)  # 32 / 16
            z[b] += row["pcs.excite.weight"] @ inside
    close(calibrated(x, row), x * (1 + torch.sigmoid(z))[:, :, None, None], 1e-5)
    other = pcs_row(3, 32, 2)
    assert not torch.allclose(calibrated(x, other), calibrated(x, row))
    flat = torch.randn(4, 32)
    close(calibrated(flat, row), calibrated(flat[..., None, None], row)[..., 0, 0])


def test_pcs_without_its_last_map_is_one_and_a_half_times() -> None:
    row, x = pcs_row(3, 8, 0), torch.randn(4, 8, 5, 5)
    row["pcs.excite.weight"] = torch.zeros_like(row["pcs.excite.weight"])
    close(calibrated(x, row), 1.5 * x)


# -- HC --------------------------------------------------------------------------------------------------
def three_heads(own: int) -> tuple[Tensor, Tensor]:
    """Outputs of three heads on smooth images, [3, 2, 2, 40, 40], and a client's number as one-hot."""
    g = torch.Generator().manual_seed(1)
    z = F.avg_pool2d(torch.randn(2, 3, 48, 48, generator=g), 9, 1) * 9
    heads = {"head.weight": torch.randn(3, 2, 3, 1, 1, generator=g), "head.bias": torch.randn(3, 2, generator=g)}
    outputs = outputs_of(heads, z)
    each = [torch.sigmoid(F.conv2d(z, w, b)) for w, b in zip(heads["head.weight"], heads["head.bias"])]
    close(outputs, torch.stack(each), 1e-5)
    return outputs, F.one_hot(torch.tensor(own), 3).float()


def test_heads_that_agree_are_certain() -> None:
    z, weight = torch.randn(2, 3, 4, 4), torch.randn(1, 2, 3, 1, 1)
    heads = {"head.weight": weight.expand(5, -1, -1, -1, -1), "head.bias": torch.randn(1, 2).expand(5, -1)}
    client = F.one_hot(torch.tensor(2), 5).float()
    equal(LCFed().uncertainty(outputs_of(heads, z), client), torch.zeros(2, 2, 4, 4))
    single = {name: t[:1] for name, t in heads.items()}
    equal(LCFed().uncertainty(outputs_of(single, z), torch.ones(1)), torch.zeros(2, 2, 4, 4))  # and no NaN


def test_uncertainty_by_hand() -> None:
    """Pixel by pixel: the largest of its 31 x 31 neighbours, at more than a fifth of the image's largest, is 1."""
    outputs, client = three_heads(own=1)
    found = LCFed().uncertainty(outputs, client)
    u = (((outputs[0] - outputs[1]) ** 2 + (outputs[2] - outputs[1]) ** 2) / 2).sqrt()
    peaks = torch.zeros(u.shape)
    for image, peak in zip(u.flatten(0, 1), peaks.flatten(0, 1)):
        for i in range(40):
            for j in range(40):
                near = image[max(0, i - 15) : i + 16, max(0, j - 15) : j + 16]
                peak[i, j] = float(image[i, j] == near.max() and image[i, j] > 0.2 * image.max())
    assert 4 < peaks.sum() < 40
    equal(found, peaks)
    assert not torch.equal(LCFed().uncertainty(outputs, client.roll(1)), found)  # another client's own head


def test_attention_by_hand() -> None:
    """One fixed Gaussian of 31 x 31 pixels, 1 in its middle, whose sigma is 6."""
    a, m = torch.rand(2, 3, 9, 9), LCFed()
    at = torch.arange(31.0) - 15
    kernel = torch.exp(-(at[:, None] ** 2 + at**2) / 72)
    assert kernel[15, 15] == 1
    for b in range(2):
        for c in range(3):
            close(m.attention(a, {})[b, c], F.conv2d(a[b, c][None, None], kernel[None, None], padding=15)[0, 0], 1e-5)


def test_calibrated_logits_by_hand() -> None:
    e = scans()
    m = play(e, LCFed(head_iter=1), 2)
    cohort = all_clients(e)
    deployed_rows = m.personalized(cohort, False)
    x, _ = e.federation.gather(torch.arange(3)[:, None])
    found = m.predict(e.model, deployed_rows, x)
    for i in range(3):
        row = e.model.named(deployed_rows["theta"][i])
        assert {name for name in row if name.startswith("hc")} == {"hc.out.weight", "hc.out.bias"}  # K does not learn
        z = e.model.features(deployed_rows["theta"][i], x[i])
        heads = m.heads.split([row["head.weight"].numel(), row["head.bias"].numel()], 1)
        outputs = outputs_of({"head.weight": heads[0].view(3, 2, 2, 1, 1), "head.bias": heads[1]}, z)
        U = m.uncertainty(outputs, F.one_hot(torch.tensor(i), 3).float())
        assert float(U.max()) == 1
        own = torch.sigmoid(F.conv2d(z, row["head.weight"], row["head.bias"]))
        parts = []
        for c in range(2):
            parts += [m.attention(a[:, c : c + 1], row) * z + z for a in (U, own)]
        close(found[i], F.conv2d(torch.cat(parts, 1), row["hc.out.weight"], row["hc.out.bias"], padding=1), 1e-4)
        assert row["hc.out.weight"].shape == (2, 2 * 2 * 2, 3, 3)


def test_the_head_alone_may_be_deployed() -> None:
    e = scans()
    m = play(e, LCFed(head_iter=1, calibrate_head=False), 1)
    rows = m.personalized(all_clients(e), False)
    x, _ = e.federation.gather(torch.arange(3)[:, None])
    close(m.predict(e.model, rows, x), e.model.forward(rows["theta"], x))


# -- lcrepnet.py ----------------------------------------------------------------------------------------
def test_lcrepnet_uncertainty_is_the_deviation_of_all_heads() -> None:
    outputs, client = three_heads(own=1)
    m = LCFedLCRepNet()
    close(m.uncertainty(outputs, client), outputs.std(0, correction=1), 1e-6)
    equal(m.uncertainty(outputs, client.roll(1)), m.uncertainty(outputs, client))  # whosever head is the own one
    equal(m.uncertainty(outputs[:1], client[:1]), torch.zeros_like(outputs[0]))  # and no NaN


def test_lcrepnet_attention_by_hand() -> None:
    m = LCFedLCRepNet()
    row = {f"hc.{n}": p.detach() for n, p in m.hc_layers(2, 3).named_parameters()}
    kernel, a = row["hc.kernel.weight"], torch.rand(2, 3, 9, 9)
    assert kernel.shape == (1, 1, 31, 31) and row["hc.out.weight"].shape == (2, 12, 1, 1)
    close(kernel.sum(), torch.tensor(1.0))
    # 31 pixels divide 8 + 9 / 31 deviations; each number is the root of a product of two pixels' probabilities
    cdf = [0.5 * math.erf(x / math.sqrt(2)) for x in ((8 + 9 / 31) * (k / 31 - 0.5) for k in range(32))]
    bell = [math.sqrt(high - low) for low, high in pairwise(cdf)]
    close(kernel[0, 0], torch.tensor(bell).outer(torch.tensor(bell)) / sum(bell) ** 2, 1e-6)
    for b in range(2):
        for c in range(3):
            smooth = F.conv2d(a[b, c][None, None], kernel, padding=15)[0, 0]
            scaled = (smooth - smooth.min()) / (smooth.max() - smooth.min() + 1e-8)
            close(m.attention(a, row)[b, c], torch.maximum(scaled, a[b, c]), 1e-5)


def test_lcrepnet_kernel_learns_with_hc() -> None:
    e = scans()
    m = play(e, LCFedLCRepNet(head_iter=1), 2)
    rows = e.model.named(m.personalized(all_clients(e), False)["theta"])
    assert not torch.equal(rows["hc.kernel.weight"][0], rows["hc.kernel.weight"][1])
    x, _ = e.federation.gather(torch.arange(3)[:, None])
    assert m.predict(e.model, m.personalized(all_clients(e), False), x).shape == (3, 1, 2, 16, 16)


# -- a round ---------------------------------------------------------------------------------------------
def moved(e: Engine, m: LCFed, steps_of_head: int) -> set[str]:
    """The parts of client 0's row that a round of one epoch moves."""
    m.head_iter = steps_of_head
    cohort = Cohort(e, np.arange(3), 1)
    theta = m.rows_of(cohort, m.body.take(m.w))
    out = cohort.train(theta, step=lambda s, batch: m.step(s, batch, m.heads))
    changed = (out.theta != theta)[0]
    return {name.partition(".")[0] for name, (a, b) in e.model.spans.items() if bool(changed[a:b].any())}


def test_first_the_head_learns_then_the_body_and_hc_always() -> None:
    e = scans()
    m: Any = play(e, LCFed(), rounds=1)
    assert moved(e, m, 1000) == {"head", "hc"}
    body = moved(e, m, 0)
    assert {"hc", "pcs", "bottleneck", "encoder1", "decoder1"} <= body and not {"head", "client"} & body


def test_hcs_step_leaves_body_and_head() -> None:
    """Their rows are those of training without it."""
    e, f = scans(), scans()
    m: Any = play(e, LCFed(head_iter=2), rounds=1)
    n: Any = play(f, LCFed(head_iter=2), rounds=0)
    n.step = lambda s, batch, heads: s.descend(
        s.grad(batch, columns=(learns := n.head_columns if s.t < 2 else n.body & s.model.trained)), columns=learns
    )
    play(f, n, begin=1)
    other = scans()
    same: Any = play(other, LCFed(head_iter=2), rounds=0)
    same.round(Cohort(other, np.arange(3), 1))
    equal(same.w, n.w)
    equal(same.heads, n.heads)
    assert not torch.equal(same.hc[np.arange(3)], n.hc[np.arange(3)])
    assert m.heads.shape == (3, 2 * 2 + 2)


def test_bodies_are_averaged_plainly_and_heads_stay_apart() -> None:
    e = scans()
    m: Any = play(e, LCFed(head_iter=1), rounds=0)
    cohort = Cohort(e, np.arange(3), 0)
    theta = m.rows_of(cohort, m.body.take(m.w))
    out = cohort.train(theta, step=lambda s, batch: m.step(s, batch, m.heads)).theta
    m.round(Cohort(e, np.arange(3), 0))
    close(m.body.take(m.w), m.body.take(out).mean(0), 1e-6)  # whatever their numbers of samples
    equal(m.head[np.arange(3)], m.head_columns.take(out))
    equal(m.heads, m.head_columns.take(out))
    rows = m.personalized(all_clients(e), False)["theta"]
    equal(m.client_columns.take(rows), torch.eye(3))


def test_it_runs_where_features_are_no_images() -> None:
    e = six_clients()
    m = play(e, LCFed(head_iter=1), 2)
    rows = m.personalized(all_clients(e), False)
    x, _ = e.federation.gather(torch.arange(6)[:, None])
    assert m.predict(e.model, rows, x).shape == (6, 1, 3)
    assert torch.isfinite(rows["theta"]).all()


def test_what_is_refused() -> None:
    e = six_clients()
    with pytest.raises(ConfigError, match=r"algorithm\.place=nowhere"):
        LCFed(place="nowhere").check(e.federation, e.model, e.optimizer)
    module = nn.Sequential()
    module.add_module("body", nn.Flatten())
    module.add_module("head", nn.Sequential(nn.Linear(16, 3)))
    with pytest.raises(ConfigError, match="linear layer or a 1x1 convolution"):
        LCFed().check(e.federation, FlatModel(module, {"head": ["head.*"]}), e.optimizer)
    bare: Any = OnlyHead(16, 3)
    LCFed().check(e.federation, FlatModel(bare, {"head": ["head.*"]}), e.optimizer)
    assert pixelwise(torch.ones(2, 3), None, torch.ones(1, 3, 2, 2)).shape == (1, 2, 2, 2)
