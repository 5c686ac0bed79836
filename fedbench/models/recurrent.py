"""LSTM and GRU: predict the next character from the last state of a text.

Hochreiter and Schmidhuber, Neural Computation 1997; Cho et al., EMNLP 2014.  As LEAF's model for Shakespeare (Caldas et
al., 2018): an embedding of size 8, 2 layers of size 256, and a linear layer on the last output of the upper one.
PyTorch has two biases for each gate where TensorFlow's LSTM has one: 819,920 parameters for 80 characters, not 817,872.
Departs from LEAF: PyTorch's initialization of layers and embedding.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fedbench.core.options import Count, require


class Recurrent(nn.Module):
    """{"text": int64 [B, T]} -> [B, C].

    Args:
        embedding: Size of the embedding of a token.
        hidden: Size of the state of a layer.
        layers: Number of layers.
        vocab: Number of tokens, which are 0 to vocab - 1.
    """

    layer: type[nn.LSTM] | type[nn.GRU]

    def __init__(
        self,
        input_shape: Any,
        num_classes: int,
        embedding: Count = 8,
        hidden: Count = 256,
        layers: Count = 2,
        vocab: Count = 80,
    ):
        super().__init__()
        shapes = input_shape if isinstance(input_shape, Mapping) else {"inputs": tuple(input_shape)}
        require(
            shapes.keys() == {"text"} and len(shapes["text"]) == 1,
            f"model={type(self).__name__.lower()} needs one input, text [T] of tokens, but the data set gives "
            f"{', '.join(f'{name} {list(shape)}' for name, shape in shapes.items())}: choose dataset=shakespeare",
        )
        self.embedding = nn.Embedding(vocab, embedding)
        self.rnn = self.layer(embedding, hidden, layers, batch_first=True)
        self.head = nn.Linear(hidden, num_classes)
        self._initialize()

    def _initialize(self) -> None:
        """Change PyTorch's initial parameters in place.  The default does nothing; LSTM overrides it."""

    def forward(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Return the logits of the token that follows each text.

        Args:
            inputs: {"text": int64 token ids [B, T]}.

        Returns:
            Logits, computed from the last layer's output at the last token.  # [B, C]
        """
        outputs, _ = self.rnn(self.embedding(inputs["text"]))  # [B, T, hidden]
        return self.head(outputs[:, -1])


class LSTM(Recurrent):
    """Long short-term memory whose initial forget biases are larger by 1.

    TensorFlow's cell, which LEAF uses, adds 1 to the forget gate in every step.  For SGD, this is the same.
    """

    layer = nn.LSTM

    @torch.no_grad()
    def _initialize(self) -> None:
        hidden = self.rnn.hidden_size
        for i in range(self.rnn.num_layers):
            getattr(self.rnn, f"bias_ih_l{i}")[hidden : 2 * hidden] += 1  # gates: in, forget, new, out


class GRU(Recurrent):
    """Gated recurrent unit."""

    layer = nn.GRU
