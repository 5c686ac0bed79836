"""FedPIA: the hidden units of adapters are aligned before adapters are averaged, at the server and at the clients.

Saha et al., AAAI 2025 (no code exists; its Algorithm 1 is in a supplement that is not public).  For every bottleneck,
align(mover, anchor) reorders the mover's units at minimal cost (fedbench/algorithms/_alignment.py):
server:  G0 = sum_k p_k w_k;  w~_k = align(w_k, G0), by the distance of incoming weights;
         G = sum_k q_k w~_k,  q_k ~ exp(-gamma ||w~_k - G0||);
client:  G~ = align(G, w_k), by the distance of the units' activations on a local batch;
         trains w in  w_eff = (1 - lam) w + lam G~,  G~ frozen, from w = w_k;  stores and uploads w_k <- w_eff.
The head is trained too and is personal.
combine=output_sum adds outputs instead of weights, and needs two bottlenecks in each layer (adapter.twin=true):
client:  trains w in  f(x; (w + G~) / 2),  G~ frozen, from w = w_k;  stores w_k <- w with G~, and uploads w_k.
The paper's "combining" may also mean this.  The order of G~'s units then does not change any output, so alignment at
the clients has no effect.  lam is 1/2, as in FedDAT's mixture.
Departs from the paper: for each bottleneck, q sums to 1 over the clients, because with the printed exp(-gamma d) / K
G would shrink towards 0 in every round.  The paper has no formula for "combining" w_k and G~.  Here weights are
combined, because only in weight space does the order of units matter.  A unit is described by its activations on every
sample, not by their mean.  Parameters outside bottlenecks are averaged with p, the run's client weights.
The activation on a sample is the mean over its tokens, padding included, before the nonlinearity.  In CLIP's text
tower, which reads only class names, a unit has an activation for each class.
Reduces to: FedPer with server=average, client=none.
"""

from __future__ import annotations

import fnmatch
from types import SimpleNamespace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fedbench.algorithms import _alignment as alignment
from fedbench.algorithms._paired_adapters import columns_of_pairs
from fedbench.algorithms.base import (
    Algorithm,
    Batch,
    Cohort,
    Columns,
    Federation,
    FlatModel,
    Inputs,
    LocalTraining,
    Optimizer,
    RowStore,
    Step,
)
from fedbench.core.inputs import wrap_inputs
from fedbench.core.options import Count, NonNegative, UnitInterval, require


class FedPIA(Algorithm):
    """FedPIA.  G, w_k [A]: adapters of server and client k, in the columns shared: all but head and second bottlenecks.

    Args:
        lam: Weight of G~ in the combined adapter, in [0, 1).
        gamma: How fast q_k falls with the distance from G0, >= 0; 0 gives uniform weights.
        server: "align", or "average" without alignment.
        client: "align"; "identity", combined without alignment; or "none", training starts from G as in FedPer.
        cost: Cost of the clients' alignment: distance of activations ("activation") or of incoming weights ("weight").
        samples: Number of training samples for the activations, drawn in every round.
        combine: "weight_frozen" combines weights, "output_sum" adds outputs.
        init: "common", one initial adapter, or "per_client", an independent one for each client.

    State:
        G: Server's adapter, [A].
        personal: w_k and the personal head, [N, P]; with output_sum, G~ in the second bottlenecks.
        uploaded: w_k as the server has it, [N, A].
    """

    requires = ("head",)
    has_base = True

    def __init__(
        self,
        lam: UnitInterval = 0.5,
        gamma: NonNegative = 1.0,
        server: Literal["align", "average"] = "align",
        client: Literal["align", "identity", "none"] = "align",
        cost: Literal["activation", "weight"] = "activation",
        samples: Count = 16,
        combine: Literal["weight_frozen", "output_sum"] = "weight_frozen",
        init: Literal["common", "per_client"] = "common",
    ):
        adds_outputs = combine == "output_sum"
        require(
            not adds_outputs or client != "none",
            "algorithm.combine=output_sum needs a personal adapter, which algorithm.client=none does not have: set "
            "algorithm.client=align or identity, or algorithm.combine=weight_frozen",
        )
        require(
            not adds_outputs or lam == 0.5,
            f"algorithm.lam={lam} must be 0.5 with algorithm.combine=output_sum, which averages the outputs of two "
            "adapters: set algorithm.lam=0.5, or algorithm.combine=weight_frozen",
        )
        self.lam, self.gamma, self.server, self.client, self.cost = lam, gamma, server, client, cost
        self.samples, self.combine, self.init = samples, combine, init

    def check(self, federation: Federation, model: FlatModel, optimizer: Optimizer) -> None:
        """Raise ConfigError unless the model has bottleneck adapters; with combine="output_sum", two per layer."""
        super().check(federation, model, optimizer)
        require(
            bool(alignment.bottlenecks_of(model, model.without("head"))),
            "algorithm=fedpia aligns the hidden units of bottlenecks, and this model has none: use "
            "adapter=houlsby, pfeiffer, parallel or compacter",
        )
        require(
            self.combine != "output_sum" or bool(columns_of_pairs(model)[1]),  # columns of second bottlenecks
            "algorithm.combine=output_sum needs two adapters in each layer, and this model has one: set "
            "adapter.twin=true, or algorithm.combine=weight_frozen",
        )

    def setup(self, federation: Federation, model: FlatModel, rows: RowStore) -> None:
        """Set the server's adapter G [A] and the clients' models [N, P] to the initial model, and the statistics to 0.

        With init="per_client" each client's adapter gets random values of its own.  `rows` stores the clients' models.
        """
        no_pairs = (Columns([]), Columns([]))  # without output_sum no layer has a second bottleneck
        # columns of first and second bottlenecks
        self.first, self.second = columns_of_pairs(model) if self.combine == "output_sum" else no_pairs
        # columns of the adapter and others: all but the head and the second bottlenecks
        self.shared = (model.columns["head"] | self.second).rest(model.size)
        self.head = model.columns["head"]  # columns of the head in a row
        w = self.initial = model.init_row()  # [P]
        self.G = self.shared.take(w).clone()  # [A]
        # each client's w_k and head as last trained [N, P], and w_k as last uploaded [N, A]; at first the default
        self.personal, self.uploaded = rows("own", default=w), rows("sent", default=self.G)
        if self.init == "per_client":
            everybody = np.arange(federation.num_clients)
            # one random initial adapter per client; "fedpia": key of the random numbers  [N, A]
            each = self.shared.take(model.init_rows(federation.num_clients, "fedpia"))
            self.personal[everybody] = self.shared.put(w.expand(len(each), -1), each)
        self.bottlenecks = alignment.bottlenecks_of(model, self.shared)
        n, S = federation.num_clients, len(self.bottlenecks)
        # of each client's last round: share of moved units, mean costs, weights q in G, first and last loss
        self.moved_server, self.moved_client, self.first_loss, self.last_loss = (torch.zeros(n) for _ in range(4))
        self.cost_server, self.cost_client = torch.zeros(n, 2), torch.zeros(n, 2)  # before and after alignment
        self.q = torch.zeros(n, S)

    def round(self, cohort: Cohort) -> None:
        """Run one round of FedPIA: clients combine their adapters with G and train; the server aligns and averages.

        G is the server's adapter, w_k that of client k.  Aligning reorders the hidden units of one adapter so that they
        match those of the other.
        """
        G = cohort.broadcast(G=self.G).G  # [A]
        personal = self.personal[cohort.ids]  # [K, P]
        # clients start from adapters of their own (option init), and G is not an average of them yet
        without_G = self.init == "per_client" and cohort.round == 0
        if self.client == "none" or without_G:  # training starts from G, or from the own adapter
            # the server does not send second bottlenecks: they start as copies of the first
            out = self.trained(cohort, self.copy_to_second(personal) if without_G else self.shared.put(personal, G))
            w = self.shared.take(out.theta)
        else:  # training combines the own adapter with G, aligned to it
            out, w = self.integrate(cohort, personal, self.matched(cohort, G, personal))
        self._note_losses(cohort, out.loss_sum)  # stores first and last loss, which `matrices` returns
        self.personal[cohort.ids] = self.shared.put(out.theta, w)
        # the upload is a difference from the last upload, or from G if training starts there
        relative_to, previous = ({"w": "G"}, {}) if self.client == "none" else ({}, {"w": self.uploaded[cohort.ids]})
        up = cohort.upload(w=w, relative_to=relative_to, previous=previous).w  # [K, A]
        if self.client != "none":
            self.uploaded[cohort.ids] = up
        self.G = self.merged(cohort, up)  # aligned with their mean, and averaged

    @property
    def how(self) -> LocalTraining:
        """Return settings for `cohort.train`: of the trained parameters, only the adapters are uploaded.

        Privacy clips the gradients of uploaded parameters, and not those of the heads, which stay on the clients.
        """
        return LocalTraining(uploaded=self.shared)

    # -- clients -----------------------------------------------------------------------------------------
    def matched(self, cohort: Cohort, G: Tensor, personal: Tensor) -> Tensor:
        """Align the server's adapter G with each client's: reorder its hidden units as the client's.

        Args:
            cohort: The clients.
            G: Received adapter.  # [A]
            personal: The clients' rows, with their adapters.  # [K, P]

        Returns:
            G with the units in the order of each client's adapter; unchanged with client="identity".  # [K, A]
        """
        rows = self.shared.put(personal, G)  # G as the client's adapter  [K, P]
        if self.client == "identity":  # no alignment
            return self.shared.take(rows)
        if self.cost == "weight":  # units are compared by their incoming weights, else by activations on samples
            cost = [self._weight_cost(cohort.model, rows, personal, b) for b in self.bottlenecks]
        else:
            # second bottlenecks, which combine="output_sum" adds to layers, get the values of the first
            of_G, of_personal = (self.unit_activations(cohort, self.copy_to_second(r)) for r in (rows, personal))
            cost = [alignment.costs(mover, anchor) for mover, anchor in zip(of_G, of_personal)]
        aligned = alignment.align(cohort.model, rows, self.bottlenecks, cost)
        # stores the shares of moved units and costs, which `matrices` returns
        self._note_alignment("client", cohort, aligned)
        return self.shared.take(aligned.rows)

    def unit_activations(self, cohort: Cohort, rows: Tensor) -> list[Tensor]:
        """Compute the activations of all units on training samples.

        Args:
            cohort: The clients, each of which uses `samples` of its training samples.
            rows: Rows of the clients.  # [K, P]

        Returns:
            For each bottleneck, the activations of its m units; d is the number of samples (times classes, if a unit
            has an activation for each class).  Zeros pad clients with fewer samples.  # [K, m, d] each
        """
        # One pass over the samples for all bottlenecks.  But layers that read the class names instead of the samples,
        # as in a text tower, have an activation for each class, so then each bottleneck has its own pass.
        one_by_one = any(self._is_computed_once(cohort.model, b) for b in self.bottlenecks)
        passes = [[b] for b in self.bottlenecks] if one_by_one else [self.bottlenecks]
        return [activations for group in passes for activations in self._activations_at(cohort, rows, group)]

    def _activations_at(self, cohort: Cohort, rows: Tensor, bottlenecks: list[alignment.Bottleneck]) -> list[Tensor]:
        """Compute the activations of some bottlenecks by one pass over the samples.

        A layer's output may consist of several blocks, each with one value of every unit.

        Args:
            cohort: The clients.
            rows: Rows of the clients.  # [K, P]
            bottlenecks: The bottlenecks; a single one if its layer is computed once for all samples.

        Returns:
            For each bottleneck, the activations of its m units; d is the number of samples times blocks.  Zeros pad
            clients with fewer samples.  # [K, m, d] each
        """
        # names of the layers whose outputs are the activations
        layers = [b.prefix + b.hidden_units.layer for b in bottlenecks]

        def activations(model: FlatModel, rows: Tensor, inputs: Inputs) -> Tensor:
            """Return the outputs of the bottlenecks' `layers` for each of b samples, D numbers of all layers.

            # [k, b, D]
            """
            _, captured = model.capture(rows, inputs, layers)  # outputs of each layer by its name
            # a single bottleneck in a text tower: the text of each class is the same for all samples.  A layer's output
            # has m units, or in each of several blocks a value of all m units
            if self._is_computed_once(model, bottlenecks[0]):
                (of_text,) = (self._mean_over_tokens(captured[layer]) for layer in layers)  # [k, C, blocks m]
                num_samples = next(iter(wrap_inputs(inputs).values())).shape[1]
                return of_text.flatten(1).unsqueeze(1).expand(-1, num_samples, -1)
            return torch.cat([self._mean_over_tokens(captured[layer]) for layer in layers], 2)

        each = cohort.forward(rows, activations, split="train", limit=self.samples, key="fedpia")  # [n_i, D] each
        sizes = [b.hidden_units.num_blocks * b.hidden_units.size for b in bottlenecks]  # outputs of each layer
        # D: the sum of sizes, or for a layer that is computed once the number of classes times its size
        width = max((e.shape[1] for e in each if e.dim() > 1), default=sum(sizes))
        each = [e if e.dim() > 1 else e.new_zeros(0, width) for e in each]  # clients without samples
        padded = torch.nn.utils.rnn.pad_sequence(each, batch_first=True)  # [K, n, D]
        split = padded.split([width] if len(bottlenecks) == 1 else sizes, 2)
        # from [K, n, blocks m] to [K, m, n blocks] for each layer; the m units of a block are next to each other
        return [
            a.unflatten(2, (-1, b.hidden_units.size)).flatten(1, 2).transpose(1, 2) for b, a in zip(bottlenecks, split)
        ]

    def _is_computed_once(self, model: FlatModel, bottleneck: alignment.Bottleneck) -> bool:
        """Return whether the bottleneck's output is the same for all samples, as in a text tower of class names.

        These are the layers whose name matches a pattern in the module's attribute `computed_once`, if it has one.
        """
        return any(fnmatch.fnmatch(bottleneck.name, pattern) for pattern in getattr(model.module, "computed_once", ()))

    def _mean_over_tokens(self, output: Tensor) -> Tensor:
        """Return the mean over tokens, all axes between sample and unit, of an output of blocks with m units each.

        Args:
            output: Output of the layer.  # [k, b, ..., blocks m]

        Returns:
            The mean.  # [k, b, blocks m]
        """
        return output.flatten(2, -2).mean(2) if output.dim() > 3 else output

    def integrate(self, cohort: Cohort, personal: Tensor, Gk: Tensor) -> tuple[SimpleNamespace, Tensor]:
        """Train each client's adapter w combined with the aligned adapter of the server, Gk.

        With combine="weight_frozen" the model uses (1 - lam) w + lam Gk.  With "output_sum" it adds the outputs of
        both.

        Args:
            cohort: The clients.
            personal: Their rows.  # [K, P]
            Gk: Aligned adapter of the server for each client, which is not trained.  # [K, A]

        Returns:
            The output of `cohort.train`, and the adapters w_k to store and upload.  # [K, A]
        """
        shared = self.shared
        # Gk is in the second bottlenecks, w in the first; all other shared parameters start from the server's
        if self.combine == "output_sum":
            start = self.first.put(self.copy_to_second(shared.put(personal, Gk)), self.first.take(personal))
            out = self.trained(cohort, start)  # trains all columns but the second bottlenecks
            return out, shared.take(out.theta)

        def step(s: Step, batch: Batch) -> None:
            """Take one step on w = s.theta, with the loss at w_eff, the mixture of w and the aligned adapter Gk.

            Outside the heads w_eff = (1 - lam) w + lam Gk; in the heads it is w.
            """
            g = s.grad(batch, rows=shared.put(s.theta, shared.take(s.theta).lerp(s.state.Gk, self.lam)))  # at w_eff
            s.descend(shared.put(g, (1 - self.lam) * shared.take(g)))  # the chain rule: w_eff has (1 - lam) w
            s.record("loss_sum", s.summed_loss)  # stores the sum of losses up to this step

        out = cohort.train(personal, step=step, how=self.how, Gk=Gk, loss_sum=cohort.step_record())
        return out, shared.take(out.theta).lerp(Gk, self.lam)

    def trained(self, cohort: Cohort, start: Tensor) -> SimpleNamespace:
        """Train all columns except the second bottlenecks from rows `start`, and record the losses.

        Args:
            cohort: The clients.
            start: Rows before training.  # [K, P]

        Returns:
            The output of `cohort.train`, with the cumulative losses as loss_sum [K, T].
        """
        columns = self.second.rest(cohort.model.size)
        # recorded: the default step, which also stores the sum of losses up to step t in loss_sum[:, t]
        return cohort.train(start, step=recorded, columns=columns, how=self.how, loss_sum=cohort.step_record())

    def copy_to_second(self, rows: Tensor) -> Tensor:
        """Return a copy of models [..., P] in which each layer's second bottleneck equals its first.

        Only combine="output_sum" has second bottlenecks; else return the models themselves.
        """
        return self.second.put(rows, self.first.take(rows)) if self.second else rows

    # -- server ------------------------------------------------------------------------------------------
    def merged(self, cohort: Cohort, up: Tensor) -> Tensor:
        """Align the uploaded adapters with their mean, and return their weighted mean G.

        Args:
            cohort: The clients.
            up: The uploaded adapters.  # [K, A]

        Returns:
            G; with server="average", the mean without alignment.  # [A]
        """
        K, shared = len(cohort), self.shared
        G0 = cohort.mean(up)  # [A]
        if self.server == "average":
            return G0
        # alignment needs rows of the model; columns that are not shared do not matter
        rows, anchor = shared.put(self.initial.expand(K, -1), up), shared.put(self.initial, G0)  # [K, P], [P]
        cost = [self._weight_cost(cohort.model, rows, anchor[None], b) for b in self.bottlenecks]  # [K, m, m] each
        aligned = alignment.align(cohort.model, rows, self.bottlenecks, cost)
        # stores the shares of moved units and costs, which `matrices` returns
        self._note_alignment("server", cohort, aligned)
        G, q_of_bottlenecks = anchor.clone(), []  # [P]
        for bottleneck in self.bottlenecks:
            w = bottleneck.columns.take(aligned.rows)  # w~_k of this bottleneck  [K, D]
            d = (w - bottleneck.columns.take(anchor)).norm(dim=1)  # [K]
            # gamma: how fast the weights fall with the distance d from G0
            q = (-self.gamma * d).softmax(0)  # of sum 1 over the clients  [K]
            G = bottleneck.columns.put(G, cohort.mean(w, weights=q))
            q_of_bottlenecks.append(q.cpu())
        self._note(cohort, q=torch.stack(q_of_bottlenecks, 1))  # stores q of these clients, which `matrices` returns
        return shared.take(G)

    def _weight_cost(self, model: FlatModel, mover: Tensor, anchor: Tensor, bottleneck: alignment.Bottleneck) -> Tensor:
        """Return the distances between the units of two bottlenecks, by their incoming weights.

        Args:
            model: The model.
            mover: Rows whose units are to be reordered.  # [K, P]
            anchor: Rows whose order they shall get, one for all or one each.  # [1, P] or [K, P]
            bottleneck: The bottleneck, with m units.

        Returns:
            Distance of unit i of mover and unit j of anchor.  # [K, m, m]
        """
        of_mover, of_anchor = (alignment.incoming(model, rows, bottleneck) for rows in (mover, anchor))
        return alignment.costs(of_mover, of_anchor)

    # -- what is deployed, and recorded ------------------------------------------------------------------
    def personalized(self, cohort: Cohort, final: bool) -> Tensor:
        """Return the deployed models of the cohort: adapter w_k and personal head.

        G replaces w_k with client="none", and for clients that never took part.
        `final`, whether the last round is over, changes nothing.

        Returns:
            The models.  # [K, P]
        """
        personal, G = self.personal[cohort.ids], cohort.broadcast(G=self.G).G
        # with combine="output_sum" a layer has two bottlenecks; the second one gets a copy of G, too
        with_G = self.copy_to_second(self.shared.put(personal, G))
        if self.client == "none":
            return with_G
        # init=per_client writes `personal` for all clients, but `uploaded` only has clients that took part
        took_part = self.uploaded.has(cohort.ids)[:, None]  # [K, 1]
        return torch.where(took_part, personal, with_G)

    def initial_row_for_new_clients(self, cohorts: object) -> Tensor:
        """Return the model of all new clients: the server's adapter G, and the initial values in other columns.  # [P]

        Second bottlenecks, if there are any, equal the first.  `cohorts`, the training clients, is not used.
        """
        return self.copy_to_second(self.shared.put(self.initial, self.G))

    def _note(self, cohort: Cohort, **values: Tensor) -> None:
        """Store measurements of the cohort's clients, which `matrices` returns.

        Args:
            cohort: The clients.
            values: By name of an attribute [N, ...], the new entries of these clients.  # [K, ...] each
        """
        for name, of_cohort in values.items():
            of_all = getattr(self, name)
            setattr(self, name, of_all.index_copy(0, torch.from_numpy(cohort.ids), of_cohort.to(of_all)))

    def _note_alignment(self, where: str, cohort: Cohort, aligned: alignment.Alignment) -> None:
        """Store the shares of moved units and the mean costs of the cohort's clients for `matrices`.

        Args:
            where: Who aligned: "client" or "server".
            cohort: The clients.
            aligned: The aligned rows and their statistics, which are averaged over bottlenecks.
        """
        cost = torch.stack([aligned.before.mean(1), aligned.after.mean(1)], 1)
        self._note(cohort, **{f"moved_{where}": aligned.moved.mean(1), f"cost_{where}": cost})

    def _note_losses(self, cohort: Cohort, sums: Tensor) -> None:
        """Store the losses of each client's first and last local step for `matrices`.

        Args:
            cohort: The clients.
            sums: Sum of each client's losses up to every step.  # [K, T]
        """
        if not sums.shape[1]:  # no client has taken a step
            return
        sums, last = sums.cpu(), torch.from_numpy(np.maximum(cohort.num_steps - 1, 0))
        at_end = sums.gather(1, last[:, None])[:, 0]
        # the sum before the last step, 0 if that is the first one
        before = torch.where(last > 0, sums.gather(1, (last - 1).clamp_min(0)[:, None])[:, 0], torch.zeros(()))
        self._note(cohort, first_loss=sums[:, 0], last_loss=at_end - before)

    def matrices(self) -> dict[str, Tensor]:
        """Return measurements of each client's last round.

        Returns:
            moved_server and moved_client, shares of moved units [N]; cost_server and cost_client, a unit's mean cost
            before and after alignment [N, 2]; first_loss and last_loss, those of the first and last local step [N]; q,
            a client's weight in G for each of the S bottlenecks [N, S]; size_of_G, the norm of G [].
        """
        names = ("moved_server", "moved_client", "cost_server", "cost_client", "first_loss", "last_loss", "q")
        return {name: getattr(self, name) for name in names} | {"size_of_G": self.G.norm()}


def recorded(s: Step, batch: Batch) -> None:
    """Take one gradient step on each client's model s.theta, and store the sum of its losses so far in this round.

    The sum is stored as "loss_sum", an output of `cohort.train`.
    """
    s.descend(s.grad(batch))
    s.record("loss_sum", s.summed_loss)
