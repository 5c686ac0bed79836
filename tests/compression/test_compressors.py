"""All compressors: the decoded row equals the received row, and the stream has the stated bits."""

import pytest
import torch
from compressors import draws, message, same_numbers, seen
from hypothesis import given
from hypothesis import strategies as st
from properties import the_same_every_time

from fedbench.compression import base
from fedbench.compression.base import LIMIT, Compressor
from fedbench.compression.cer import CER
from fedbench.compression.chain import Chain
from fedbench.compression.dadaquant import DAdaQuant
from fedbench.compression.lowrank import LowRank
from fedbench.compression.none import NoCompression
from fedbench.compression.qsgd import QSGD
from fedbench.compression.randk import RandK
from fedbench.compression.sign import Sign
from fedbench.compression.stc import STC
from fedbench.compression.ternary import Ternary
from fedbench.compression.topk import TopK
from fedbench.config.conf_tree import group_options
from fedbench.config.schema import check_target
from fedbench.core.options import ConfigError
from fedbench.testing._targets import described

OPERATORS = {
    "none": NoCompression(),
    "topk": TopK(0.1),
    "topk_most": TopK(0.6),
    "randk": RandK(0.2),
    "sign": Sign(),
    "qsgd": QSGD(16),
    "qsgd_l2_fixed": QSGD(3, norm="l2", code="fixed"),
    "qsgd_l2_runs": QSGD(3, norm="l2", code="runs"),
    "ternary": Ternary(),
    "ternary_clipped": Ternary(clip=2.5),
    "lowrank": LowRank(2),
    "chain": Chain([TopK(0.3), QSGD(4)]),
    "stc": STC(0.1),
    "stc_pfednet": STC(0.2, variant="pfednet"),
    "cer": CER(gamma_rel=0.1),
    "cer_stc": Chain([CER(gamma_rel=0.1, send="all"), STC(0.1)]),
    "dadaquant": DAdaQuant(3),
}
LOSSY = [name for name in OPERATORS if name != "none"]
numbers = st.one_of(
    st.sampled_from([0.0, -0.0, 1.0, 1e-45, -1e30, 3e-39]), st.floats(width=32, min_value=-(2.0**99), max_value=2.0**99)
)


@the_same_every_time
@pytest.mark.parametrize("name", OPERATORS)
@given(data=st.data())
def test_any_row_is_decoded_as_it_is_seen(name: str, data: st.DataObject) -> None:
    """`seen` compares with the streams; here of one to three rows of 1 to 300 numbers, most of them drawn."""
    size, clients = data.draw(st.integers(1, 300)), data.draw(st.integers(1, 3))
    x = torch.randn(clients, size, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 99))))
    some = data.draw(st.lists(numbers, max_size=min(size, 8)))
    x[0, : len(some)] = torch.tensor(some)
    spans = {"w": (0, size // 6 * 6, (6, size // 6)), "b": (size // 6 * 6, size, (size % 6,))}
    result, bits = seen(OPERATORS[name], x, spans)
    assert torch.isfinite(result).all() and all(bits)


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -LIMIT])
def test_a_row_that_has_diverged_is_nan(name: str, wrong: float) -> None:
    x = torch.randn(3, 60, generator=torch.Generator().manual_seed(0))
    before, bits = seen(OPERATORS[name], x)
    x[1, 5] = wrong
    result, after = seen(OPERATORS[name], x)
    assert result[1].isnan().all() and after == [bits[0], 0, bits[2]]
    same_numbers(result[[0, 2]], before[[0, 2]])


@pytest.mark.parametrize("name", OPERATORS)
def test_rows_are_compressed_some_at_a_time(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(5, 60, generator=torch.Generator().manual_seed(0))
    whole, key = OPERATORS[name](x, draws(5), message(60, 5)), draws(5)
    monkeypatch.setattr(base, "BLOCK", 130)
    parts = OPERATORS[name](x, key, message(60, 5))
    assert torch.equal(whole[0], parts[0]) and torch.equal(whole[1], parts[1])
    if name in ("qsgd", "randk"):  # a second message with the same key has other draws
        again, _ = OPERATORS[name](x, key, message(60, 5))
        assert not torch.equal(again, parts[0])


@pytest.mark.parametrize("name", OPERATORS)
def test_no_rows_and_no_numbers(name: str) -> None:
    for shape in ((0, 7), (2, 0)):
        result, bits = OPERATORS[name](torch.empty(shape), draws(shape[0]), message(shape[1], shape[0]))
        assert result.shape == shape and bits.tolist() == [0] * shape[0]


def test_other_rows_are_refused() -> None:
    for x in (torch.zeros(2, 3, dtype=torch.float64), torch.zeros(3), torch.zeros(2, 4)):
        with pytest.raises(ValueError, match=r"the message theta must be float32 \[k, 3\]"):
            TopK(0.5)(x, draws(2), message(3, 2))


@pytest.mark.parametrize("option", group_options("compression"))
def test_options_of_conf_are_those_of_the_class(option: str) -> None:
    values = described("compression", option, {})
    check_target("compression", values)
    assert set(values) >= {"error_feedback", "direction"}


@pytest.mark.parametrize(
    "option, changed, words",
    [
        ("topk", {"share": 0}, r"compression.share must be a number in \(0, 1\], got 0"),
        ("qsgd", {"norm": "l1"}, "compression.norm must be one of l2, max"),
        ("sign", {"direction": "down"}, "compression.direction must be one of up, both"),
        (
            "chain",
            {"operators": [{"_target_": f"{TopK.__module__}.TopK", "share": 2}]},
            "operators.0.share must",
        ),
        ("chain", {"operators": [{"_target_": f"{TopK.__module__}.TopK", "k": 2}]}, "operators.0.k is unknown"),
    ],
)
def test_wrong_options_are_one_sentence(option: str, changed: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_target("compression", described("compression", option, changed))


def test_an_operator_needs_its_parts() -> None:
    with pytest.raises(NotImplementedError):
        Compressor(True, "up")(torch.zeros(1, 2), draws(), message(2))
