"""FedOTP: a shared and a personal prompt, between which optimal transport divides the patches of every image.

Li et al., CVPR 2024, Algorithm 1.  Client i owns p_g (averaged) and p_l (its own).  With F [M, D] the tokens of an
image's feature map, T_c [2, D] the text features of class c under the two prompts and sim = F T_c^T:
    T* = argmin <T, 1 - sim> + eps sum T (log T - 1),   each prompt giving gamma / 2, each token taking at most 1 / M,
    logit_c = s <sg(T*), sim>,  both prompts trained by cross-entropy.
As in the released code everybody trains in round 1, whatever the cohort (first_round="cohort": the cohort alone).
Departs from it: a fresh optimizer in every round; float32; when the iterations for T* end.  Here they end once no log v
moves by thresh, looked at every 10 iterations (_transport.py); there, once the mean of |v - v before| is below 1e-3,
where v is about b / K: 25 times tighter (thresh=1e-4 gives logits within 6e-4 of its own).  thresh=0, max_iter=99 gives
its plans: of its 100 iterations the first changes nothing.
global/* scores p_g alone, as PromptFL would, on the pooled image feature.
"""

from typing import Any, Literal

import torch
from torch import Tensor

from fedbench.algorithms import _transport
from fedbench.algorithms.base import (
    Algorithm,
    Batch,
    Cohort,
    Federation,
    FlatModel,
    Inputs,
    LocalTraining,
    RowStore,
    Step,
)
from fedbench.core.options import Count, Fraction, NonNegative, Positive, require


class FedOTP(Algorithm):
    """gamma, eps: above; max_iter, thresh: when the plan is good enough (_transport.py); mode: cot, or sinkhorn, every
    token giving all of its 1 / M (gamma=1).

    State: w [P], whose columns prompt are p_g, and whose columns local are p_l as drawn; p_l [N, l d].
    """

    requires, alone = ("prompt",), True
    reads = ("tokens",)
    waits = "Sinkhorn's iterations end when all have converged, at which it looks every ten"

    def __init__(
        self,
        gamma: Fraction = 0.8,
        eps: Positive = 0.1,
        max_iter: Count = 100,
        thresh: NonNegative = 1e-3,
        mode: Literal["cot", "sinkhorn"] = "cot",
        first_round: Literal["everyone", "cohort"] = "everyone",
    ):
        require(
            mode == "cot" or gamma == 1,
            f"algorithm.mode=sinkhorn transports everything: set algorithm.gamma=1, not {gamma:g}",
        )
        self.gamma, self.eps, self.max_iter, self.thresh = gamma, eps, max_iter, thresh
        self.mode, self.first_round = mode, first_round

    def setup(self, federation: Federation, model: FlatModel, rows: RowStore) -> None:
        """Columns for p_l beside those of p_g; all clients start from one draw of both."""
        clip: Any = model.module
        model.extend(local=model.keyed(lambda: 0.02 * torch.randn(clip.length, clip.width), "fedotp"))
        self.global_prompt, self.local_prompt = model.columns["prompt"], model.columns["local"]
        self.w = model.init_row()  # [P]
        self.p_l = rows("p_l", default=self.local_prompt.take(self.w))  # lazy [N, l d]

    def round(self, cohort: Cohort) -> None:
        """Algorithm 1: both prompts train, p_g is sent."""
        if cohort.round == 0 and self.first_round == "everyone":
            cohort = cohort.all_clients()
        p_g = cohort.broadcast(p_g=self.global_prompt.take(self.w)).p_g  # [l d]
        start = self.local_prompt.put(self.global_prompt.put(self.w, p_g), self.p_l[cohort.ids])  # [K, P]
        out = cohort.train(start, loss=self.loss, how=LocalTraining(uploaded=self.global_prompt))
        self.p_l[cohort.ids] = self.local_prompt.take(out.theta)
        up = cohort.upload(p_g=self.global_prompt.take(out.theta), relative_to={"p_g": "p_g"})  # [K, l d]
        self.w = self.global_prompt.put(self.w, cohort.mean(up.p_g))

    def loss(self, s: Step, rows: Tensor, batch: Batch) -> Tensor:
        """Cross-entropy of the logits below.  # [k, B]"""
        return s.task_loss(self.predict(s.model, rows, batch.x), batch)  # [k, B]

    def predict(self, model: FlatModel, rows: Any, inputs: Inputs) -> Tensor:
        """logit_c = s <T*, sim>.  # [k, B, C]"""
        clip: Any = model.module
        named = model.named(rows)
        T = clip.text(torch.stack([clip.context(named), named["local"]], -3))  # [k, 2, C, D]
        F = clip.tokens(inputs)  # [k, B, M, D]
        return clip.scale * self.transported(similarities(F, T))

    def transported(self, sim: Tensor) -> Tensor:
        """<T*, sim> with a plan that has no gradient.  sim [k, 2, C, B, M] -> [k, B, C]"""
        plan = _transport.plan(sim, self.eps, self.gamma, self.max_iter, self.thresh, self.mode == "sinkhorn")
        return (plan * sim).sum((1, 4)).transpose(1, 2)

    def personalized(self, cohort: Cohort, final: bool) -> Tensor:
        """[p_g, p_l]."""
        p_g = cohort.broadcast(p_g=self.global_prompt.take(self.w)).p_g
        return self.local_prompt.put(self.global_prompt.put(self.w, p_g), self.p_l[cohort.ids])

    def global_row(self) -> Tensor:
        """p_g, with p_l as drawn."""
        return self.w


def similarities(F: Tensor, T: Tensor) -> Tensor:
    """Cosines of tokens F [k, B, M, D] and texts T [k, 2, C, D], as one product a client.  # [k, 2, C, B, M]"""
    sim = T.flatten(1, 2) @ F.flatten(1, 2).transpose(1, 2)  # [k, 2 C, B M]
    return sim.view(*T.shape[:3], *F.shape[1:3])
