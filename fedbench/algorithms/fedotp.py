"""FedOTP: optimal transport assigns the patches of every image to a shared and a personal prompt.

Li et al., CVPR 2024, Algorithm 1.  A client has two prompts: p_g is averaged, p_l is personal.  With F [M, D] the
tokens of an image's feature map, T_c [2, D] the text features of class c under the two prompts and sim = F T_c^T:
    T* = argmin <T, 1 - sim> + eps sum T (log T - 1),   each prompt sums to gamma / 2, each token to at most 1 / M,
    logit_c = s <sg(T*), sim>,  both prompts trained by cross-entropy.
As in the released code, all clients train in round 1.
Departs from that code: a fresh optimizer in every round; float32; another stopping rule for T*.  Here the iterations
stop when no log v changes by 1e-3, checked every 10 iterations (_transport.py).  There they stop when the mean change
of v, which is about b / K, is below 1e-3.
global/* evaluates p_g alone, as PromptFL does, on the pooled image feature.
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
    """FedOTP.  p_g: shared prompt; p_l: personal prompt; an image has M tokens, features have width D.

    Args:
        gamma: Transported mass, in (0, 1].  At 1 every token is fully assigned.
        eps: Entropic regularization, > 0.

    State:
        w: Row [P]; its columns "prompt" are p_g, its columns "local" the initial p_l.
        p_l: Personal prompts, [N, l d], of l tokens of width d.
    """

    requires = ("prompt",)
    exclusive_columns = True
    reads = ("tokens",)
    syncs_with_device = "Sinkhorn's algorithm checks its convergence every ten iterations"

    def __init__(self, gamma: Fraction = 0.8, eps: Positive = 0.1):
        self.gamma, self.eps = gamma, eps

    def setup(self, federation: Federation, model: FlatModel, rows: RowStore) -> None:
        """Add a personal prompt p_l to the model, and create the state: all clients start from the same two prompts.

        w is a row with the server's p_g.  A prompt has l tokens (clip.length) of width d (clip.width).
        """
        clip: Any = model.module  # a model with text, tokens and prompts
        # new columns "local"; "fedotp": key of their random values; 0.02: standard deviation of the model's own prompt
        model.extend(local=model.seeded(lambda: 0.02 * torch.randn(clip.length, clip.width), "fedotp"))
        # columns of p_g and p_l in a row
        self.global_columns, self.local_columns = model.columns["prompt"], model.columns["local"]
        self.w = model.init_row()  # [P]
        self.p_l = rows("p_l", default=self.local_columns.take(self.w))  # [N, l d], at first the default

    def round(self, cohort: Cohort) -> None:
        """Run one round of FedOTP (Algorithm 1): clients train both prompts, and the server averages p_g.

        p_g is the shared prompt, p_l the personal one, both as rows of l tokens of width d.  In a row of the model they
        are the columns `global_columns` and `local_columns`.
        """
        if cohort.round == 0:  # as in the released code, all clients train in the first round
            cohort = cohort.all_clients()
        p_g = cohort.broadcast(p_g=self.global_columns.take(self.w)).p_g  # [l d]
        start = self.local_columns.put(self.global_columns.put(self.w, p_g), self.p_l[cohort.ids])  # [K, P]
        # uploaded: the columns that leave the client, whose gradients privacy clips
        out = cohort.train(start, loss=self.loss, how=LocalTraining(uploaded=self.global_columns))
        self.p_l[cohort.ids] = self.local_columns.take(out.theta)
        # the change of p_g is sent; the new p_g: the mean, or the step of the option server towards it
        up = cohort.upload(p_g=self.global_columns.take(out.theta), relative_to={"p_g": "p_g"})  # [K, l d]
        self.w = self.global_columns.put(self.w, cohort.mean(up.p_g, updates="p_g"))

    def loss(self, s: Step, rows: Tensor, batch: Batch) -> Tensor:
        """Return the task's loss of each sample, from the logits of `predict`.

        Args:
            s: The local step of k clients.
            rows: Their models.  # [k, P]
            batch: One batch of B samples of every client.

        Returns:
            Loss of each sample.  # [k, B]
        """
        return s.task_loss(self.predict(s.model, rows, batch.x), batch)  # [k, B]

    def predict(self, model: FlatModel, rows: Any, inputs: Inputs) -> Tensor:
        """Return the logits: similarities of image tokens and class texts, weighted by optimal transport.

        Args:
            model: The model.
            rows: Rows with both prompts.  # [k, P]
            inputs: Inputs of B samples of each client.  # [k, B, ...]

        Returns:
            s <T*, sim>, with CLIP's scale s.  # [k, B, C]
        """
        clip: Any = model.module  # a model with text, tokens and prompts
        named = model.named(rows)  # the clients' parameters by name
        # text features under both prompts: context returns p_g, and "local" is p_l  [k, l, d] each
        T = clip.text(torch.stack([clip.context(named), named["local"]], -3))  # [k, 2, C, D]
        F = clip.tokens(inputs)  # image tokens  [k, B, M, D]
        return clip.scale * self.transported(similarities(F, T))  # weighted sums over tokens and prompts

    def transported(self, sim: Tensor) -> Tensor:
        """Return the sum of similarities over tokens and prompts, weighted by the optimal transport plan T*.

        Args:
            sim: Similarities of text features and image tokens, for two prompts.  # [k, 2, C, B, M]

        Returns:
            <T*, sim>, without a gradient through T*.  # [k, B, C]
        """
        # eps: weight of the entropy; gamma: transported mass
        plan = _transport.plan(sim, self.eps, self.gamma)  # T*  [k, 2, C, B, M]
        return (plan * sim).sum((1, 4)).transpose(1, 2)  # over prompts and tokens

    def personalized(self, cohort: Cohort, final: bool) -> Tensor:
        """Return the deployed models of the cohort: averaged prompt p_g and personal prompts p_l.  # [K, P]

        `final`, whether the last round is over, changes nothing.
        """
        p_g = cohort.broadcast(p_g=self.global_columns.take(self.w)).p_g
        return self.local_columns.put(self.global_columns.put(self.w, p_g), self.p_l[cohort.ids])

    def global_row(self) -> Tensor:
        """Return the server model: the averaged shared prompt p_g, and the initial values of the personal prompt p_l.

        # [P]
        """
        return self.w


def similarities(F: Tensor, T: Tensor) -> Tensor:
    """Return the inner products of image tokens F and text features T, which are cosines of unit vectors.

    Args:
        F: M tokens of each image.  # [k, B, M, D]
        T: Features of C class names under two prompts.  # [k, 2, C, D]

    Returns:
        The similarities.  # [k, 2, C, B, M]
    """
    sim = T.flatten(1, 2) @ F.flatten(1, 2).transpose(1, 2)  # [k, 2 C, B M]
    return sim.view(*T.shape[:3], *F.shape[1:3])
