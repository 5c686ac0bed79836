"""Chains of compressors, and the combinations that are refused."""

import pytest
import torch
from compressors import draws, message, rows, seen

from fedbench.compression._positions import count
from fedbench.compression.base import Compressor, Message
from fedbench.compression.chain import Chain
from fedbench.compression.lowrank import LowRank
from fedbench.compression.none import NoCompression
from fedbench.compression.qsgd import QSGD
from fedbench.compression.randk import RandK
from fedbench.compression.sign import Sign
from fedbench.compression.ternary import Ternary
from fedbench.compression.topk import TopK
from fedbench.core.options import ConfigError
from fedbench.core.rows import RowStore


def test_signs_of_the_kept_numbers() -> None:
    """-4 and 3 of five are kept, with 3.5 for their mean magnitude: 6 bits for positions, 32 and 2 for signs."""
    result, bits = seen(Chain([TopK(0.4), Sign()]), rows([1, -4, 2, 0, 3]))
    assert result.tolist() == [[0, -3.5, 0, 0, 3.5]] and bits == [1 + 5 + 32 + 2]


def test_bits_are_those_of_all_operators() -> None:
    x = torch.randn(4, 200, generator=torch.Generator().manual_seed(0))
    result, bits = seen(Chain([TopK(0.1), QSGD(8, code="fixed")]), x)
    where = [row.nonzero()[:, 0] for row in TopK(0.1)(x, draws(4), message(200, 4))[0]]
    assert bits == [int(count(w[None], 200)) + 32 + 20 * 5 for w in where]
    assert [int((row != 0).sum()) <= 20 for row in result] == [True] * 4


def test_three_in_a_row_and_a_chain_in_a_chain_are_one() -> None:
    x = torch.randn(3, 50, generator=torch.Generator().manual_seed(1))
    flat = seen(Chain([RandK(0.5), NoCompression(), QSGD(4)]), x)
    nested = seen(Chain([Chain([RandK(0.5), NoCompression()]), QSGD(4)]), x)
    assert torch.equal(flat[0], nested[0]) and flat[1] == nested[1]


def test_exact_ones_are_passed_over() -> None:
    x = rows([1, 2, float("inf")])
    chain = Chain([TopK(1), QSGD(None)])
    assert chain.exact and chain.unbiased and seen(chain, x)[1] == [96]
    both = Chain([TopK(1), Sign()])
    assert seen(both, rows([1, -3]))[0].tolist() == [[2, -2]] and not both.exact


def test_it_is_unbiased_if_all_are() -> None:
    unbiased = RandK(0.5, unbiased=True, error_feedback=False)
    assert Chain([unbiased, QSGD(4)], error_feedback=False).unbiased
    assert not Chain([unbiased, Sign()], error_feedback=False).unbiased and not Chain([TopK(0.5), QSGD(4)]).unbiased
    with pytest.raises(ConfigError, match=r"compression\.error_feedback=false"):
        Chain([unbiased, QSGD(4)])


@pytest.mark.parametrize(
    "operators, words",
    [
        ([], "at least one compressor"),
        ([Sign(), TopK(0.5)], "Sign has no values for the next compressor"),
        ([QSGD(4), Ternary()], "QSGD has no values"),
        ([LowRank(1), QSGD(4)], "LowRank has no values"),
        ([TopK(0.5), LowRank(1)], "LowRank needs the shapes of parameters"),
        ([TopK(0.5), RandK(0.5)], "TopK and RandK each select positions"),
        (["topk"], "by their _target_, got a str"),
    ],
)
def test_pairs_that_make_no_sense_are_refused(operators: list, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Chain(operators)


class Counting(QSGD):
    """Has as many levels as it has seen rounds, and counts what each client has sent."""

    def __init__(self) -> None:
        super().__init__(1)
        self.round = torch.ones(())

    def setup(self, rows: RowStore, message: Message) -> None:
        self.sent = rows(f"compression/{message.name}", torch.zeros(()))

    def update_state(self, sent, message: Message) -> None:
        self.sent[message.ids] = self.sent[message.ids] + sent.codes["level"].shape[1]

    def observe(self, losses: torch.Tensor) -> None:
        self.round = self.round + 1
        self.levels = int(self.round)


def test_states_are_those_of_its_operators() -> None:
    chain, store = Chain([TopK(0.5), Counting()], direction="both"), RowStore(5, torch.device("cpu"), 1 << 20, 1 << 20)
    sent = message(8, 3)
    chain.setup(store, sent)
    chain(torch.randn(3, 8), draws(3), sent)
    chain.observe(torch.zeros(3))
    assert store.all["compression/1/theta"].whole().tolist() == [4, 4, 4, 0, 0]
    assert chain.state_dict() == {"1/round": torch.tensor(2.0)} and chain.operators[1].direction == "both"
    other = Chain([TopK(0.5), Counting()])
    other.load_state_dict(chain.state_dict())
    assert isinstance(other.operators[1], Counting) and other.operators[1].round == 2
    assert Compressor.update_state is TopK.update_state
