"""No compression: rows are transmitted as float32."""

from fedbench.compression.base import Compressor, Direction


class NoCompression(Compressor):
    """Transmission of unchanged rows.

    Args:
        error_feedback: An option of all compressors, without effect here, because there is no residual.
        direction: An option of all compressors, without effect here.
    """

    exact = True
    unbiased = True
    contractive = True
    has_values = True

    def __init__(self, error_feedback: bool = True, direction: Direction = "up"):
        super().__init__(error_feedback, direction)
