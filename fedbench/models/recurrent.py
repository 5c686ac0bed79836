"""LSTM and GRU: a text is read token by token, and the last state says what follows.

Hochreiter and Schmidhuber, Neural Computation 1997; Cho et al., EMNLP 2014.  As LEAF has it for Shakespeare (Caldas et
al., 2018): an embedding of 8 numbers, 2 layers of 256, a linear layer on the last output of the upper one.  PyTorch's
layers have two biases for each gate where TensorFlow's LSTM has one: 819,920 numbers for 80 characters, not 817,872.
Departs from LEAF: PyTorch's initialization, of layers and embedding.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fedbench.core.options import Count, require


class Recurrent(nn.Module):
    """{"text": int64 [B, T]} -> [B, C].

    embedding: numbers of a token.  hidden: of a layer's state.  layers: on top of each other.  vocab: tokens that there
    are, which are 0 to vocab - 1.
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
        named = input_shape if isinstance(input_shape, Mapping) else {"inputs": tuple(input_shape)}
        require(
            named.keys() == {"text"} and len(named["text"]) == 1,
            f"model={type(self).__name__.lower()} reads tokens, by the name text [T], but the data set gives "
            f"{', '.join(f'{name} {list(shape)}' for name, shape in named.items())}: choose dataset=shakespeare",
        )
        self.embedding = nn.Embedding(vocab, embedding)
        self.rnn = self.layer(embedding, hidden, layers, batch_first=True)
        self.head = nn.Linear(hidden, num_classes)

    def forward(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Logits [B, C]."""
        outputs, _ = self.rnn(self.embedding(inputs["text"]))  # [B, T, hidden]
        return self.head(outputs[:, -1])


class LSTM(Recurrent):
    """Long short-term memory whose forget gates start with a bias raised by 1.

    TensorFlow's cell, and so LEAF, adds a constant 1 to the gate in every step: for SGD the same as a start at 1.
    """

    layer = nn.LSTM

    def __init__(
        self,
        input_shape: Any,
        num_classes: int,
        embedding: Count = 8,
        hidden: Count = 256,
        layers: Count = 2,
        vocab: Count = 80,
    ):
        super().__init__(input_shape, num_classes, embedding, hidden, layers, vocab)
        with torch.no_grad():
            for i in range(layers):
                getattr(self.rnn, f"bias_ih_l{i}")[hidden : 2 * hidden] += 1  # gates: in, forget, new, out


class GRU(Recurrent):
    """The same with three gates instead of four, and no cell beside the state."""

    layer = nn.GRU
