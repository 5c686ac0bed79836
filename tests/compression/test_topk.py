"""Top-k by hand."""

from compressors import rows, seen

from fedbench.compression.topk import TopK


def test_the_largest_magnitudes_are_seen() -> None:
    """0.4 of 5 are 2; -4 and 3 are at 1 and 4.  Two of five positions: gaps of 1 and 2 by the width 0 take 2 + 3 bits,
    as many as a map; with the bit that says which, and two numbers, 70 bits."""
    result, bits = seen(TopK(0.4), rows([1, -4, 2, 0, 3], [0, 0, 0, 0, 0], [5, 5, -5, 5, 5]))
    assert result.tolist() == [[0, -4, 0, 0, 3], [0] * 5, [5, 5, 0, 0, 0]]
    assert bits == [1 + 2 + 3 + 64, 1 + 1 + 1 + 64, 1 + 1 + 1 + 64]


def test_one_number_is_always_sent() -> None:
    result, bits = seen(TopK(0.01), rows([-7.5]))
    assert result.tolist() == [[-7.5]] and bits == [1 + 1 + 32]


def test_all_of_them_are_the_row_itself() -> None:
    x = rows([1, float("nan"), -0.0])
    compressor = TopK(1)
    result, bits = seen(compressor, x)
    assert compressor.exact and result is not None and bits == [96]
