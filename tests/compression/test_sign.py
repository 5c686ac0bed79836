"""Signs by hand."""

from compressors import rows, seen

from fedbench.compression.sign import Sign


def test_signs_and_the_mean_magnitude_are_seen() -> None:
    """(1 + 2 + 0 + 5) / 4 = 2; a zero, of either sign, counts as positive."""
    result, bits = seen(Sign(), rows([1, -2, 0, -5], [0, -0.0, 0, 0], [-3, -3, -3, -3]))
    assert result.tolist() == [[2, -2, 2, -2], [0, 0, 0, 0], [-3, -3, -3, -3]] and bits == [36] * 3


def test_a_mean_of_huge_ratios_is_rounded_once() -> None:
    result, bits = seen(Sign(), rows([1e30, 1e-30, 0]))
    assert result.tolist() == rows([1e30 / 3] * 3).tolist() and bits == [35]


def test_one_number_is_itself() -> None:
    assert seen(Sign(), rows([-0.1]))[0].tolist() == rows([-0.1]).tolist()
