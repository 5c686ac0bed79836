"""Bit streams: round trips, and the codes' definitions."""

from hypothesis import given
from hypothesis import strategies as st
from properties import the_same_every_time
from torch import tensor

from fedbench.compression._runs import omega_length
from fedbench.compression._stream import Reader, Writer


def written(*calls: tuple) -> str:
    """The stream's bits, in the bytes' order."""
    out = Writer()
    for name, *given_ in calls:
        getattr(out, name)(*given_)
    return "".join(f"{byte:08b}" for byte in out.stream())


def test_codes_are_those_of_their_definitions() -> None:
    """Elias gamma of 1 to 5: 1, 010, 011, 00100, 00101 with the unary part written in ones and a zero."""
    assert [written(("gamma", v)).rstrip("0") or "0" for v in (1, 2, 3, 4, 5)] == ["0", "1", "101", "11", "11001"]
    omegas = [written(("omega", v), ("fixed", 1, 1))[: length + 1] for v, length in ((1, 1), (2, 3), (4, 6), (16, 11))]
    assert omegas == ["01", "1001", "1010001", "101001000001"]  # 10100 10000 0 of 16, and the bit behind each
    assert written(("unary", 3)) == "11100000"
    assert written(("rice", 6, 2), ("fixed", 1, 1)) == "10" + "10" + "1000"  # 6 = 1 * 4 + 2
    assert written(("fixed", 5, 4), ("fixed", 0, 0), ("fixed", 3, 4)) == "01010011"
    assert written(("floats", tensor([1.0, -2.0]))) == f"{0x3F800000:032b}{0xC0000000:032b}"
    assert Writer().stream() == b""


values = st.one_of(
    st.tuples(st.just("fixed"), st.integers(0, 2**20 - 1), st.integers(20, 64)),
    st.tuples(st.just("unary"), st.integers(0, 40)),
    st.tuples(st.just("gamma"), st.integers(1, 2**40)),
    st.tuples(st.just("omega"), st.integers(1, 2**40)),
    st.tuples(st.just("rice"), st.integers(0, 3000), st.integers(7, 12)),
)


@the_same_every_time
@given(st.lists(values, max_size=30))
def test_what_is_written_is_read(calls: list[tuple]) -> None:
    out = Writer()
    for name, value, *width in calls:
        getattr(out, name)(value, *width)
    reader = Reader(out.stream())
    assert [getattr(reader, name)(*width) for name, _, *width in calls] == [value for _, value, *_ in calls]
    lengths = {"unary": lambda v: v + 1, "gamma": lambda v: 2 * v.bit_length() - 1, "fixed": lambda v, w: w}
    lengths["omega"] = omega_length
    lengths["rice"] = lambda v, w: (v >> w) + 1 + w
    bits = sum(lengths[name](value, *width) for name, value, *width in calls)
    assert len(out.stream()) == -(-bits // 8)
