"""What a method's stored tensors must be to be loaded."""

import pytest
import torch

from fedbench.simulation.run_state import check_like


def test_tensors_of_the_same_kinds_pass() -> None:
    check_like({}, {})
    check_like({"w": torch.zeros(3)}, {"w": torch.ones(3)})


def test_state_that_came_in_the_rounds_passes() -> None:
    check_like({"w": torch.zeros(3)}, {"w": torch.zeros(3), "G": torch.zeros(2, 3)})


def test_a_matrix_may_have_gained_rows() -> None:
    """APPLE's downloaded cores: none at first, a row for each of the peers later."""
    check_like({"cores": torch.zeros(0, 3)}, {"cores": torch.zeros(5, 3)})


@pytest.mark.parametrize(
    ("stored", "words"),
    [
        (
            torch.zeros(4),
            r"'w' of the checkpoint is torch\.float32 \(4,\), but the method now has torch\.float32 \(3,\)",
        ),
        (
            torch.zeros(3, dtype=torch.float64),
            r"'w' of the checkpoint is torch\.float64 \(3,\), but the method now has torch\.float32",
        ),
        (torch.zeros(3, 1), r"'w' of the checkpoint is torch\.float32 \(3, 1\), but"),
        (torch.zeros(()), r"'w' of the checkpoint is torch\.float32 \(\), but"),
    ],
)
def test_another_vector_is_refused(stored: torch.Tensor, words: str) -> None:
    """A vector does not grow: its length is the model's."""
    with pytest.raises(ValueError, match=words):
        check_like({"w": torch.zeros(3)}, {"w": stored})


@pytest.mark.parametrize("stored", [torch.zeros(5, 4), torch.zeros(5, 3, 1), torch.zeros(5, 3, dtype=torch.int64)])
def test_another_matrix_is_refused_whatever_its_rows(stored: torch.Tensor) -> None:
    with pytest.raises(
        ValueError, match=r"'A' of the checkpoint is .*, but the method now has torch\.float32 \(2, 3\)"
    ):
        check_like({"A": torch.zeros(2, 3)}, {"A": stored})


def test_a_tensor_that_is_missing_is_named() -> None:
    with pytest.raises(KeyError, match="w"):
        check_like({"w": torch.zeros(3)}, {"v": torch.zeros(3)})
