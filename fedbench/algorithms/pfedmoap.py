"""pFedMoAP: a client's prompt beside other clients' prompts, experts that a gate of its own mixes for every image.

Luo, Chen and Wu, ICLR 2025, Algorithm 1.  The server keeps a pool of the prompts last uploaded.  A client with an entry
downloads P_g and the K_e entries nearest to its own.  With I features of an image, T_L text features of its prompt
(from P_g on), T_NL of the experts', s the temperature's inverse:
    T_MoE = MHA(pool(I), [T_L, T_NL], [T_L, T_NL]),   logits = s <pool(I), T_MoE> + lam s <I, T_L>.
It trains its prompt, at lr, and its gate, the attention, at gate_lr, and uploads the prompt.  A client without an entry
trains P_g alone (s <I, T_L>).  Deployed: prompt and gate as trained, with the experts at hand; after rounds without
the client, with those that it would download now; without a trained gate, s <I, T_L>; before its first round, P_g.
Departs from the paper as its released code does: pool keeps every (D/d)-th coordinate; scores are multiplied by 10, not
by 1/sqrt(d/heads); "sim" with T_MoE is an inner product.
Departs from the released code as the paper does: there experts are random, the pool is overwritten within a round,
gates and experts leak from client to client, and clients that are not sampled break it.
Reconstructed, for want of code: gating=linear, softmax(W pool(I) + b) as weights of the experts' own T, slot 0 the
client's, 1..K_e by rank; aggregate_gate, all start from the average of the gates trained in the last round.
Reduces to: FedAvg (PromptFL) in round 1.
"""

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

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
from fedbench.core.linalg import squared_distances
from fedbench.core.options import Count, NonNegative, Positive, require

ENCODED_AT_ONCE = 16  # prompts in one pass of the text tower
MOST_EXPERTS = 10  # of num_experts=null, the paper's
NO_GATE = -1  # in place of a count of experts: the client uses its own prompt alone, without the gate
Gate = Mapping[str, Tensor]  # parameters of k clients by name, [k, ...] each


class PFedMoAP(Algorithm):
    """num_experts: of others and its own, K_e + 1; lam: weight of the local logits; gate_lr: of the gate, constant;
    gating: attention, of `heads` heads and scores times `scale`, or linear; d_feature: d, the gate's width (null:
    min(128, D)); choice: of the experts.

    State: w [P], P_g and the gate from which clients start; prompt [N, l d] and gate [N, |gate|], as client i trained
    them; pool [N, l d], its prompt as uploaded; text [N, C, d] (linear: D), what that prompt is as an expert, its text
    features.  Of the last cohort, last [K]: experts [K, K_e, C, d], the others' text that each client mixed with its
    own, and count [K, 1], how many of the K_e places are filled (NO_GATE: the client did not mix).
    Shapes: K clients of a cohort, K_e = num_others experts beside its own, E = K_e + 1.
    """

    requires, alone = ("prompt",), True

    def __init__(
        self,
        num_experts: Count | None = None,
        lam: NonNegative = 0.5,
        gate_lr: Positive = 0.01,
        gating: Literal["attention", "linear"] = "attention",
        heads: Count = 8,
        scale: Positive = 10.0,
        d_feature: Count | None = None,
        choice: Literal["nearest", "random"] = "nearest",
        aggregate_gate: bool = False,
    ):
        self.num_experts, self.lam, self.gate_lr, self.gating = num_experts, lam, gate_lr, gating
        self.heads, self.scale, self.d_feature = heads, scale, d_feature
        self.choice, self.aggregate_gate = choice, aggregate_gate
        self.last: Any = None  # no cohort yet

    def check(self, federation: Federation, model: FlatModel, optimizer: Optimizer) -> None:
        """A CLIP, as many clients as experts, and a width that features and heads divide."""
        super().check(federation, model, optimizer)
        clip: Any = model.module
        require(hasattr(clip, "text"), "algorithm=pfedmoap mixes text features: it needs model=clip_prompt")
        n, D = federation.num_clients, clip.dim
        require(
            (self.num_experts or 1) <= n,
            f"algorithm.num_experts={self.num_experts} counts a client's own prompt "
            f"and those of others, and there are {n} clients: at most {n}",
        )
        d = self.width(D)
        require(D % d == 0, f"algorithm.d_feature={d} must divide the {D} numbers of the model's features")
        require(
            self.gating == "linear" or d % self.heads == 0,
            f"algorithm.heads={self.heads} must divide the gate's width, algorithm.d_feature={d}",
        )

    def width(self, D: int) -> int:
        """d, of a gate for features of D numbers."""
        return self.d_feature or min(128, D)

    def setup(self, federation: Federation, model: FlatModel, rows: RowStore) -> None:
        """One initial prompt and gate for all; an empty pool."""
        self.clip: Any = model.module
        n = federation.num_clients
        self.d = self.width(self.clip.dim)
        self.num_others = (self.num_experts or min(MOST_EXPERTS, n)) - 1  # K_e
        model.extend(gate=model.keyed(self.new_gate, "gate"))
        self.prompt_columns, self.gate_columns = model.columns["prompt"], model.columns["gate"]
        self.w = model.init_row()  # [P]
        P_g, gate = self.prompt_columns.take(self.w), self.gate_columns.take(self.w)
        self.prompt, self.pool = rows("prompt", default=P_g), rows("pool", default=P_g)  # lazy [N, l d]
        self.gate = rows("gate", default=gate)  # lazy [N, |gate|]
        width = self.d if self.gating == "attention" else self.clip.dim
        self.text = rows("text", default=self.w.new_zeros(self.clip.num_classes, width))  # lazy [N, C, d]

    def new_gate(self) -> nn.Module:
        """Attention: query, key, value, out, 4 (d^2 + d) numbers; linear: (d + 1)(K_e + 1)."""
        d = self.d
        if self.gating == "linear":
            return nn.Linear(d, self.num_others + 1)
        return nn.ModuleDict({name: nn.Linear(d, d) for name in ("query", "key", "value", "out")})  # 4 (d^2 + d)

    def round(self, cohort: Cohort) -> None:
        """Algorithm 1."""
        P_g = cohort.broadcast(prompt=self.prompt_columns.take(self.w)).prompt  # [l d]
        has_entry = np.isin(cohort.ids, self.pool.touched())  # [K]
        experts, count = self.download_experts(cohort, has_entry)
        gated = uses_gate(count)[:, 0]  # [K]
        mixing = cohort.subset(gated.cpu().numpy())
        if self.aggregate_gate:
            gate = mixing.broadcast(gate=self.gate_columns.take(self.w)).gate  # [|gate|]
        else:
            gate = self.gate[cohort.ids]  # [K, |gate|]
        theta = self.train(cohort, self.row(P_g, gate), experts, count)  # [K, P]
        prompt, trained_gate = self.prompt_columns.take(theta), self.gate_columns.take(theta[gated])
        self.prompt[cohort.ids], self.gate[mixing.ids] = prompt, trained_gate
        up = cohort.upload(prompt=prompt, relative_to={"prompt": "prompt"}).prompt  # [K, l d]
        self.pool[cohort.ids], self.text[cohort.ids] = up, self.encode(cohort.model, up)
        self.w = self.prompt_columns.put(self.w, cohort.mean(up))
        if self.aggregate_gate and len(mixing):
            up_gate = mixing.upload(gate=trained_gate, relative_to={"gate": "gate"}).gate
            self.w = self.gate_columns.put(self.w, mixing.mean(up_gate))
        self.last, self.experts, self.count = cohort.index, experts, count

    def row(self, prompt: Tensor, gate: Tensor) -> Tensor:
        """Rows of one or K prompts [..., l d] and gates [..., |gate|].  # [..., P]"""
        return self.prompt_columns.put(self.gate_columns.put(self.w, gate), prompt)

    def train(self, cohort: Cohort, start: Tensor, experts: Tensor, count: Tensor) -> Tensor:
        """Rows after local training from start, [P] or [K, P].  # [K, P]"""
        start = start.expand(len(cohort), -1)
        if not uses_gate(count).any():  # PromptFL: no step of any gate
            return cohort.train(start, columns=self.prompt_columns).theta
        how = LocalTraining(uploaded=True if self.aggregate_gate else self.prompt_columns)  # True: the gate too
        return cohort.train(start, step=self.step, how=how, experts=experts, count=count).theta

    def step(self, s: Step, batch: Batch) -> None:
        """The prompt at lr, the gate at gate_lr."""
        g = s.grad(batch, loss=self.loss)
        s.descend(g, columns=self.prompt_columns)
        s.descend(g, columns=self.gate_columns, lr=self.gate_lr)

    def loss(self, s: Step, rows: Tensor, batch: Batch) -> Tensor:
        """Cross-entropy of the logits.  # [k, B]"""
        return s.task_loss(self.logits(s.model, rows, batch.x, s.state.experts, s.state.count), batch)  # [k, B]

    # -- the server: who gets which experts, in a round and at evaluation ------------------------------------
    def download_experts(self, cohort: Cohort, asks: np.ndarray) -> tuple[Tensor, Tensor]:
        """Experts for the clients that ask, asks [K] (bool, on the host); those have an entry in the pool.

        Returns experts [K, K_e, C, d], the first count [K, 1] of which are there.  count is NO_GATE for clients that do
        not ask, and for all while the pool has no prompt of another client.
        """
        members = self.pool.touched()  # [M]
        available = min(self.num_others, len(members) - 1)
        experts = self.w.new_zeros(len(cohort), self.num_others, *self.text.default.shape)
        if asks.any():
            where = torch.from_numpy(asks).to(experts.device)
            experts[where, :available] = self.fetch_texts(cohort.subset(asks), members, available)
        gate_has_input = available > 0 or self.num_others == 0  # others are there, or none are wanted (num_experts=1)
        count = np.where(asks & gate_has_input, available, NO_GATE)
        return experts, torch.from_numpy(count).to(self.w.device)[:, None]

    def fetch_texts(self, cohort: Cohort, members: np.ndarray, many: int) -> Tensor:
        """Text features of the prompts Q_i that each client of the cohort downloads.  # [k, many, C, d]"""
        Q = self.choose(cohort, members, many)  # [k, many]
        wanted = torch.zeros(len(cohort), len(members), dtype=torch.bool, device=Q.device).scatter_(1, Q, True)
        cohort.fetch(wanted, prompt=self.pool[members])  # prompts travel; what a client would make of them is at hand
        ids = members[Q.cpu().numpy()]  # [k, many]
        return self.text[ids.reshape(-1)].view(*ids.shape, *self.text.default.shape)

    def choose(self, cohort: Cohort, members: np.ndarray, many: int) -> Tensor:
        """Q_i of clients i, members [M]: positions of others in these, nearest first (ties: lower ids).  # [k, many]"""
        if self.choice == "nearest":
            rank_by = squared_distances(self.pool[cohort.ids], self.pool[members])  # [k, M]
        else:  # drawn for all N, whatever the pool holds
            rank_by = cohort.random("experts").uniform(cohort.num_clients)[:, torch.from_numpy(members)]
        itself = torch.from_numpy(np.searchsorted(members, cohort.ids)).to(rank_by.device)
        return rank_by.scatter_(1, itself[:, None], float("inf")).argsort(dim=1, stable=True)[:, :many]

    def encode(self, model: FlatModel, prompts: Tensor) -> Tensor:
        """Text features of prompts [K, l d] as the gate reads them.  # [K, C, d]"""
        contexts = self.clip.context(model.named(self.prompt_columns.put(self.w, prompts)))  # [K, l, d]
        return torch.cat([self.expert_form(self.clip.text(P)) for P in contexts.split(ENCODED_AT_ONCE)])

    # -- the client: logits --------------------------------------------------------------------------------
    def pooled(self, z: Tensor) -> Tensor:
        """Features [..., D] brought to the gate's width.  # [..., d]"""
        return z.unflatten(-1, (self.d, -1))[..., 0]

    def expert_form(self, z: Tensor) -> Tensor:
        """Features [..., D] in the form of experts and so of T_MoE: pooled for attention, as they are for linear."""
        return self.pooled(z) if self.gating == "attention" else z

    def logits(self, model: FlatModel, rows: Tensor, inputs: Inputs, experts: Tensor, count: Tensor) -> Tensor:
        """s <pool(I), T_MoE> + lam s <I, T_L>, or s <I, T_L> of a client without a gate.  # [k, B, C]"""
        p = model.named(rows)
        image, text = self.clip.image(inputs), self.clip.text(self.clip.context(p))  # [k, B, D], [k, C, D]
        local = self.clip.scale * image @ text.mT  # [k, B, C]
        shown = self.expert_form(image)[:, :, None]  # [k, B, 1, d] (linear: D)
        T_MoE, _ = self.mix(p, image, text, experts, count)  # [k, B, C, d] (linear: D)
        mixed = self.clip.scale * (shown * T_MoE).sum(-1)
        return torch.where(uses_gate(count)[..., None], mixed + self.lam * local, local)

    def mix(self, p: Gate, image: Tensor, text: Tensor, experts: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
        """T_MoE [k, B, C, d], and the weight of each expert for each image, the local one first [k, B, K_e + 1]."""
        X = torch.cat([self.expert_form(text)[:, None], experts], 1)  # [k, E, C, d], E = K_e + 1
        # the own one is never missing, without a gate either: a softmax over nothing is nan, in the gradient too
        missing = torch.arange(self.num_others + 1, device=count.device) > count.clamp_min(0)  # [k, E]
        gate = {n.removeprefix("gate."): t for n, t in p.items() if n.startswith("gate.")}
        weigh = self.attention if self.gating == "attention" else self.linear
        return weigh(gate, self.pooled(image), X, missing)

    def attention(self, gate: Gate, image: Tensor, X: Tensor, missing: Tensor) -> tuple[Tensor, Tensor]:
        """MHA(image, X, X) without the missing experts: T_MoE and weights, as `mix` returns them."""

        def by_head(name: str, x: Tensor) -> Tensor:  # [k, n, d] -> [k, h, n, d/h]
            return affine(gate, name, x).unflatten(-1, (self.heads, -1)).transpose(1, 2)

        E, C = X.shape[1:3]
        q = by_head("query.", image)  # [k, h, B, d/h]
        key = by_head("key.", X.flatten(1, 2))  # [k, h, E C, d/h]
        value = by_head("value.", X.flatten(1, 2))  # [k, h, E C, d/h]
        score = (self.scale * q @ key.mT).unflatten(-1, (E, C))  # [k, h, B, E, C]
        a = score.masked_fill(missing[:, None, None, :, None], float("-inf")).softmax(-2)  # over experts
        T = torch.einsum("khbec,khecd->kbchd", a, value.unflatten(2, (E, C))).flatten(-2)  # [k, B, C, d]
        return affine(gate, "out.", T.flatten(1, 2)).view_as(T), a.mean((1, 4))

    def linear(self, gate: Gate, image: Tensor, X: Tensor, missing: Tensor) -> tuple[Tensor, Tensor]:
        """The experts X weighted by softmax(W image + b), as `mix` returns them."""
        w = affine(gate, "", image).masked_fill(missing[:, None], float("-inf")).softmax(-1)  # [k, B, E]
        return torch.einsum("kbe,kecd->kbcd", w, X), w

    # -- what is deployed ------------------------------------------------------------------------------------
    def personalized(self, cohort: Cohort, final: bool) -> dict[str, Tensor]:
        """Prompt, gate and experts as the header says: theta [K, P], experts [K, K_e, C, d], count [K, 1]."""
        P_g = cohort.broadcast(prompt=self.prompt_columns.take(self.w)).prompt  # [l d]
        prompt = torch.where(self.prompt.has(cohort.ids)[:, None], self.prompt[cohort.ids], P_g)  # [K, l d]
        last = np.empty(0, np.int64) if self.last is None else self.last.cpu().numpy()  # ascending
        in_last_cohort = np.isin(cohort.ids, last)  # [K]
        has_gate = np.isin(cohort.ids, self.gate.touched())  # [K]
        experts, count = self.download_experts(cohort, has_gate & ~in_last_cohort)
        if in_last_cohort.any():  # what they trained with
            here, there = np.flatnonzero(in_last_cohort), np.searchsorted(last, cohort.ids[in_last_cohort])
            experts[here], count[here] = self.experts[there], self.count[there]
        return {"theta": self.row(prompt, self.gate[cohort.ids]), "experts": experts, "count": count}

    def predict(self, model: FlatModel, rows: Any, inputs: Inputs) -> Tensor:
        """Logits with the experts at hand.  # [k, b, C]"""
        return self.logits(model, rows["theta"], inputs, rows["experts"], rows["count"])

    def global_row(self) -> Tensor:
        """P_g."""
        return self.w

    def measured(self, cohort: Cohort) -> dict[str, Tensor]:
        """Fig. 6: what the experts contribute."""
        return {"experts": self.contributions(cohort)}

    def contributions(self, cohort: Cohort) -> Tensor:
        """The experts' weights in T_MoE on each client's test images: the local one's, then the others', in descending
        order for each image; averaged over heads, classes and images; nan without a gate (Fig. 6).  # [K, K_e + 1]"""

        def weights(model: FlatModel, rows: dict[str, Tensor], inputs: Inputs) -> Tensor:
            p = model.named(rows["theta"])
            image, text = self.clip.image(inputs), self.clip.text(self.clip.context(p))
            a = self.mix(p, image, text, rows["experts"], rows["count"])[1]  # [k, B, E]
            return torch.cat([a[..., :1], a[..., 1:].sort(-1, descending=True).values], -1)

        deployed = self.personalized(cohort, True)
        each = cohort.forward(deployed, weights)  # [n_i, E] each; of no image one nan
        mean = torch.stack([a.mean(0).expand(self.num_others + 1) for a in each])
        return mean.masked_fill(~uses_gate(deployed["count"]), float("nan"))


def uses_gate(count: Tensor) -> Tensor:
    """Which clients mix experts by their gate, of their counts.  # [K, 1] bool"""
    return count != NO_GATE


def affine(gate: Gate, name: str, x: Tensor) -> Tensor:
    """x [k, n, d] by each client's own layer gate[name + "weight"] [k, m, d].  # [k, n, m]"""
    return torch.baddbmm(gate[f"{name}bias"][:, None], x, gate[f"{name}weight"].mT)
