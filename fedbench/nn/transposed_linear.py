"""Linear layers of transformers whose weight is stored as [in, out]."""

from __future__ import annotations

from torch import nn


def is_transposed_linear(layer: nn.Module) -> bool:
    """Return whether a layer is transformers' Conv1D, as in GPT-2: a linear layer with the weight [in, out].

    transformers is not imported, because it need not be installed.
    """
    return type(layer).__name__ == "Conv1D" and type(layer).__module__ == "transformers.pytorch_utils"
