"""Checks of a user's compressor: a correct one passes, and each check finds its mistake."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from conftest import ROOT
from contract import assert_failed, import_example

from fedbench import commands
from fedbench.compression.qsgd import QSGD
from fedbench.compression.randk import RandK
from fedbench.compression.sign import Sign
from fedbench.compression.topk import TopK
from fedbench.config.conf_tree import group_options
from fedbench.core.options import ConfigError
from fedbench.testing import check_compression, compression

PAGE = (ROOT / "docs" / "compression.md").read_text()


class Flat(Sign):
    """One number of bits for all clients."""

    def __call__(self, x, draws, message):
        seen, bits = super().__call__(x, draws, message)
        return seen, bits.sum()


class Joint(Sign):
    """One scale for all clients."""

    def compress(self, x, draws, message):
        sent = super().compress(x, draws, message)
        sent.codes["scale"] = sent.codes["scale"].amax(0, keepdim=True).expand(len(x), 1)
        return sent


class InPlace(TopK):
    """Zeros where it took numbers, in the rows that it was given."""

    def __call__(self, x, draws, message):
        seen, bits = super().__call__(x, draws, message)
        x -= seen
        return seen, bits


class Global(RandK):
    """A key from the global generator."""

    def compress(self, x, draws, message):
        draws.keys = torch.randint(1 << 40, (len(x),))
        return super().compress(x, draws, message)


class Asking(Sign):
    """Asks whether there is anything to send."""

    def compress(self, x, draws, message):
        return super().compress(x if float(x.abs().sum()) > 0 else -x, draws, message)


class Swapped(Sign):
    """Reads a 0 as negative."""

    def read(self, stream, message):
        codes = super().read(stream, message)
        return codes | {"negative": ~codes["negative"]}


class Modest(TopK):
    """Counts no positions."""

    def count(self, sent, message):
        return super().count(sent, message) * 0


class NotAsItIs(TopK):
    """Says that rows arrive as they are, and rounds them."""

    exact = True

    def __init__(self):
        super().__init__(0.5)
        self.exact = True

    def __call__(self, x, draws, message):
        seen, bits = super().__call__(x, draws, message)
        return seen.round(), bits


class Wasteful(Sign):
    """Sends every number twice, as well."""

    def count(self, sent, message):
        return super().count(sent, message) + 64 * message.size


class Offset(Sign):
    """No scale is 0."""

    def compress(self, x, draws, message):
        sent = super().compress(x, draws, message)
        sent.codes["scale"] = sent.codes["scale"] + 1e-8
        return sent


class Ratio(Sign):
    """Divides by a square, which may be infinite, and multiplies by it."""

    def decompress(self, sent, message):
        square = sent.codes["scale"].square().clamp_min(1e-30)
        return super().decompress(sent, message) / square * square


class Spreading(Sign):
    """Sends rows that have diverged, too."""

    def __call__(self, x, draws, message):
        return super().__call__(x.nan_to_num(), draws, message)


class Shrinking(QSGD):
    """Says that it is unbiased, and is a tenth too small."""

    def decompress(self, sent, message):
        return 0.9 * super().decompress(sent, message)


class Growing(QSGD):
    """Rounds to the norm of a long row or to nothing, and says that this contracts."""

    contractive = True

    def __init__(self):
        super().__init__(1, norm="l2", error_feedback=True)


class Partial(TopK):
    """Never sends the last number."""

    def decompress(self, sent, message):
        seen = super().decompress(sent, message)
        seen[:, -1] = 0
        return seen


class Forgetful(TopK):
    """Sends more from round to round, by a Python number."""

    def observe(self, losses):
        self.share = min(1, 2 * self.share)


MISTAKES = [
    (Flat, "rows_and_bits_have_a_shape", "`count` must return one value"),
    (Joint, "rows_are_independent", "alone than together with 4 others"),
    (InPlace, "inputs_are_unchanged", "in place"),
    (Global, "draws_are_keyed", "the global generator of torch"),
    (Asking, "nothing_waits_for_the_device", "waits for the device"),
    (Swapped, "decoding_restores_received_rows", "decoded to other values"),
    (Modest, "bits_are_those_of_the_stream", "`count` must count what `write` writes"),
    (NotAsItIs, "exact_is_exact", "`exact` is set"),
    (Wasteful, "exact_is_exact", "are more than 9600 of uncompressed values"),
    (Offset, "odd_rows_are_finite", "zeros are received as 1e-08"),
    (Ratio, "odd_rows_are_finite", "received as inf or nan"),
    (Spreading, "diverged_rows_are_nan", "not received as NaN"),
    (Shrinking, "unbiased_rows_average_to_the_input", "`unbiased` is set"),
    (Growing, "contractive_rows_are_not_farther_than_zero", "Remedy: do not set `contractive`"),
    (Partial, "error_feedback_transmits_residuals", "some values are never transmitted"),
    (Forgetful, "state_is_saved", "continues differently"),
]


@pytest.fixture(autouse=True)
def example(monkeypatch: pytest.MonkeyPatch) -> None:
    import_example(monkeypatch, "compressors.md", "my_compressors")


def test_the_example_of_the_page_passes() -> None:
    report = check_compression("my_compressors.Halves")
    report.raise_if_failed()
    assert (
        list(report.skipped) == ["unbiased_rows_average_to_the_input"]
        and len(report.passed) == len(compression.SUITE.checks) - 1
    )


@pytest.mark.parametrize("cls, check, message", MISTAKES)
def test_a_mistake_is_found(cls: type, check: str, message: str) -> None:
    assert_failed(check_compression(cls, only=[check]), check, message)


def test_every_check_finds_a_mistake() -> None:
    assert {check for _, check, _ in MISTAKES} == set(compression.SUITE.checks)


def test_the_command_checks_compressors(capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main(["check", "my_compressors.Halves", "--only", "inputs_are_unchanged"]) == 0
    assert commands.main(["check", "compression=topk", "share=0.3", "--only", "inputs_are_unchanged"]) == 0
    assert capsys.readouterr().out.count("1 passed, 0 failed") == 2


def test_other_classes_are_refused() -> None:
    with pytest.raises(ConfigError, match="is not a subclass of fedbench"):
        check_compression("fedbench.engine.optim.SGD", {"lr": 1.0})


def test_rows_that_are_shown_have_zeros_and_equal_numbers() -> None:
    x = compression.rows_of(compression.SIZE).numpy()
    assert all((row == 0).any() and len(np.unique(row)) < len(row) - 5 for row in x)


def test_the_page_names_every_option() -> None:
    assert all(f"`{option}" in PAGE for option in group_options("compression"))
