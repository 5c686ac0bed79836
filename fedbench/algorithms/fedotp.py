"""FedOTP: a shared and a personal prompt, between which optimal transport divides the patches of every image.

Li et al., CVPR 2024, Algorithm 1.  Client i owns p_g (averaged) and p_l (its own).  With F [M, D] the tokens of an
image's feature map, T_c [2, D] the text features of class c under the two prompts and sim = F T_c^T:
    T* = argmin <T, 1 - sim> + eps sum T (log T - 1),   each prompt giving gamma / 2, each token taking at most 1 / M,
    logit_c = s <sg(T*), sim>,  both prompts trained by cross-entropy.
As in the released code everybody trains in round 1, whatever the cohort.
Departs from it: a fresh optimizer in every round; float32; when the iterations for T* end.  Here they end once no log v
moves by 1e-3, looked at every 10 iterations (_transport.py); there, once the mean of |v - v before|, where v is about
b / K, is below 1e-3.
global/* scores p_g alone, as PromptFL would, on the pooled image feature.
"""

from typing import Any

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
from fedbench.core.options import Fraction, Positive


class FedOTP(Algorithm):
    """gamma, eps: above; with gamma=1 every token gives all of its 1 / M.

    State: w [P], whose columns prompt are p_g, and whose columns local are p_l as drawn; p_l [N, l d].
    """

    requires, alone = ("prompt",), True
    reads = ("tokens",)
    waits = "Sinkhorn's iterations end when all have converged, at which it looks every ten"

    def __init__(self, gamma: Fraction = 0.8, eps: Positive = 0.1):
        self.gamma, self.eps = gamma, eps

    def setup(self, federation: Federation, model: FlatModel, rows: RowStore) -> None:
        """Columns for p_l beside those of p_g; all clients start from one draw of both."""
        clip: Any = model.module
        model.extend(local=model.keyed(lambda: 0.02 * torch.randn(clip.length, clip.width), "fedotp"))
        self.global_prompt, self.local_prompt = model.columns["prompt"], model.columns["local"]
        self.w = model.init_row()  # [P]
        self.p_l = rows("p_l", default=self.local_prompt.take(self.w))  # lazy [N, l d]

    def round(self, cohort: Cohort) -> None:
        """Algorithm 1: both prompts train, p_g is sent."""
        if cohort.round == 0:
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
        plan = _transport.plan(sim, self.eps, self.gamma)
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
