"""No compression: float32 numbers as they are."""

from fedbench.compression.base import Direction, Operator


class NoCompression(Operator):
    """What is sent is seen.  error_feedback, direction: alike for all operators; nothing is ever lacking here."""

    exact = True
    unbiased = True
    contracts = True
    leaves_numbers = True

    def __init__(self, error_feedback: bool = True, direction: Direction = "up"):
        super().__init__(error_feedback, direction)
