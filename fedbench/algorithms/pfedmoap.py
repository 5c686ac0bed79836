"""pFedMoAP: mixture of experts; a personal gate mixes the client's prompt with other clients' prompts for every image.

Luo, Chen and Wu, ICLR 2025, Algorithm 1.  The server has a pool of the last uploaded prompts.  A client with an entry
downloads P_g and the K_e entries nearest to its own.  With I the features of an image, T_L the text features of the
client's prompt (initialized to P_g), T_NL those of the experts and s the inverse temperature:
    T_MoE = MHA(pool(I), [T_L, T_NL], [T_L, T_NL]),   logits = s <pool(I), T_MoE> + lam s <I, T_L>.
The client trains its prompt with lr and its gate (the attention) with gate_lr, and uploads the prompt.  A client
without an entry trains P_g alone (s <I, T_L>).
Deployed: the client's prompt and gate as trained.  The experts are those of the last round if the client took part in
it, else those that it would download now.  Without a trained gate a client uses s <I, T_L>, and before its first round
P_g.
Departs from the paper, as its released code does: pool selects every (D/d)-th coordinate; scores are multiplied by 10,
not by 1/sqrt(d/heads); "sim" with T_MoE is an inner product.
Departs from the released code, following the paper: there experts are random, the pool is overwritten within a round,
gates and experts leak from client to client, and partial participation fails.
Reconstructed, without released code: gating=linear uses softmax(W pool(I) + b) as weights of the experts' text
features, with slot 0 for the client's prompt and 1..K_e by rank; with aggregate_gate, all clients start from the
average of the gates trained in the last round.
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
MOST_EXPERTS = 10  # maximum number of experts with num_experts=null, as in the paper
NO_GATE = -1  # count of experts of a client that uses its prompt alone, without the gate
Gate = Mapping[str, Tensor]  # parameters of the gates of k clients by name, [k, ...] each


class PFedMoAP(Algorithm):
    """pFedMoAP.  K_e (num_others): experts besides the client's prompt, E = K_e + 1; clip: the model; P_g: mean prompt.

    Args:
        num_experts: E; None is the smaller of 10 and the number of clients.
        lam: Weight of the logits of the client's prompt, >= 0.
        gate_lr: Learning rate of the gate, constant over the rounds.
        gating: "attention" or "linear".
        heads: Number of attention heads.
        scale: Factor of the attention scores.
        d_feature: Width d of the gate; None is min(128, D) for features of width D.
        choice: Experts: the "nearest" prompts in the pool, or "random" ones.
        aggregate_gate: Whether the gates are averaged too.

    State:
        w: P_g and the gate from which clients start, [P].
        prompt: Prompts as last trained, [N, l d].
        gate: Gates as last trained, [N, |gate|].
        pool: Prompts as last uploaded, [N, l d].
        text: Text features of the pool's prompts as experts, [N, C, d] (linear: [N, C, D]).
        last: Client indices of the last cohort, [K].
        experts: Text features that each client of the last cohort mixed with those of its prompt, [K, K_e, C, d].
        count: How many of these K_e experts exist, [K, 1]; NO_GATE if the client did not use its gate.
    """

    requires = ("prompt",)
    exclusive_columns = True

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
        self.last: Any = None  # before the first round

    def check(self, federation: Federation, model: FlatModel, optimizer: Optimizer) -> None:
        """Raise ConfigError unless the model is CLIP with a learned prompt, and the options of the gate fit it.

        num_experts must be at most the number of clients, d_feature must divide the width of CLIP's features, and heads
        must divide d_feature.
        """
        super().check(federation, model, optimizer)
        clip: Any = model.module
        require(
            hasattr(clip, "text"),
            "algorithm=pfedmoap mixes text features, so it needs model=clip_prompt, but this model has no text tower: "
            "set model=clip_prompt",
        )
        n, D = federation.num_clients, clip.dim
        require(
            (self.num_experts or 1) <= n,  # None fits any number of clients
            f"algorithm.num_experts={self.num_experts} counts the prompts of different clients, and there are only {n} "
            f"clients: set it to at most {n}",
        )
        d = self.width(D)  # width of the gate's inputs
        require(
            D % d == 0,
            f"algorithm.d_feature={d} must divide the {D} dimensions of the model's features: set it to a divisor of "
            f"{D}",
        )
        require(
            self.gating == "linear" or d % self.heads == 0,
            f"algorithm.heads={self.heads} must divide the gate's width, algorithm.d_feature={d}: set "
            f"algorithm.heads to a divisor of {d}",
        )

    def width(self, D: int) -> int:
        """Return the width d of the gate for features of width D: the option d_feature; if it is None, min(128, D)."""
        return self.d_feature or min(128, D)

    def setup(self, federation: Federation, model: FlatModel, rows: RowStore) -> None:
        """Create the state: one initial prompt and gate for all clients, and an empty pool of prompts.

        The pool has each client's prompt as last uploaded, and `text` the text features of that prompt.
        """
        self.clip: Any = model.module
        n = federation.num_clients
        self.d = self.width(self.clip.dim)  # width of the gate's inputs
        # K_e; with num_experts=null, there are MOST_EXPERTS = 10 experts, or as many as clients
        self.num_others = (self.num_experts or min(MOST_EXPERTS, n)) - 1
        model.extend(gate=model.seeded(self.new_gate, "gate"))  # new columns "gate" in every row
        self.prompt_columns, self.gate_columns = model.columns["prompt"], model.columns["gate"]
        self.w = model.init_row()  # [P]
        P_g, gate = self.prompt_columns.take(self.w), self.gate_columns.take(self.w)
        self.prompt, self.pool = rows("prompt", default=P_g), rows("pool", default=P_g)  # [N, l d]
        self.gate = rows("gate", default=gate)  # [N, |gate|]; a row equals the default until it is set
        width = self.d if self.gating == "attention" else self.clip.dim  # of text features as the gate reads them
        self.text = rows("text", default=self.w.new_zeros(self.clip.num_classes, width))  # [N, C, d]

    def new_gate(self) -> nn.Module:
        """Return a new gate: the linear layers query, key, value and out of attention; with gating="linear", one layer.

        The one layer maps the d features of an image to weights of the E experts.
        """
        d = self.d
        if self.gating == "linear":
            return nn.Linear(d, self.num_others + 1)
        return nn.ModuleDict({name: nn.Linear(d, d) for name in ("query", "key", "value", "out")})

    def round(self, cohort: Cohort) -> None:
        """Run one round of pFedMoAP: clients download experts, train prompt and gate, and upload the prompt.

        The pool has the last uploaded prompt of each client, its entry.  Experts are prompts of other clients, and the
        gate is a personal network that weights them.  P_g is the averaged prompt.
        """
        P_g = cohort.broadcast(prompt=self.prompt_columns.take(self.w)).prompt  # [l d]
        has_entry = np.isin(cohort.ids, self.pool.touched())  # whether each client has uploaded a prompt before  [K]
        # text features of each client's experts, and how many it has (NO_GATE: it uses its prompt alone)
        experts, count = self.download_experts(cohort, has_entry)
        gated = uses_gate(count)[:, 0]  # [K] bool
        mixing = cohort.subset(gated.cpu().numpy())  # the clients that use their gate
        if self.aggregate_gate:  # the server averages gates, too; else they are personal
            gate = mixing.broadcast(gate=self.gate_columns.take(self.w)).gate  # [|gate|]
        else:
            gate = self.gate[cohort.ids]  # [K, |gate|]
        theta = self.train(cohort, self.row(P_g, gate), experts, count)  # [K, P]
        prompt, trained_gate = self.prompt_columns.take(theta), self.gate_columns.take(theta[gated])
        self.prompt[cohort.ids], self.gate[mixing.ids] = prompt, trained_gate  # client states
        # the difference from the broadcast prompt P_g is sent, and the server adds P_g again
        up = cohort.upload(prompt=prompt, relative_to={"prompt": "prompt"}).prompt  # [K, l d]
        # the pool stores the uploaded prompts and their text features
        self.pool[cohort.ids], self.text[cohort.ids] = up, self.encode(cohort.model, up)
        self.w = self.prompt_columns.put(self.w, cohort.mean(up))
        if self.aggregate_gate and len(mixing):
            up_gate = mixing.upload(gate=trained_gate, relative_to={"gate": "gate"}).gate
            self.w = self.gate_columns.put(self.w, mixing.mean(up_gate))
        self.last, self.experts, self.count = cohort.index, experts, count  # for deployment

    def row(self, prompt: Tensor, gate: Tensor) -> Tensor:
        """Return whole models [..., P] with given prompts [..., l d] and gates [..., |gate|]; the rest is frozen."""
        return self.prompt_columns.put(self.gate_columns.put(self.w, gate), prompt)

    def train(self, cohort: Cohort, start: Tensor, experts: Tensor, count: Tensor) -> Tensor:
        """Train the prompts, and the gates of clients with experts.

        Args:
            cohort: The clients.
            start: Rows before training, one for all [P] or one each [K, P].
            experts: Text features of the experts.  # [K, K_e, C, d]
            count: How many experts each client has; NO_GATE (-1) if it uses its prompt alone.  # [K, 1]

        Returns:
            The trained rows.  # [K, P]
        """
        start = start.expand(len(cohort), -1)
        if not uses_gate(count).any():  # as in PromptFL, only prompts are trained
            return cohort.train(start, columns=self.prompt_columns).theta
        # uploaded: the columns that leave the client, whose gradients privacy clips
        how = LocalTraining(uploaded=True if self.aggregate_gate else self.prompt_columns)  # True: the gate too
        return cohort.train(start, step=self.step, how=how, experts=experts, count=count).theta

    def step(self, s: Step, batch: Batch) -> None:
        """Take one local step on the prompt, with the run's learning rate, and on the gate, with the option gate_lr."""
        g = s.grad(batch, loss=self.loss)
        s.descend(g, columns=self.prompt_columns)
        s.descend(g, columns=self.gate_columns, lr=self.gate_lr)

    def loss(self, s: Step, rows: Tensor, batch: Batch) -> Tensor:
        """Return the task's loss of each sample, from logits in which a client's gate mixes its experts.

        Args:
            s: The local step of k clients, with their experts in s.state.
            rows: Their models.  # [k, P]
            batch: One batch of B samples of every client.

        Returns:
            Loss of each sample.  # [k, B]
        """
        return s.task_loss(self.logits(s.model, rows, batch.x, s.state.experts, s.state.count), batch)  # [k, B]

    # -- the server: selection of experts ----------------------------------------------------------------------
    def download_experts(self, cohort: Cohort, requests: np.ndarray) -> tuple[Tensor, Tensor]:
        """Download experts to the requesting clients, all of which must have an entry in the pool.

        Args:
            cohort: The clients.
            requests: Which of them download experts.  # [K] bool, on the host

        Returns:
            Text features of the experts [K, K_e, C, d], and how many of them exist [K, 1].  The count is NO_GATE for
            clients without a request, and for all clients if the pool has no prompt of another client.
        """
        members = self.pool.touched()  # ids of clients with an entry in the pool  [M]
        available = min(self.num_others, len(members) - 1)  # experts that each client can get
        experts = self.w.new_zeros(len(cohort), self.num_others, *self.text.default.shape)
        if requests.any():
            where = torch.from_numpy(requests).to(experts.device)  # [K] bool, on the device
            experts[where, :available] = self.fetch_texts(cohort.subset(requests), members, available)
        gate_has_input = available > 0 or self.num_others == 0  # with num_experts=1 no other expert is needed
        count = np.where(requests & gate_has_input, available, NO_GATE)
        return experts, torch.from_numpy(count).to(self.w.device)[:, None]

    def fetch_texts(self, cohort: Cohort, members: np.ndarray, count: int) -> Tensor:
        """Download prompts of the pool to each client, and return their text features.

        Args:
            cohort: The clients, all of which have an entry in the pool.
            members: Ids of the clients that have an entry in the pool, ascending.  # [M]
            count: Number of prompts for each client.

        Returns:
            Text features of the prompts.  # [k, count, C, d]
        """
        Q = self.choose(cohort, members, count)  # positions in members  [k, count]
        selected = torch.zeros(len(cohort), len(members), dtype=torch.bool, device=Q.device).scatter_(1, Q, value=True)
        cohort.fetch(selected, prompt=self.pool[members])  # prompts are transmitted; their text features are cached
        ids = members[Q.cpu().numpy()]  # [k, count]
        return self.text[ids.reshape(-1)].view(*ids.shape, *self.text.default.shape)

    def choose(self, cohort: Cohort, members: np.ndarray, count: int) -> Tensor:
        """Select the experts Q_i of each client among the pool's members, but not the client's own entry.

        The nearest prompt comes first; among equally near ones, that of the lower id.

        Args:
            cohort: The clients, all of which have an entry in the pool.
            members: Ids of the clients that have an entry in the pool, ascending.  # [M]
            count: Number of experts for each client.

        Returns:
            Positions in members.  # [k, count]
        """
        if self.choice == "nearest":
            rank_by = squared_distances(self.pool[cohort.ids], self.pool[members])  # [k, M]
        else:  # drawn for all N clients, so the draws do not depend on the pool
            rank_by = cohort.random("experts").uniform(cohort.num_clients)[:, torch.from_numpy(members)]
        # position of each client's own entry  [k]
        itself = torch.from_numpy(np.searchsorted(members, cohort.ids)).to(rank_by.device)
        return rank_by.scatter_(1, itself[:, None], float("inf")).argsort(dim=1, stable=True)[:, :count]

    def encode(self, model: FlatModel, prompts: Tensor) -> Tensor:
        """Return the text features of prompts as the gate reads them.

        Args:
            model: The model.
            prompts: The prompts of K clients, flat.  # [K, l d]

        Returns:
            One feature for each class; of width D with gating="linear".  # [K, C, d]
        """
        contexts = self.clip.context(model.named(self.prompt_columns.put(self.w, prompts)))  # [K, l, d]
        # a few prompts at a time, to limit memory
        return torch.cat([self.expert_form(self.clip.text(part)) for part in contexts.split(ENCODED_AT_ONCE)])

    # -- the client: logits --------------------------------------------------------------------------------
    def pooled(self, z: Tensor) -> Tensor:
        """Return every (D/d)-th number of features [..., D], starting with the first; d is the gate's width.

        # [..., d]
        """
        return z.unflatten(-1, (self.d, -1))[..., 0]

    def expert_form(self, z: Tensor) -> Tensor:
        """Return text features [..., D] as experts are stored: reduced to the gate's width, [..., d].

        With gating="linear" they are unchanged.
        """
        return self.pooled(z) if self.gating == "attention" else z

    def logits(self, model: FlatModel, rows: Tensor, inputs: Inputs, experts: Tensor, count: Tensor) -> Tensor:
        """Return the logits of the mixed text features plus lam times those of the client's own prompt.

        Clients without a gate use their own prompt alone.

        Args:
            model: The model.
            rows: Rows with the clients' prompts and gates.  # [k, P]
            inputs: Images, or features of the frozen image tower.
            experts: Text features of the experts.  # [k, K_e, C, d]
            count: How many experts exist; NO_GATE (-1) if the client uses its prompt alone.  # [k, 1]

        Returns:
            Logits.  # [k, B, C]
        """
        named = model.named(rows)  # the clients' parameters by name
        image, text = self.clip.image(inputs), self.clip.text(self.clip.context(named))  # [k, B, D], [k, C, D]
        local = self.clip.scale * image @ text.mT  # [k, B, C]
        # features as experts are stored: of size d, or with gating="linear" of size D
        pooled = self.expert_form(image)[:, :, None]  # [k, B, 1, d]
        T_MoE, _ = self.mix(named, image, text, experts, count)  # [k, B, C, d]
        mixed = self.clip.scale * (pooled * T_MoE).sum(-1)
        return torch.where(uses_gate(count)[..., None], mixed + self.lam * local, local)

    def mix(self, named: Gate, image: Tensor, text: Tensor, experts: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
        """Mix the text features of the client's prompt and of the experts, with weights by the gate and the image.

        Args:
            named: Parameters of k clients by name.
            image: Image features.  # [k, B, D]
            text: Text features of the clients' prompts.  # [k, C, D]
            experts: Text features of the experts.  # [k, K_e, C, d]
            count: How many experts exist; NO_GATE (-1) if the client uses its prompt alone.  # [k, 1]

        Returns:
            Mixed text features T_MoE [k, B, C, d], and the weights of the client's prompt and the K_e experts [k, B,
            E].
        """
        # expert_form: the features reduced to the gate's width d, as those of experts are stored
        X = torch.cat([self.expert_form(text)[:, None], experts], 1)  # [k, E, C, d]
        # the client's prompt always counts, because a softmax over no expert has nan gradients, even if it is not used
        missing = torch.arange(self.num_others + 1, device=count.device) > count.clamp_min(0)  # [k, E]
        # parameters of the gate only
        gate = {n.removeprefix("gate."): t for n, t in named.items() if n.startswith("gate.")}
        apply_gate = self.attention if self.gating == "attention" else self.linear
        return apply_gate(gate, self.pooled(image), X, missing)  # pooled: every (D/d)-th number of the features

    def attention(self, gate: Gate, image: Tensor, X: Tensor, missing: Tensor) -> tuple[Tensor, Tensor]:
        """Mix the experts by multi-head attention with h heads, from each image to the experts of each class.

        Args:
            gate: Parameters of the clients' gates by name, without "gate.".
            image: Pooled image features.  # [k, B, d]
            X: Text features of the client's prompt and of the experts.  # [k, E, C, d]
            missing: Which experts do not exist; they get weight 0.  # [k, E] bool

        Returns:
            T_MoE [k, B, C, d], and the weights of the experts, averaged over heads and classes [k, B, E].
        """

        def by_head(name: str, x: Tensor) -> Tensor:  # [k, n, d] -> [k, h, n, d/h]
            # affine: the linear layer `name` of each client's gate
            return affine(gate, name, x).unflatten(-1, (self.heads, -1)).transpose(1, 2)

        E, C = X.shape[1:3]
        q = by_head("query.", image)  # [k, h, B, d/h]
        key = by_head("key.", X.flatten(1, 2))  # [k, h, E C, d/h]
        value = by_head("value.", X.flatten(1, 2))  # [k, h, E C, d/h]
        # scale: the option, in place of the usual 1 / sqrt(d/h)
        score = (self.scale * q @ key.mT).unflatten(-1, (E, C))  # [k, h, B, E, C]
        a = score.masked_fill(missing[:, None, None, :, None], float("-inf")).softmax(-2)  # over experts
        # weighted values of all heads side by side
        T = torch.einsum("khbec,khecd->kbchd", a, value.unflatten(2, (E, C))).flatten(-2)  # [k, B, C, d]
        return affine(gate, "out.", T.flatten(1, 2)).view_as(T), a.mean((1, 4))

    def linear(self, gate: Gate, image: Tensor, X: Tensor, missing: Tensor) -> tuple[Tensor, Tensor]:
        """Mix the experts X with the weights softmax(W image + b), and return also the weights.

        Args:
            gate: Parameters of the clients' gates by name: weight (W) and bias (b).
            image: Pooled image features.  # [k, B, d]
            X: Text features of the client's prompt and of the experts.  # [k, E, C, D]
            missing: Which experts do not exist; they get weight 0.  # [k, E] bool

        Returns:
            The mixed text features [k, B, C, D], and the weights [k, B, E].
        """
        # affine: W image + b
        w = affine(gate, "", image).masked_fill(missing[:, None], float("-inf")).softmax(-1)  # [k, B, E]
        return torch.einsum("kbe,kecd->kbcd", w, X), w

    # -- what is deployed ------------------------------------------------------------------------------------
    def personalized(self, cohort: Cohort, final: bool) -> dict[str, Tensor]:
        """Return what the cohort deploys: prompts, gates and the experts that the gates mix.

        Clients of the last round use the experts that they trained with; others with a gate download experts now.
        `final`, whether the last round is over, changes nothing.

        Returns:
            theta [K, P], experts [K, K_e, C, d] and count [K, 1]: how many experts exist, NO_GATE (-1) if the client
            uses its prompt alone.
        """
        P_g = cohort.broadcast(prompt=self.prompt_columns.take(self.w)).prompt  # [l d]
        prompt = torch.where(self.prompt.has(cohort.ids)[:, None], self.prompt[cohort.ids], P_g)  # [K, l d]
        last = np.empty(0, np.int64) if self.last is None else self.last.cpu().numpy()  # ascending
        in_last_cohort = np.isin(cohort.ids, last)  # [K]
        has_gate = np.isin(cohort.ids, self.gate.touched())  # [K]
        experts, count = self.download_experts(cohort, has_gate & ~in_last_cohort)
        if in_last_cohort.any():  # these clients use the experts that they trained with
            # positions of these clients in the cohort, and in the last cohort
            to, source = np.flatnonzero(in_last_cohort), np.searchsorted(last, cohort.ids[in_last_cohort])
            experts[to], count[to] = self.experts[source], self.count[source]
        return {"theta": self.row(prompt, self.gate[cohort.ids]), "experts": experts, "count": count}

    def predict(self, model: FlatModel, rows: Any, inputs: Inputs) -> Tensor:
        """Return the logits for b samples of each client, by its prompt, and by its gate if it has one.

        Args:
            model: The model.
            rows: Output of `personalized` for k clients: their models "theta" [k, P], "experts" and "count".
            inputs: Image features, or a dict with them as "image".  # [k, b, D]

        Returns:
            Logits.  # [k, b, C]
        """
        return self.logits(model, rows["theta"], inputs, rows["experts"], rows["count"])

    def global_row(self) -> Tensor:
        """Return the server model: the averaged prompt P_g, and the gate from which all clients start.  # [P]"""
        return self.w

    def measured(self, cohort: Cohort) -> dict[str, Tensor]:
        """Return {"experts": the mean weight of each expert on each client's test images} (Fig. 6).  # [K, E]

        The client's prompt comes first; nan for clients without a gate or without images."""
        return {"experts": self.contributions(cohort)}

    def contributions(self, cohort: Cohort) -> Tensor:
        """Compute each expert's mean weight in T_MoE on each client's test images (the paper's Fig. 6).

        The client's prompt comes first, then the other experts, sorted by weight for each image.  Weights are averaged
        over heads, classes and images.

        Args:
            cohort: The clients.

        Returns:
            Weights; nan for clients without a gate or without images.  # [K, E]
        """

        def weights(model: FlatModel, rows: dict[str, Tensor], inputs: Inputs) -> Tensor:
            """Return the weight of each expert for each image of inputs, under rows as returned by `personalized`.

            The client's prompt comes first, then the other experts, sorted from the largest weight.  # [k, B, E]
            """
            named = model.named(rows["theta"])  # the clients' parameters by name
            image, text = self.clip.image(inputs), self.clip.text(self.clip.context(named))
            _, by_expert = self.mix(named, image, text, rows["experts"], rows["count"])  # [k, B, E]
            return torch.cat([by_expert[..., :1], by_expert[..., 1:].sort(-1, descending=True).values], -1)

        deployed = self.personalized(cohort, final=True)
        each = cohort.forward(deployed, weights)  # [n_i, E] each; a single nan without images
        mean = torch.stack([a.mean(0).expand(self.num_others + 1) for a in each])
        return mean.masked_fill(~uses_gate(deployed["count"]), float("nan"))


def uses_gate(count: Tensor) -> Tensor:
    """Return whether each client uses its gate: its number of experts, count [K, 1], is not NO_GATE (-1).

    # [K, 1] bool
    """
    return count != NO_GATE


def affine(gate: Gate, name: str, x: Tensor) -> Tensor:
    """Apply each client's own linear layer.

    Args:
        gate: Parameters by name: f"{name}weight" [k, m, d] and f"{name}bias" [k, m].
        name: What the layer's names begin with, such as "query."; "" for linear gating.
        x: Inputs.  # [k, n, d]

    Returns:
        Outputs.  # [k, n, m]
    """
    return torch.baddbmm(gate[f"{name}bias"][:, None], x, gate[f"{name}weight"].mT)
