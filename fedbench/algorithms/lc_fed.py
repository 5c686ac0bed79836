"""LC-Fed: features calibrated per client, and personal heads calibrated by their difference from other clients' heads.

Wang et al., ECCV 2022, for segmentation.  pFedNet's tables call it FedLC.  The networks are those of the released
multi_lcnet.py, which the final training and test scripts import; lc_fed_lcrepnet has the older lcrepnet.py.
PCS (channel selection) follows the bottleneck.  Its weights are shared; its input is the one-hot client
index e.  With m = E(e),
    h = sigmoid(G [avg x; m] + G [max x; m]),  x <- h x + x.
HC (head calibration) is personal.  For every class c, with p_j = sigmoid(head_j(z)) of the last uploaded heads of all N
clients:
    u = sqrt(sum_j (p_j - p_i)^2 / (N - 1)),  u <- u / max u over the image's pixels,
    U = 1 at pixels where u exceeds 0.2 and is the maximum within 31 x 31 pixels, 0 elsewhere,
    A(a) = K * a,  K the fixed Gaussian exp(-r^2 / (2 * 6^2)) on 31 x 31 pixels,
and the calibrated logits are V [A(U_c) z + z, A(sigmoid(head(z)_c)) z + z for every c], V a 3 x 3 convolution.
A round: the first head_iter batches train the head alone, the others the body alone.  After each of these steps HC
takes one step with everything else frozen.  The server averages bodies uniformly and sends all heads to all clients.
Departs from the released code: HC trains in the same rounds (there in a second run, train_hc.py, after the bodies);
losses are the task's (task.loss=dice is the released one), and HC's logits enter the loss without a second sigmoid; all
clients start from one row (there from independent ones); the term that separates the clients' maps h is left out, as
it is by default there.  PCS is trained and averaged, as in the paper; the released layers are in a plain list, so
neither the optimizer nor the average includes them.  U is 0 if all heads agree up to rounding, or N = 1 (there 0 / 0).
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
from fedbench.core.options import NonNegativeInt, listed, require
from fedbench.nn.columns import Columns

REDUCTION = 16  # ratio of input to hidden channels of G
KERNEL = 31  # side of K in pixels, and of the square in which a peak of u is the maximum
SIGMA = 6.0  # standard deviation of K in pixels
MIN_PEAK = 0.2  # minimum of a peak, relative to the largest u of an image
ROUNDING = 1e-6  # maximum difference between outputs of heads that count as equal


class LCFed(Algorithm):
    """LC-Fed.  PCS: shared channel selection; HC (hc): personal head calibration; head: personal; heads: last uploaded.

    Args:
        head_iter: Number of batches of a round that train the head alone.
        place: Name of the layer whose outputs PCS calibrates; None is "bottleneck", or "body" if there is none.
        calibrate_head: Whether clients deploy the outputs of HC instead of those of the head.

    State:
        w: Row whose body and PCS are those of the server, [P].
        heads: Last uploaded heads of all clients, [N, |head|].
        head: Personal heads, [N, |head|].
        hc: Personal head calibration, [N, |hc|].
    """

    depends_on_client_order = "PCS embeds the client index"

    def __init__(self, head_iter: NonNegativeInt = 10, place: str | None = None, calibrate_head: bool = True):
        self.head_iter, self.place, self.calibrate_head = head_iter, place, calibrate_head

    def check(self, federation: Federation, model: FlatModel, optimizer: Optimizer) -> None:
        """Raise ConfigError unless the model has a linear head, and the layer whose outputs PCS scales.

        PCS is channel selection.  Its layer is that of the option place; if this is None, one named bottleneck or body.
        """
        super().check(federation, model, optimizer)
        require_linear_head(model, self._name)
        names = {name for name, _ in model.module.named_modules()}
        require(
            self.place in names or (self.place is None and bool({"bottleneck", "body"} & names)),
            "algorithm.place=null needs a layer named bottleneck or body, which the model does not have: set "
            "algorithm.place to the name of the layer whose outputs PCS calibrates"
            if self.place is None
            else f"algorithm.place={self.place}: the model has no layer of that name. Set it to one of the model's "
            f"layers: {listed(sorted(names - {''}))}",
        )

    def setup(self, federation: Federation, model: FlatModel, rows: RowStore) -> None:
        """Add PCS, HC and columns for a one-hot client index to the model, and create the state, equal for all clients.

        The index is 0 here; each client's 1 is written when its model is put together, in `rows_of`.
        PCS (channel selection) scales the outputs of the layer `place`.  HC (head calibration) corrects the head's
        output.
        """
        n, names = federation.num_clients, {name for name, _ in model.module.named_modules()}
        place = self.place or ("bottleneck" if "bottleneck" in names else "body")
        # one sample, to find the number of channels at `place`
        x, _ = federation.gather(torch.zeros(1, dtype=torch.int64, device=model.device))
        _, outputs = model.capture(model.init_row(), x, [place])  # outputs by layer  [1, channels, H, W]
        channels = outputs[place].shape[1]
        head: Any = model.module.head
        classes, features = head.weight.shape[:2]
        # new columns of each row; "lc_fed" and "lc_fed hc" are keys of the random initial values
        model.extend(
            pcs=model.seeded(lambda: pcs_layers(n, channels), "lc_fed"),
            hc=model.seeded(lambda: self.hc_layers(classes, features), "lc_fed hc"),
            client=torch.zeros(n),
        )
        model.add_hook(place, calibrated)  # PCS changes the outputs of this layer
        self.head_columns = Columns(span for name, span in model.spans.items() if name.startswith("head."))
        self.hc_columns, self.client_columns = model.columns["hc"], model.columns["client"]
        personal = self.head_columns | self.hc_columns | self.client_columns  # columns that are not averaged
        self.body = personal.rest(model.size)  # with PCS, and running statistics
        self.w = model.init_row()  # [P]
        initial_head = self.head_columns.take(self.w)
        self.heads = initial_head.repeat(n, 1)  # as last uploaded; below, as the clients have them  [N, |head|]
        self.head, self.hc = rows("head", default=initial_head), rows("hc", default=self.hc_columns.take(self.w))

    def round(self, cohort: Cohort) -> None:
        """Run one round of LC-Fed: clients train head, body and HC; the server averages bodies and collects heads.

        HC (head calibration) are personal layers that correct the head's output where the clients' heads disagree.  PCS
        (channel selection) is part of the body, and scales features given the client's index.
        """
        server = cohort.broadcast(body=self.body.take(self.w), heads=self.heads)
        theta = self.rows_of(cohort, server.body)  # [K, P]
        uploaded = self.body | self.head_columns
        out = cohort.train(
            theta,
            step=lambda s, batch: self.step(s, batch, server.heads),
            # uploaded: the columns that leave the client, whose gradients privacy clips
            how=LocalTraining(uploaded=uploaded),
        )
        head = self.head_columns.take(out.theta)
        # client states; self.heads below are the heads as the server received them
        self.head[cohort.ids], self.hc[cohort.ids] = head, self.hc_columns.take(out.theta)
        up = cohort.upload(
            body=self.body.take(out.theta),
            head=head,
            relative_to={"body": "body"},  # the change of the received body is sent
            previous={"head": self.heads[cohort.index]},  # the change since the last uploaded head is sent
        )
        # mean_size: K, or with privacy=central its expected value
        self.w = self.body.put(self.w, cohort.sum(up.body) / cohort.mean_size)
        self.heads = self.heads.index_copy(0, cohort.index, up.head)  # cohort.index: the clients' ids

    def rows_of(self, cohort: Cohort, body: Tensor) -> Tensor:
        """Return the sampled clients' whole models: the shared body [|body|], and what belongs to each client.

        This is its head, its HC (layers that correct the head's output) and its id as a one-hot vector [N].

        # [K, P]
        """
        index = one_hot(cohort.index, cohort.num_clients).to(body)  # cohort.index: the clients' ids  [K, N]
        theta = self.body.put(self.w.expand(len(cohort), -1).clone(), body.expand(len(cohort), -1))
        theta = self.client_columns.put(theta, index)
        return self.hc_columns.put(self.head_columns.put(theta, self.head[cohort.ids]), self.hc[cohort.ids])

    def step(self, s: Step, batch: Batch, heads: Tensor) -> None:
        """Take a step on the head (first head_iter batches) or the body, then one on HC, the head calibration.

        Args:
            s: The step.
            batch: One batch of every client.
            heads: Last uploaded heads of all clients.  # [N, |head|]
        """
        # s.t: number of the local step in this round, from 0
        columns = self.head_columns if s.t < self.head_iter else self.body & s.model.trained
        s.descend(s.grad(batch, columns=columns), columns=columns)

        def hc_loss(s: Step, rows: Tensor, batch: Batch) -> Tensor:  # [k, B]
            z = s.features(rows, batch).detach()
            return s.task_loss(self.calibrated_logits(s.model, rows, z, heads), batch)

        gradient = s.grad(batch, loss=hc_loss, columns=self.hc_columns)
        s.descend(gradient, columns=self.hc_columns, uploaded=False)  # HC stays with the client

    def calibrated_logits(self, model: FlatModel, rows: Tensor, z: Tensor, heads: Tensor) -> Tensor:
        """Compute the logits of HC, a convolution V of the features under two kinds of attention maps.

        For each class c there are a map of where the clients' heads disagree, U_c, and the head's own prediction.  V
        reads A(U_c) z + z and A(prediction_c) z + z of all classes, where A smooths a map.  No gradient passes through
        the head's outputs, because a step on HC trains HC alone.

        Args:
            model: The model.
            rows: Rows of k clients.  # [k, P]
            z: Features.  # [k, B, F] or [k, B, F, H, W]
            heads: Last uploaded heads of all clients.  # [N, |head|]

        Returns:
            Logits.  # [k, B, C] or [k, B, C, H, W]
        """
        is_vector = z.dim() == 3
        z = z[..., None, None] if is_vector else z  # a feature vector is an image of one pixel
        # parameters of the heads, of HC, and the index
        named = {name: t for name, t in model.named(rows).items() if name.startswith(("head.", "hc.", "client"))}
        names = [name for name in named if name.startswith("head.")]
        shapes = [named[name].shape[1:] for name in names]
        flat_heads = heads.split([shape.numel() for shape in shapes], 1)  # [N, size] for each parameter of a head
        all_heads = {name: t.view(-1, *shape) for name, t, shape in zip(names, flat_heads, shapes, strict=True)}

        def of_one_client(row: dict[str, Tensor], z: Tensor) -> Tensor:
            """Return HC's logits of one client; all_heads has the parameters of all clients' heads by name.

            Args:
                row: Its parameters of the head and HC by name, and "client", its index.
                z: Features.  # [B, F, H, W]

            Returns:
                Logits.  # [B, C, H, W]
            """
            prediction = torch.sigmoid(pixelwise(row["head.weight"], row.get("head.bias"), z)).detach()
            # where the outputs of all clients' heads for z disagree  [B, C, H, W]
            U = self.uncertainty(outputs_of(all_heads, z), row["client"])
            maps = torch.stack([self.attention(a, row) for a in (U, prediction)], 2)  # [B, C, 2, H, W]
            weighted = maps[:, :, :, None] * z[:, None, None] + z[:, None, None]  # [B, C, 2, F, H, W]
            V = row["hc.out.weight"]
            return F.conv2d(weighted.flatten(1, 3), V, row["hc.out.bias"], padding=V.shape[-1] // 2)

        logits = torch.vmap(of_one_client)(named, z)
        return logits[..., 0, 0] if is_vector else logits

    def hc_layers(self, classes: int, features: int) -> nn.Module:
        """Return the layers of HC, which correct the head's logits.

        Args:
            classes: Number of classes C.
            features: Number F of channels that the head reads.

        Returns:
            {"out": V}, a 3x3 convolution from 2 C F channels, features times two attention maps of each class, to C.
        """
        return nn.ModuleDict({"out": nn.Conv2d(2 * classes * features, classes, 3, padding=1)})

    def uncertainty(self, outputs: Tensor, client: Tensor) -> Tensor:
        """Return the map U of one client i: 1 at pixels where the other heads disagree most with its own.

        The disagreement u is the root mean square of p_j - p_i over the heads, relative to its maximum in the image.  A
        pixel counts if u exceeds 0.2 and is the maximum within 31 x 31 pixels.

        Args:
            outputs: p_j = sigmoid(head_j(z)) of all heads j.  # [N, B, C, H, W]
            client: One-hot index of client i.  # [N]

        Returns:
            U for each class, 0 or 1.  # [B, C, H, W]
        """
        of_client = torch.einsum("n,nbchw->bchw", client, outputs)  # p_i, selected by the one-hot index
        u = ((outputs - of_client).square().sum(0) / max(1, len(outputs) - 1)).sqrt()
        largest = u.amax((-1, -2), keepdim=True)
        u = torch.where(largest > ROUNDING, u / largest, 0)  # 0 if the heads agree up to 1e-6
        # the maximum within KERNEL x KERNEL pixels
        is_peak = u == F.max_pool2d(u, KERNEL, stride=1, padding=KERNEL // 2)
        return (is_peak & (u > MIN_PEAK)).to(u)

    def attention(self, a: Tensor, row: dict[str, Tensor]) -> Tensor:
        """Return A(a) = K * a, the maps smoothed by the fixed Gaussian K of KERNEL x KERNEL pixels.

        Args:
            a: Maps of all classes.  # [B, C, H, W]
            row: The client's parameters by name; unused, because K is fixed.

        Returns:
            The smoothed maps.  # [B, C, H, W]
        """
        offset = torch.arange(KERNEL, device=a.device) - KERNEL // 2
        bell = torch.exp(-(offset**2) / (2 * SIGMA**2))[None, None]  # K is separable  [1, 1, KERNEL]
        images = a.flatten(0, 1)[:, None]
        smoothed_down = F.conv2d(images, bell[..., None], padding=(KERNEL // 2, 0))
        return F.conv2d(smoothed_down, bell[..., None, :], padding=(0, KERNEL // 2))[:, 0].unflatten(0, a.shape[:2])

    def personalized(self, cohort: Cohort, final: bool) -> dict[str, Tensor]:
        """Return what the cohort deploys: the models, and all heads, which HC compares.

        `final`, whether the last round is over, changes nothing.

        Returns:
            theta [K, P], the averaged body with each client's head and HC, and heads [K, N, |head|].
        """
        server = cohort.broadcast(body=self.body.take(self.w), heads=self.heads)
        return {"theta": self.rows_of(cohort, server.body), "heads": server.heads.expand(len(cohort), -1, -1)}

    def predict(self, model: FlatModel, rows: Any, inputs: Inputs) -> Tensor:
        """Return the logits of HC, or with calibrate_head=false those of the head.

        Args:
            model: The model.
            rows: Output of `personalized` for k clients.
            inputs: Inputs of b samples of each client.  # [k, b, ...]

        Returns:
            Logits.  # [k, b, C, ...]
        """
        if not self.calibrate_head:
            return model.forward(rows["theta"], inputs)
        # rows["heads"]: the last uploaded heads of all clients, the same for each of the k clients
        return self.calibrated_logits(model, rows["theta"], model.features(rows["theta"], inputs), rows["heads"][0])


# -- the two plug-ins ------------------------------------------------------------------------------------
def pcs_layers(clients: int, channels: int) -> nn.Module:
    """Return the networks of PCS (channel selection): E from a client index to channels, G from 2 x channels to them.

    E has layers clients -> channels -> channels, G has 2 channels -> channels / 16 -> channels, without biases.
    """
    hidden = max(1, channels // REDUCTION)  # REDUCTION is 16
    return nn.ModuleDict({
        "embed1": nn.Linear(clients, channels, bias=False), "embed2": nn.Linear(channels, channels, bias=False),
        "squeeze": nn.Linear(2 * channels, hidden, bias=False), "excite": nn.Linear(hidden, channels, bias=False),
    })  # fmt: skip


def calibrated(x: Tensor, row: dict[str, Tensor]) -> Tensor:
    """Scale the channels of one client's features by PCS: x <- h x + x, where h depends on x and the client.

    h = sigmoid(G [mean of x; m] + G [maximum of x; m]) with m = E(client index).  The network E has the layers embed1
    and embed2, and G has squeeze and excite.

    Args:
        x: Outputs of the calibrated layer.  # [B, C] or [B, C, H, W]
        row: The client's parameters by name, with its one-hot index "client" [N].

    Returns:
        Calibrated features, of the shape of x.
    """
    embedded = F.linear(row["client"], row["pcs.embed1.weight"]).relu()
    m = F.linear(embedded, row["pcs.embed2.weight"]).expand(x.shape[:2])  # [B, C]
    pixels = x.flatten(2) if x.dim() > 2 else x[..., None]  # [B, C, H W]
    h = torch.zeros_like(m)
    for pooled in (pixels.mean(2), pixels.amax(2)):
        hidden = F.linear(torch.cat([pooled, m], 1), row["pcs.squeeze.weight"]).relu()
        h = h + F.linear(hidden, row["pcs.excite.weight"])
    h = torch.sigmoid(h).view(*x.shape[:2], *(1,) * (x.dim() - 2))
    return h * x + x


def pixelwise(weight: Tensor, bias: Tensor | None, z: Tensor) -> Tensor:
    """Apply a linear map to every pixel of an image.

    Args:
        weight: The map.  # [C, F] or [C, F, 1, 1]
        bias: Its bias [C], or None.
        z: The images.  # [B, F, H, W]

    Returns:
        The mapped images.  # [B, C, H, W]
    """
    y = torch.einsum("cf,bfhw->bchw", weight.flatten(1), z)
    return y if bias is None else y + bias[:, None, None]


def outputs_of(heads: dict[str, Tensor], z: Tensor) -> Tensor:
    """Return the class probabilities of all N heads for the same features.

    Args:
        heads: "head.weight" [N, C, F] or [N, C, F, 1, 1], and "head.bias" [N, C] if heads have a bias.
        z: Features of images.  # [B, F, H, W]

    Returns:
        sigmoid(head_j(z)).  # [N, B, C, H, W]
    """
    outputs = torch.einsum("ncf,bfhw->nbchw", heads["head.weight"].flatten(2), z)
    if "head.bias" in heads:
        outputs = outputs + heads["head.bias"][:, None, :, None, None]
    return torch.sigmoid(outputs)
