"""FedPIA: adapters' hidden units are matched before adapters are averaged, at the server and at the clients.

Saha et al., AAAI 2025 (no code exists; its Algorithm 1 is in a supplement that is not public).  Of every bottleneck,
w~ = align(mover, anchor) being the mover with its units in the order of least cost (fedbench/algorithms/_alignment.py):
server:  G0 = sum_k p_k w_k;  w~_k = align(w_k, G0), by the distance of incoming weights;
         G = sum_k q_k w~_k,  q_k ~ exp(-gamma ||w~_k - G0||);
client:  G~ = align(G, w_k), by the distance of the units' values on a local batch;
         trains w in  w_eff = (1 - lam) w + lam G~,  G~ frozen, from w = w_k;  keeps and uploads w_k <- w_eff.
The head is trained along and stays.
combine=output_sum, with two bottlenecks at each place (adapter.twin=true), adds outputs instead of weights:
client:  trains w in  f(x; (w + G~) / 2),  G~ frozen, from w = w_k;  keeps w_k <- w beside G~, uploads w_k.
"Combining" may also be read in this way.  The order of G~'s units then changes no output, and matching at the clients
has no effect (lam is 1/2, as in FedDAT's mixture, which such a model computes by itself).
Departs from the paper: q sums to 1 over the clients of a site, because G would shrink towards 0 round by round with the
printed exp(-gamma d) / K; "combining" w_k and G~ has no formula there, and is
this one because the order of units matters only in weight space; a unit's activation is its values on every sample,
not their mean.  Parameters outside of bottlenecks are averaged by p, the run's client weights.
A sample's value is the mean over its tokens, padding included, before the nonlinearity.  In CLIP's text tower, which
reads class names only, a unit has a value for each class.
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
from fedbench.algorithms._twins import columns_of_twins
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
from fedbench.core.options import Count, NonNegative, Share, require


class FedPIA(Algorithm):
    """lam, gamma: above.  server: align | average.  client: align | identity, no renumbering | none, training starts
    from G as in FedPer.  cost: of the clients' alignment.  combine: weight_frozen | output_sum, above.  The others: in
    the YAML.

    State: G [A], all columns but the head's and those of second bottlenecks; own [N, P], w_k and the client's head,
    under output_sum with G~ in the second ones; sent [N, A], w_k as the server has it.
    """

    requires = ("head",)
    has_base = True

    def __init__(
        self,
        lam: Share = 0.5,
        gamma: NonNegative = 1.0,
        server: Literal["align", "average"] = "align",
        client: Literal["align", "identity", "none"] = "align",
        cost: Literal["activation", "weight"] = "activation",
        samples: Count = 16,
        combine: Literal["weight_frozen", "output_sum"] = "weight_frozen",
        init: Literal["common", "per_client"] = "common",
    ):
        summed = combine == "output_sum"
        require(
            not summed or client != "none",
            "algorithm.combine=output_sum is of a client's adapter and the server's, and algorithm.client=none has the "
            "server's alone: use client=align or identity",
        )
        require(
            not summed or lam == 0.5,
            f"algorithm.lam={lam}: combine=output_sum takes the mean of two adapters' outputs, leave lam at 0.5",
        )
        self.lam, self.gamma, self.server, self.client, self.cost = lam, gamma, server, client, cost
        self.samples, self.combine, self.init = samples, combine, init

    def check(self, federation: Federation, model: FlatModel, optimizer: Optimizer) -> None:
        """Bottlenecks, whose units can be renumbered; two of them at each place where outputs are added."""
        super().check(federation, model, optimizer)
        require(
            bool(alignment.sites_of(model, model.without("head"))),
            "algorithm=fedpia renumbers the hidden units of bottlenecks, and this model has none: use "
            "adapter=houlsby, pfeiffer, parallel or compacter",
        )
        require(
            self.combine != "output_sum" or bool(columns_of_twins(model)[1]),
            "algorithm.combine=output_sum adds the outputs of two adapters at each place: use adapter.twin=true",
        )

    def setup(self, federation: Federation, model: FlatModel, rows: RowStore) -> None:
        """One initialization for all, or one for each client (init=per_client)."""
        nothing = (Columns([]), Columns([]))
        self.first, self.second = columns_of_twins(model) if self.combine == "output_sum" else nothing
        self.shared = (model.columns["head"] | self.second).rest(model.size)
        self.head = model.columns["head"]
        w = self.initial = model.init_row()  # [P]
        self.G = self.shared.take(w).clone()  # [A]
        self.own = rows("own", default=w)  # lazy [N, P]
        self.sent = rows("sent", default=self.G)  # lazy [N, A]
        if self.init == "per_client":
            everybody = np.arange(federation.num_clients)
            each = self.shared.take(model.init_rows(federation.num_clients, "fedpia"))
            self.own[everybody] = self.shared.put(w.expand(len(each), -1), each)
        self.sites = alignment.sites_of(model, self.shared)
        n, S = federation.num_clients, len(self.sites)
        # of each client's last round, for figures: shares of units that moved, mean costs, q, first and last loss
        self.moved_server, self.moved_client, self.first_loss, self.last_loss = (torch.zeros(n) for _ in range(4))
        self.cost_server, self.cost_client = torch.zeros(n, 2), torch.zeros(n, 2)  # before, after
        self.q = torch.zeros(n, S)

    def round(self, cohort: Cohort) -> None:
        """Clients integrate, train and upload; the server matches and averages."""
        G = cohort.broadcast(G=self.G).G  # [A]
        own = self.own[cohort.ids]  # [K, P]
        alone = self.init == "per_client" and cohort.round == 0  # there is nothing of the others yet
        if self.client == "none" or alone:
            out = self.trained(cohort, self.in_both(own) if alone else self.shared.put(own, G))
            w = self.shared.take(out.theta)
        else:
            out, w = self.integrate(cohort, own, self.matched(cohort, G, own))
        self._note_losses(cohort, out.loss_sum)
        self.own[cohort.ids] = self.shared.put(out.theta, w)
        # an adapter that a client keeps and trains on replaces the last one; one that is trained from G adds to that
        relative_to, replaces = ({"w": "G"}, {}) if self.client == "none" else ({}, {"w": self.sent[cohort.ids]})
        up = cohort.upload(w=w, relative_to=relative_to, replaces=replaces).w  # [K, A]
        if self.client != "none":
            self.sent[cohort.ids] = up
        self.G = self.merged(cohort, up)

    @property
    def how(self) -> LocalTraining:
        """The head never leaves a client."""
        return LocalTraining(uploaded=self.shared)

    # -- clients -----------------------------------------------------------------------------------------
    def matched(self, cohort: Cohort, G: Tensor, own: Tensor) -> Tensor:
        """G~: of each client G [A] with its units in the order of the client's own [K, P].  # [K, A]"""
        rows = self.shared.put(own, G)  # G as the client's adapter  [K, P]
        if self.client == "identity":
            return self.shared.take(rows)
        if self.cost == "weight":
            cost = [self._weight_cost(cohort.model, rows, own, site) for site in self.sites]
        else:
            values = [self.unit_values(cohort, self.in_both(r)) for r in (rows, own)]
            cost = [alignment.costs(a, b) for a, b in zip(*values)]
        aligned = alignment.align(cohort.model, rows, self.sites, cost)
        self._note_alignment("client", cohort, aligned)
        return self.shared.take(aligned.rows)

    def unit_values(self, cohort: Cohort, rows: Tensor) -> list[Tensor]:
        """What each unit of rows [K, P] gives on `samples` of its client's training samples, of each site; zeros where
        the client has fewer.  # [K, m, d] each"""
        # one pass for all sites, unless a unit has a value for each class
        apart = any(self._is_computed_once(cohort.model, s) for s in self.sites)
        together = [[site] for site in self.sites] if apart else [self.sites]
        return [values for sites in together for values in self._values_at(cohort, rows, sites)]

    def _values_at(self, cohort: Cohort, rows: Tensor, sites: list[alignment.Site]) -> list[Tensor]:
        layers = [s.prefix + s.units.before for s in sites]

        def values(model: FlatModel, rows: Tensor, inputs: Inputs) -> Tensor:
            _, captured = model.capture(rows, inputs, layers)
            if self._is_computed_once(model, sites[0]):  # the text of each class is the same for all samples
                (of_text,) = (self._of_units(captured[layer]) for layer in layers)  # [k, C, blocks m]
                batch = inputs if isinstance(inputs, Tensor) else next(iter(inputs.values()))
                return of_text.flatten(1).unsqueeze(1).expand(-1, batch.shape[1], -1)
            return torch.cat([self._of_units(captured[layer]) for layer in layers], 2)

        each = cohort.forward(rows, values, split="train", limit=self.samples, key="fedpia")  # [n_i, D] each
        width = max(
            (e.shape[1] for e in each if e.dim() > 1), default=sum(s.units.blocks * s.units.size for s in sites)
        )
        each = [e if e.dim() > 1 else e.new_zeros(0, width) for e in each]  # of a client without samples
        padded = torch.nn.utils.rnn.pad_sequence(each, batch_first=True)  # [K, n, D]
        sizes = [width] if len(sites) == 1 else [s.units.blocks * s.units.size for s in sites]
        parts = zip(sites, padded.split(sizes, 2))
        return [p.unflatten(2, (-1, s.units.size)).flatten(1, 2).transpose(1, 2) for s, p in parts]

    def _is_computed_once(self, model: FlatModel, site: alignment.Site) -> bool:
        return any(fnmatch.fnmatch(site.name, pattern) for pattern in getattr(model.module, "computed_once", ()))

    def _of_units(self, given: Tensor) -> Tensor:
        """Return a layer's output [k, b, ..., blocks m], its mean over tokens.  # [k, b, blocks m]"""
        return given.flatten(2, -2).mean(2) if given.dim() > 3 else given

    def integrate(self, cohort: Cohort, own: Tensor, Gk: Tensor) -> tuple[SimpleNamespace, Tensor]:
        """Training with G~ [K, A]; what `cohort.train` gives, and the integrated adapters w_eff [K, A]."""
        a = self.shared
        if self.combine == "output_sum":  # what is in no bottleneck goes on from the server's
            out = self.trained(cohort, self.first.put(self.in_both(a.put(own, Gk)), self.first.take(own)))
            return out, a.take(out.theta)

        def step(s: Step, batch: Batch) -> None:
            g = s.grad(batch, rows=a.put(s.theta, a.take(s.theta).lerp(s.state.Gk, self.lam)))
            s.descend(a.put(g, (1 - self.lam) * a.take(g)))
            s.record("loss_sum", s.summed_loss)

        out = cohort.train(own, step=step, how=self.how, Gk=Gk, loss_sum=cohort.step_record())
        return out, a.take(out.theta).lerp(Gk, self.lam)

    def trained(self, cohort: Cohort, start: Tensor) -> SimpleNamespace:
        """Plain training from these rows [K, P]; what stands in second bottlenecks is frozen."""
        learns = self.second.rest(cohort.model.size)
        return cohort.train(start, step=recorded, columns=learns, how=self.how, loss_sum=cohort.step_record())

    def in_both(self, rows: Tensor) -> Tensor:
        """Rows [..., P] of one adapter: with outputs that are added, it stands in both places."""
        return self.second.put(rows, self.first.take(rows)) if self.second else rows

    # -- server ------------------------------------------------------------------------------------------
    def merged(self, cohort: Cohort, up: Tensor) -> Tensor:
        """G of the clients' adapters [K, A].  # [A]"""
        K, a = len(cohort), self.shared
        G0 = cohort.mean(up)  # [A]
        if self.server == "average":
            return G0
        rows, anchor = a.put(self.initial.expand(K, -1), up), a.put(self.initial, G0)  # [K, P], [P]
        cost = [self._weight_cost(cohort.model, rows, anchor[None], site) for site in self.sites]
        aligned = alignment.align(cohort.model, rows, self.sites, cost)
        self._note_alignment("server", cohort, aligned)
        G, each = anchor.clone(), []  # [P]
        for site in self.sites:
            w = site.columns.take(aligned.rows)  # w~_k of this site  [K, D]
            d = (w - site.columns.take(anchor)).norm(dim=1)  # [K]
            q = (-self.gamma * d).softmax(0)
            G = site.columns.put(G, cohort.mean(w, weights=q))
            each.append(q.cpu())
        self._note(cohort, q=torch.stack(each, 1))
        return a.take(G)

    def _weight_cost(self, model: FlatModel, mover: Tensor, anchor: Tensor, site: alignment.Site) -> Tensor:
        """By the weights that lead to each unit, mover [K, P], anchor [K or 1, P].  # [K, m, m]"""
        of_mover, of_anchor = (alignment.incoming(model, rows, site) for rows in (mover, anchor))
        return alignment.costs(of_mover, of_anchor)

    # -- what is deployed, and recorded ------------------------------------------------------------------
    def personalized(self, cohort: Cohort, final: bool) -> Tensor:
        """own, w_k and the client's head; G and its head with client=none, and of a client that never took part."""
        own, G = self.own[cohort.ids], cohort.broadcast(G=self.G).G
        with_G = self.in_both(self.shared.put(own, G))
        if self.client == "none":
            return with_G
        took_part = self.sent.has(cohort.ids)[:, None]  # own would say everybody, with init=per_client  [K, 1]
        return torch.where(took_part, own, with_G)

    def newcomer_row(self, cohorts: object) -> Tensor:
        """G, and the head that all began with."""
        return self.in_both(self.shared.put(self.initial, self.G))

    def _note(self, cohort: Cohort, **values: Tensor) -> None:
        """Write values [K, ...] of the cohort's clients."""
        for name, of_cohort in values.items():
            kept = getattr(self, name)
            setattr(self, name, kept.index_copy(0, torch.from_numpy(cohort.ids), of_cohort.to(kept)))

    def _note_alignment(self, where: str, cohort: Cohort, aligned: alignment.Alignment) -> None:
        cost = torch.stack([aligned.before.mean(1), aligned.after.mean(1)], 1)
        self._note(cohort, **{f"moved_{where}": aligned.moved.mean(1), f"cost_{where}": cost})

    def _note_losses(self, cohort: Cohort, sums: Tensor) -> None:
        """sums [K, T]: each client's losses up to and including step t."""
        if not sums.shape[1]:  # nobody has made a step
            return
        sums, last = sums.cpu(), torch.from_numpy(np.maximum(cohort.num_steps - 1, 0))
        at_end = sums.gather(1, last[:, None])[:, 0]
        before = torch.where(last > 0, sums.gather(1, (last - 1).clamp_min(0)[:, None])[:, 0], torch.zeros(()))
        self._note(cohort, first_loss=sums[:, 0], last_loss=at_end - before)

    def matrices(self) -> dict[str, Tensor]:
        """Of each client's last round: moved_server, moved_client, first_loss, last_loss [N], cost_server, cost_client
        [N, 2] (a unit's mean cost before and after), q [N, S], and size_of_G []."""
        names = ("moved_server", "moved_client", "cost_server", "cost_client", "first_loss", "last_loss", "q")
        return {name: getattr(self, name) for name in names} | {"size_of_G": self.G.norm()}


def recorded(s: Step, batch: Batch) -> None:
    """A plain step, whose loss is kept."""
    s.descend(s.grad(batch))
    s.record("loss_sum", s.summed_loss)
