"""LC-Fed: features calibrated by who the client is, and personal heads that learn from where all heads disagree.

Wang et al., ECCV 2022, for segmentation; printed as FedLC in pFedNet's tables.
PCS, behind the bottleneck, shared but for the client's number e (one-hot): with m = E(e),
    h = sigmoid(F [avg x; m] + F [max x; m]),  x <- h x + x.
HC, personal: with all clients' heads, U = the standard deviation over clients of sigmoid(head_j(z)), and
    A(a) = max(minmax(K * a), a),  K a kernel of 31 x 31,
the calibrated logits are V [A(U_c) z + z, A(sigmoid(head(z)_c)) z + z, for every class c].
A round: in the first head_iter batches the head learns alone, in the others the body, and after each of these steps HC
takes one, all else fixed.  The server takes the plain mean of bodies, and sends everybody all heads.
Departs from the released code: losses are the task's (task.loss=dice for its own), and HC's logits enter it without a
sigmoid of their own; the term that pushes clients' maps h apart is left out, as it is by default there.  Its two
snapshots disagree on whether HC multiplies features; here it does.
Where features are no images (a linear head) every sample is an image of one pixel.
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
KERNEL = 31  # pixels of K's side
NARROW = 1e-8  # keeps minmax of a constant image at 0


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
        require_linear_head(model, "lc_fed")
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
            hc=model.keyed(lambda: hc_layers(classes, features), "lc_fed hc"),
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
        known = {"body": sent.body, "head": self.heads[cohort.index]}
        up = cohort.upload(body=self.body.take(out.theta), head=head, reference=known, replaces=["head"])
        self.w = self.body.put(self.w, up.body.mean(0))
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
        named = {name: t for name, t in model.named(rows).items() if name.startswith(("head.", "hc."))}
        names = [name for name in named if name.startswith("head.")]
        shapes = [named[name].shape[1:] for name in names]
        parts = heads.split([shape.numel() for shape in shapes], 1)
        others = {name: part.view(-1, *shape) for name, part, shape in zip(names, parts, shapes, strict=True)}

        def of_one(row: dict[str, Tensor], z: Tensor) -> Tensor:
            U = uncertainty(others, z)  # [B, C, H, W]
            prediction = torch.sigmoid(pixelwise(row["head.weight"], row.get("head.bias"), z)).detach()
            maps = [soft_attention(a, row["hc.kernel.weight"]) for a in (U, prediction)]
            weighted = [(a[:, :, None] * z[:, None] + z[:, None]).flatten(1, 2) for a in maps]  # [B, C F, H, W]
            return pixelwise(row["hc.out.weight"], row["hc.out.bias"], torch.cat(weighted, 1))

        logits = torch.vmap(of_one)(named, z)
        return logits[..., 0, 0] if flat else logits

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
    """E: clients -> channels -> channels; F: 2 channels -> channels / 16 -> channels, without bias."""
    inside = max(1, channels // REDUCTION)
    return nn.ModuleDict({
        "embed1": nn.Linear(clients, channels), "embed2": nn.Linear(channels, channels),
        "squeeze": nn.Linear(2 * channels, inside, bias=False), "excite": nn.Linear(inside, channels, bias=False),
    })  # fmt: skip


def calibrated(x: Tensor, row: dict[str, Tensor]) -> Tensor:
    """PCS on one client's x [B, C] or [B, C, H, W]."""
    embedded = F.linear(row["client"], row["pcs.embed1.weight"], row["pcs.embed1.bias"]).relu()
    m = F.linear(embedded, row["pcs.embed2.weight"], row["pcs.embed2.bias"]).expand(x.shape[:2])  # [B, C]
    pixels = x.flatten(2) if x.dim() > 2 else x[..., None]  # [B, C, H W]
    h = torch.zeros_like(m)
    for pooled in (pixels.mean(2), pixels.amax(2)):
        inside = F.linear(torch.cat([pooled, m], 1), row["pcs.squeeze.weight"]).relu()
        h = h + F.linear(inside, row["pcs.excite.weight"])
    h = torch.sigmoid(h).view(*x.shape[:2], *(1,) * (x.dim() - 2))
    return h * x + x


def hc_layers(classes: int, features: int) -> nn.Module:
    """K, a Gaussian at first whose numbers sum to 1, and V, 2 classes features -> classes."""
    at = torch.arange(KERNEL) - KERNEL // 2
    bell = torch.exp(-(at**2) / (2 * (KERNEL / 6) ** 2))
    kernel, bell = nn.Conv2d(1, 1, KERNEL, bias=False), bell[:, None] * bell
    kernel.weight.data.copy_(bell / bell.sum())
    return nn.ModuleDict({"kernel": kernel, "out": nn.Conv2d(2 * classes * features, classes, 1)})


def pixelwise(weight: Tensor, bias: Tensor | None, z: Tensor) -> Tensor:
    """A linear map of every pixel: weight [C, F] or [C, F, 1, 1], z [B, F, H, W].  # [B, C, H, W]"""
    y = torch.einsum("cf,bfhw->bchw", weight.flatten(1), z)
    return y if bias is None else y + bias[:, None, None]


def uncertainty(heads: dict[str, Tensor], z: Tensor) -> Tensor:
    """Standard deviation (n - 1) over N heads of sigmoid(head_j(z)); of a single head 0.  # [B, C, H, W]"""
    outputs = torch.einsum("ncf,bfhw->nbchw", heads["head.weight"].flatten(2), z)
    if "head.bias" in heads:
        outputs = outputs + heads["head.bias"][:, None, :, None, None]
    return torch.sigmoid(outputs).std(0) if len(outputs) > 1 else torch.zeros_like(outputs[0])


def soft_attention(a: Tensor, kernel: Tensor) -> Tensor:
    """max(minmax(K * a), a), minmax over the pixels of each image, of a [B, C, H, W]."""
    smooth = F.conv2d(a.flatten(0, 1)[:, None], kernel, padding=KERNEL // 2)[:, 0].unflatten(0, a.shape[:2])
    low, high = smooth.amin((-1, -2), keepdim=True), smooth.amax((-1, -2), keepdim=True)
    return torch.maximum((smooth - low) / (high - low + NARROW), a)
