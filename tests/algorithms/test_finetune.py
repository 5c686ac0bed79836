"""Fine-tuning of the models that any method deploys."""

import pytest
from by_hand import COHORTS_OF_FOUR, B, W, descent, four_of_six, squares, state
from tiny import (
    close,
    compose,
    deployed,
    equal,
    play,
)

from fedbench.algorithms._finetune import FineTuned
from fedbench.algorithms.base import Algorithm
from fedbench.algorithms.fedavg import FedAvg
from fedbench.algorithms.fedbabu import FedBABU
from fedbench.algorithms.local import Local
from fedbench.algorithms.pgfed import PGFed
from fedbench.core.options import ConfigError
from fedbench.simulation.build import algorithm as built


def test_fine_tuning_for_no_epochs_is_no_fine_tuning() -> None:
    cfg = compose(["algorithm=fedavg", "finetune.epochs=0"])
    assert type(built(cfg)) is FedAvg
    tuned = built(compose(["algorithm=fedavg", "finetune.epochs=2", "finetune.part=head"]))
    assert isinstance(tuned, FineTuned) and type(tuned.inner) is FedAvg and (tuned.epochs, tuned.part) == (2, "head")
    e = four_of_six()
    algorithm = play(e, FineTuned(FedAvg(), 0, None, "evaluation", "all"), 2, COHORTS_OF_FOUR)
    equal(deployed(e, algorithm), algorithm.inner.w.expand(6, -1))


def test_fine_tuning_by_hand() -> None:
    """Each client descends from w for 3 epochs at its own rate; the server's model and everybody's state stay."""
    e = squares(steps=2)
    algorithm = play(e, FineTuned(FedAvg(), 3, 0.2, "evaluation", "all"), 2)
    w = play(squares(steps=2), FedAvg(), 2).w
    before = state(e, algorithm)
    close(deployed(e, algorithm), descent(w, B, 3, 0.2))
    equal(state(e, algorithm), before)
    equal(algorithm.global_row(), w)
    close(deployed(e, FineTuned(algorithm.inner, 3, None, "evaluation", "all")), descent(w, B, 3))


def test_fine_tuning_at_each_clients_own_rate() -> None:
    rates = [0.05 * (i + 1) for i in range(len(B))]
    e = squares(steps=2)
    rows = deployed(e, play(e, FineTuned(FedAvg(), 3, rates, "evaluation", "all"), 2))
    for i, rate in enumerate(rates):
        alone = squares(steps=2)
        tuned = deployed(alone, play(alone, FineTuned(FedAvg(), 3, rate, "evaluation", "all"), 2))
        close(rows[i], tuned[i])
    with pytest.raises(ConfigError, match=rf"finetune.lr lists 1 rates, and there are {len(B)} clients"):
        play(squares(), FineTuned(FedAvg(), 1, [0.1], "evaluation", "all"))
    cfg = compose(["algorithm=fedavg", "finetune.epochs=1", "finetune.lr=[0.1,0.2]"])
    assert len(built(cfg).lr) == 2


def test_fine_tuning_leaves_the_training_alone() -> None:
    """With kept momentum, evaluated after every round or not at all."""
    a, b = four_of_six(), four_of_six()
    tuned, plain = FineTuned(PGFed(), 2, None, "evaluation", "all"), PGFed()
    for r in range(4):
        play(a, tuned, 1, COHORTS_OF_FOUR[r:], begin=r)
        deployed(a, tuned, r, False)
        play(b, plain, 1, COHORTS_OF_FOUR[r:], begin=r)
    mine, theirs = state(a, tuned), state(b, plain)
    equal(mine, theirs)


def test_fine_tuning_of_a_part_and_at_the_end() -> None:
    e = four_of_six()
    algorithm = play(e, FineTuned(FedAvg(), 2, None, "end", "head"), 2, COHORTS_OF_FOUR)
    base = e.model.without("head")
    equal(deployed(e, algorithm, final=False), algorithm.inner.w.expand(6, -1))
    rows = deployed(e, algorithm, final=True)
    equal(base.take(rows), base.take(algorithm.inner.w).expand(6, -1))
    assert (e.model.columns["head"].take(rows) != e.model.columns["head"].take(algorithm.inner.w)).any(1).all()
    assert (
        algorithm.fine_tunes_after_training
        and not FineTuned(FedAvg(), 2, None, "evaluation", "head").fine_tunes_after_training
    )
    assert FineTuned(FedBABU(), 2, None, "evaluation", "head").fine_tunes_after_training
    with pytest.raises(ConfigError, match=r"finetune.part needs the parameter group 'neck'"):
        play(four_of_six(), FineTuned(FedAvg(), 1, None, "end", "neck"))


def test_fine_tuning_of_personal_models_starts_from_them() -> None:
    e = squares(steps=1)
    algorithm = play(e, FineTuned(Local(), 2, None, "evaluation", "all"))
    close(deployed(e, algorithm), descent(W, B, 3))


def test_fine_tuning_leaves_every_other_hook_to_the_method() -> None:
    """Whatever a method may define is asked of it, with what was given; three are fine-tuning's own."""
    public = {name for name, hook in vars(Algorithm).items() if callable(hook) and not name.startswith("_")}
    asked = []
    inner = type("Asked", (Algorithm,), {n: lambda self, *args, n=n: asked.append((n, args)) or n for n in public})()
    tuned = FineTuned(inner, 1, None, "evaluation", "all")
    own = {"check", "check_settings", "personalized"}
    assert own == public & vars(FineTuned).keys() - {n for n in public if hasattr(vars(FineTuned)[n], "__wrapped__")}
    for name in sorted(public - own):
        assert getattr(tuned, name)(1, 2) == name
    assert asked == [(name, (1, 2)) for name in sorted(public - own)]
    assert {"setup", "round", "predict", "initial_row_for_new_clients", "state_dict", "measured"} <= {
        name for name, _ in asked
    }
