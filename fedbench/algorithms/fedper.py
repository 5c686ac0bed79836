"""FedPer: clients train base and head together; the base is averaged, the head is personal.

Arivazhagan et al., 2019, Algorithms 1 and 2.  A client never sampled deploys the new base with the initial head.
Departs from the paper: nowhere.   Reduces to: FedAvg when the head is empty.
"""

from torch import Tensor

from fedbench.algorithms.base import Algorithm, Cohort, Federation, FlatModel, LocalTraining, RowStore


class FedPer(Algorithm):
    """FedPer.  u: shared base; v_i: personal head of client i.

    State:
        u: Averaged base (all columns except the head), [|base|].
        v: Personal heads as last trained, [N, |head|].
    """

    requires = ("head",)
    has_base = True
    supports_client_ranks = True
    averages_one_model = True

    def setup(self, federation: Federation, model: FlatModel, rows: RowStore) -> None:
        """Set the server's base u [|u|] and the clients' heads v_i [N, |head|] to the initial model's.

        `rows` stores v_i.
        """
        self.base = model.without("head")  # columns of all parameters outside the head
        self.head = self.base.rest(model.size)  # all other columns of a row
        w = model.init_row()
        self.u = self.base.take(w).clone()  # [|u|]
        self.v = rows("v", default=self.head.take(w))  # [N, |head|]; a row equals the default until it is set

    def round(self, cohort: Cohort) -> None:
        """Run one round of FedPer: clients train base and head together, and the server averages the bases."""
        u = cohort.broadcast(u=self.u).u  # as the clients receive it  [|u|]
        # with_heads: rows of u and v_i; uploaded: the columns that leave the client, whose gradients privacy clips
        out = cohort.train(self.with_heads(cohort, u), how=LocalTraining(uploaded=self.base))  # [K, P]
        up = cohort.upload(u=self.base.take(out.theta), relative_to={"u": "u"})  # [K, |u|]; the change of u is sent
        self.u = cohort.mean(up.u, updates="u")  # the new u: the mean, or the step of the option server towards it
        self.v[cohort.ids] = self.head.take(out.theta)

    def with_heads(self, cohort: Cohort, u: Tensor) -> Tensor:
        """Return the sampled clients' whole models: the shared base u [|u|] and each client's own head v_i.

        # [K, P]
        """
        # put(rows, values): a copy of rows with values in these columns; the rows are empty at first  [K, P]
        rows = u.new_empty(len(cohort), self.base.size + self.head.size)
        return self.head.put(self.base.put(rows, u), self.v[cohort.ids])

    def personalized(self, cohort: Cohort, final: bool) -> Tensor:
        """Return the deployed models of the cohort: shared base u with each client's head v_i.  # [K, P]

        `final`, whether the last round is over, changes nothing.
        """
        return self.with_heads(cohort, cohort.broadcast(u=self.u).u)
