"""The code of runs of zeros: bits by hand, and a round trip."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from properties import the_same_every_time

from fedbench.compression import _runs as runs
from fedbench.compression._stream import Reader, Writer


def test_lengths_of_omega_codes() -> None:
    """0; 10 0, 11 0; 10 100 0 ...; 11 1000 0 ...; 10 100 10000 0."""
    values = [1, 2, 3, 4, 7, 8, 15, 16, 100, 2**24 + 1, 2**24 - 1]
    assert [runs.omega_length(v) for v in values] == [1, 3, 3, 6, 6, 7, 7, 11, 13, 36, 35]
    assert runs.omega_lengths(torch.tensor(values)).tolist() == [runs.omega_length(v) for v in values]


@pytest.mark.parametrize(
    "levels, bits",
    [
        ([0, 0, 0, -1, 2, 0, 0], "101000" + "1" + "0" + "0" + "0" + "100" + "110"),  # 3 zeros, -1; 0 zeros, 2; 2 zeros
        ([3], "0" + "0" + "110"),
        ([0, 0], "110"),
        ([0, 1], "100" + "0" + "0"),
    ],
)
def test_a_row_by_hand(levels: list[int], bits: str) -> None:
    """1 more than the zeros before, a sign, and the magnitude, each number in an Elias omega code."""
    out = Writer()
    runs.write(torch.tensor(levels), out)
    stream = "".join(f"{byte:08b}" for byte in out.stream())
    assert stream[: len(bits)] == bits and set(stream[len(bits) :]) <= {"0"}
    assert runs.count(torch.tensor([levels])).tolist() == [len(bits)]


@the_same_every_time
@given(st.lists(st.one_of(st.just(0), st.integers(-70_000, 70_000)), min_size=1, max_size=200))
def test_what_is_written_is_read_and_counted(levels: list[int]) -> None:
    out = Writer()
    runs.write(torch.tensor(levels), out)
    counted = int(runs.count(torch.tensor([levels, levels[::-1]], dtype=torch.int32))[0])
    out.fixed(21, 5)  # more may follow
    reader = Reader(out.stream())
    assert runs.read(reader, len(levels)) == levels and reader.fixed(5) == 21
    assert len(out.stream()) == -(-(counted + 5) // 8)


def test_few_of_many_take_far_fewer_bits_than_numbers() -> None:
    """48 of 4,810 numbers are 1 or -1: 8 to 17 bits each, where a code for each number takes 4,810 and more."""
    levels = torch.zeros(1, 4810, dtype=torch.int32)
    levels[0, ::101] = 1
    assert int(runs.count(levels)) == 1 + 1 + 1 + 47 * (13 + 2) + runs.omega_length(63)
