"""LC-Fed: features calibrated by client, and personal heads calibrated by their difference from others.

Wang et al., ECCV 2022, for segmentation; printed as FedLC in pFedNet's tables.  The networks are those of the released
multi_lcnet.py, which the final training and test scripts import; lc_fed_lcrepnet has the older lcrepnet.py.
PCS, behind the bottleneck, shared but for the client's number e (one-hot): with m = E(e),
    h = sigmoid(F [avg x; m] + F [max x; m]),  x <- h x + x.
HC, personal, for every class c, with p_j = sigmoid(head_j(z)) of all N clients' heads as they were collected:
    u = sqrt(sum_j (p_j - p_i)^2 / (N - 1)),  u <- u / max u over the image's pixels,
    U = 1 at pixels whose u is more than 0.2 and the largest within 31 x 31 pixels, 0 elsewhere,
    A(a) = K * a,  K the Gaussian exp(-r^2 / (2 * 6^2)) on 31 x 31 pixels, which does not learn,
and the calibrated logits are V [A(U_c) z + z, A(sigmoid(head(z)_c)) z + z for every c], V a 3 x 3 convolution.
A round: in the first head_iter batches the head learns alone, in the others the body, and after each of these steps HC
takes one, all else fixed.  The server takes the unweighted mean of bodies, and sends all heads to all clients.
Departs from the released code: HC learns in the same rounds (there in a second run, by train_hc.py, after the bodies);
losses are the task's (task.loss=dice for its own), and HC's logits enter it without a sigmoid of their own; all clients
start from one row (there from independent ones); the term that pushes clients' maps h apart is left out, as it is by
default there.  PCS learns and is averaged, as in the paper: the released layers stand in a plain list, so that no
optimizer and no mean includes them.  U is 0 where all heads agree up to rounding, or N = 1 (there 0 / 0).
If features are not images (a linear head), every sample is an image of one pixel.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import one_hot

from fedbench.algorithms._heads import require_linear_head
from fedbench.algorithms.base import (
    Algorithm,
    Batch,
    Cohort,
    Federation,
    FlatModel,
    Inputs,
    LocalTraining,
    Optimizer,
    RowStore,
    Step,
)
from fedbench.core.options import Natural, require
from fedbench.nn.columns import Columns

REDUCTION = 16  # of channels inside F
KERNEL = 31  # side in pixels of K, and of the square around a peak of u
SIGMA = 6.0  # pixels, of K
LEAST = 0.2  # minimum of a peak, relative to the largest u of an image
ROUNDING = 1e-6  # maximum difference between outputs of heads that agree


class LCFed(Algorithm):
    """head_iter, place, calibrate_head: in the YAML.

    State: w [P], of which the body and PCS are in use; heads [N, |head|], as uploaded; head and hc, the clients' own.
    """

    numbered = "PCS embeds a client's number"

    def __init__(self, head_iter: Natural = 10, place: str | None = None, calibrate_head: bool = True):
        self.head_iter, self.place, self.calibrate_head = head_iter, place, calibrate_head

    def check(self, federation: Federation, model: FlatModel, optimizer: Optimizer) -> None:
        """A head that is linear, or a convolution of single pixels, and a place for PCS."""
        super().check(federation, model, optimizer)
        require_linear_head(model)
        names = {name for name, _ in model.module.named_modules()}
        require(
            self.place in names or (self.place is None and bool({"bottleneck", "body"} & names)),
            f"algorithm.place={self.place}: the model has no layer of that name"
            + ("; name the one behind which features are calibrated" if self.place is None else ""),
        )

    def setup(self, federation: Federation, model: FlatModel, rows: RowStore) -> None:
        """PCS, HC and the client's number join the row; all clients start from one."""
        n, names = federation.num_clients, {name for name, _ in model.module.named_modules()}
        place = self.place or ("bottleneck" if "bottleneck" in names else "body")
        x, _ = federation.gather(torch.zeros(1, dtype=torch.int64, device=model.device))
        channels = model.capture(model.init_row(), x, [place])[1][place].shape[1]
        head: Any = model.module.head
        classes, features = head.weight.shape[:2]
        model.extend(
            pcs=model.keyed(lambda: pcs_layers(n, channels), "lc_fed"),
            hc=model.keyed(lambda: self.hc_layers(classes, features), "lc_fed hc"),
            client=torch.zeros(n),
        )
        model.tap(place, calibrated)
        self.head_columns = Columns(span for name, span in model.spans.items() if name.startswith("head."))
        self.hc_columns, self.client_columns = model.columns["hc"], model.columns["client"]
        personal = self.head_columns | self.hc_columns | self.client_columns
        self.body = personal.rest(model.size)  # with PCS, and running statistics
        self.w = model.init_row()  # [P]
        own = self.head_columns.take(self.w)
        self.heads = own.repeat(n, 1)  # [N, |head|]
        self.head, self.hc = rows("head", default=own), rows("hc", default=self.hc_columns.take(self.w))

    def round(self, cohort: Cohort) -> None:
        """Head, body and HC train; the body is averaged, heads are collected."""
        sent = cohort.broadcast(body=self.body.take(self.w), heads=self.heads)
        theta = self.rows_of(cohort, sent.body)  # [K, P]
        uploaded = self.body | self.head_columns
        out = cohort.train(
            theta, step=lambda s, batch: self.step(s, batch, sent.heads), how=LocalTraining(uploaded=uploaded)
        )
        head = self.head_columns.take(out.theta)
        self.head[cohort.ids], self.hc[cohort.ids] = head, self.hc_columns.take(out.theta)
        up = cohort.upload(
            body=self.body.take(out.theta),
            head=head,
            relative_to={"body": "body"},
            replaces={"head": self.heads[cohort.index]},
        )
        self.w = self.body.put(self.w, cohort.sum(up.body) / len(cohort))
        self.heads = self.heads.index_copy(0, cohort.index, up.head)

    def rows_of(self, cohort: Cohort, body: Tensor) -> Tensor:
        """The clients' rows: the body, their own head and HC, their numbers.  # [K, P]"""
        number = one_hot(cohort.index, cohort.num_clients).to(body)
        theta = self.body.put(self.w.expand(len(cohort), -1).clone(), body.expand(len(cohort), -1))
        theta = self.client_columns.put(theta, number)
        return self.hc_columns.put(self.head_columns.put(theta, self.head[cohort.ids]), self.hc[cohort.ids])

    def step(self, s: Step, batch: Batch, heads: Tensor) -> None:
        """The head or the body, then HC."""
        learns = self.head_columns if s.t < self.head_iter else self.body & s.model.trained
        s.descend(s.grad(batch, columns=learns), columns=learns)

        def hc_loss(s: Step, rows: Tensor, batch: Batch) -> Tensor:
            z = s.features(rows, batch).detach()
            return s.task_loss(self.calibrated_logits(s.model, rows, z, heads), batch)

        gradient = s.grad(batch, loss=hc_loss, columns=self.hc_columns)
        s.descend(gradient, columns=self.hc_columns, uploaded=False)

    def calibrated_logits(self, model: FlatModel, rows: Tensor, z: Tensor, heads: Tensor) -> Tensor:
        """HC's logits of features z [k, B, F] or [k, B, F, H, W], the head itself being fixed.  # [k, B, C(, H, W)]"""
        flat = z.dim() == 3
        z = z[..., None, None] if flat else z
        named = {name: t for name, t in model.named(rows).items() if name.startswith(("head.", "hc.", "client"))}
        names = [name for name in named if name.startswith("head.")]
        shapes = [named[name].shape[1:] for name in names]
        parts = heads.split([shape.numel() for shape in shapes], 1)
        others = {name: part.view(-1, *shape) for name, part, shape in zip(names, parts, shapes, strict=True)}

        def of_one(row: dict[str, Tensor], z: Tensor) -> Tensor:
            prediction = torch.sigmoid(pixelwise(row["head.weight"], row.get("head.bias"), z)).detach()
            U = self.uncertainty(outputs_of(others, z), row["client"])  # [B, C, H, W]
            maps = torch.stack([self.attention(a, row) for a in (U, prediction)], 2)  # [B, C, 2, H, W]
            weighted = maps[:, :, :, None] * z[:, None, None] + z[:, None, None]  # [B, C, 2, F, H, W]
            V = row["hc.out.weight"]
            return F.conv2d(weighted.flatten(1, 3), V, row["hc.out.bias"], padding=V.shape[-1] // 2)

        logits = torch.vmap(of_one)(named, z)
        return logits[..., 0, 0] if flat else logits

    def hc_layers(self, classes: int, features: int) -> nn.Module:
        """Return V: 2 classes features -> classes."""
        return nn.ModuleDict({"out": nn.Conv2d(2 * classes * features, classes, 3, padding=1)})

    def uncertainty(self, outputs: Tensor, client: Tensor) -> Tensor:
        """Return U of all heads' outputs [N, B, C, H, W]; client [N] is the one-hot number i.  # [B, C, H, W]"""
        own = torch.einsum("n,nbchw->bchw", client, outputs)
        u = ((outputs - own).square().sum(0) / max(1, len(outputs) - 1)).sqrt()
        largest = u.amax((-1, -2), keepdim=True)
        u = torch.where(largest > ROUNDING, u / largest, 0)
        is_peak = u == F.max_pool2d(u, KERNEL, stride=1, padding=KERNEL // 2)
        return (is_peak & (u > LEAST)).to(u)

    def attention(self, a: Tensor, row: dict[str, Tensor]) -> Tensor:
        """Return K * a for a [B, C, H, W]."""
        at = torch.arange(KERNEL, device=a.device) - KERNEL // 2
        bell = torch.exp(-(at**2) / (2 * SIGMA**2))[None, None]  # K is the product of two  [1, 1, KERNEL]
        images = a.flatten(0, 1)[:, None]
        down = F.conv2d(images, bell[..., None], padding=(KERNEL // 2, 0))
        return F.conv2d(down, bell[..., None, :], padding=(0, KERNEL // 2))[:, 0].unflatten(0, a.shape[:2])

    def personalized(self, cohort: Cohort, final: bool) -> dict[str, Tensor]:
        """The averaged body with the client's own head and HC, and all heads."""
        sent = cohort.broadcast(body=self.body.take(self.w), heads=self.heads)
        return {"theta": self.rows_of(cohort, sent.body), "heads": sent.heads.expand(len(cohort), -1, -1)}

    def predict(self, model: FlatModel, rows: Any, inputs: Inputs) -> Tensor:
        """HC's logits, or the head's."""
        if not self.calibrate_head:
            return model.forward(rows["theta"], inputs)
        return self.calibrated_logits(model, rows["theta"], model.features(rows["theta"], inputs), rows["heads"][0])


# -- the two plug-ins ------------------------------------------------------------------------------------
def pcs_layers(clients: int, channels: int) -> nn.Module:
    """Return E: clients -> channels -> channels and F: 2 channels -> channels / 16 -> channels, without biases."""
    inside = max(1, channels // REDUCTION)
    return nn.ModuleDict({
        "embed1": nn.Linear(clients, channels, bias=False), "embed2": nn.Linear(channels, channels, bias=False),
        "squeeze": nn.Linear(2 * channels, inside, bias=False), "excite": nn.Linear(inside, channels, bias=False),
    })  # fmt: skip


def calibrated(x: Tensor, row: dict[str, Tensor]) -> Tensor:
    """PCS on one client's x [B, C] or [B, C, H, W]."""
    embedded = F.linear(row["client"], row["pcs.embed1.weight"]).relu()
    m = F.linear(embedded, row["pcs.embed2.weight"]).expand(x.shape[:2])  # [B, C]
    pixels = x.flatten(2) if x.dim() > 2 else x[..., None]  # [B, C, H W]
    h = torch.zeros_like(m)
    for pooled in (pixels.mean(2), pixels.amax(2)):
        inside = F.linear(torch.cat([pooled, m], 1), row["pcs.squeeze.weight"]).relu()
        h = h + F.linear(inside, row["pcs.excite.weight"])
    h = torch.sigmoid(h).view(*x.shape[:2], *(1,) * (x.dim() - 2))
    return h * x + x


def pixelwise(weight: Tensor, bias: Tensor | None, z: Tensor) -> Tensor:
    """A linear map of every pixel: weight [C, F] or [C, F, 1, 1], z [B, F, H, W].  # [B, C, H, W]"""
    y = torch.einsum("cf,bfhw->bchw", weight.flatten(1), z)
    return y if bias is None else y + bias[:, None, None]


def outputs_of(heads: dict[str, Tensor], z: Tensor) -> Tensor:
    """Return sigmoid(head_j(z)) of all N heads.  # [N, B, C, H, W]"""
    outputs = torch.einsum("ncf,bfhw->nbchw", heads["head.weight"].flatten(2), z)
    if "head.bias" in heads:
        outputs = outputs + heads["head.bias"][:, None, :, None, None]
    return torch.sigmoid(outputs)
