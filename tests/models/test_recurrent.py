"""LSTM and GRU: LEAF's sizes, the forget gates' start, and that many clients at once are each one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import all_clients, close, compose, engine, seeded, split_of

from fedbench.core.options import ConfigError
from fedbench.data.text.synthetic_dialogue import SyntheticDialogue
from fedbench.models.recurrent import GRU, LSTM, Recurrent
from fedbench.nn.flat import FlatModel
from fedbench.simulation import build
from fedbench.simulation.output_checks import check_outputs

SHAPE = {"text": (5,)}
KINDS = {"lstm": LSTM, "gru": GRU}


@pytest.mark.parametrize("name, size", [("lstm", 819_920), ("gru", 620_240)])
def test_sizes_and_parts(name: str, size: int) -> None:
    """Of LEAF: 80 characters by 8 numbers, two layers of 256; a gate has a matrix for inputs, one for states, two
    biases: 4 or 3 of them.  As conf/model says."""
    gates = {"lstm": 4, "gru": 3}[name]
    layers = gates * 256 * (8 + 256 + 2) + gates * 256 * (256 + 256 + 2)
    assert size == 80 * 8 + layers + 80 * 257
    cfg = compose([f"model={name}"]).model
    options = {k: v for k, v in cfg.items() if k not in ("_target_", "columns", "freeze")}
    model = FlatModel(
        KINDS[name]({"text": (80,)}, 80, **options), {group: list(names) for group, names in cfg.columns.items()}
    )
    assert model.trained.size == size and model.columns["head"].size == 80 * 257
    assert model.columns["base"].size == size - 80 * 257


def plain(layers: int) -> torch.nn.LSTM:
    """Return PyTorch's layers, drawn after an embedding as the model's are."""
    torch.nn.Embedding(80, 8)
    return torch.nn.LSTM(8, 3, layers, batch_first=True)


def test_the_forget_gates_alone_start_higher() -> None:
    """By 1, in every layer; nothing else is other than PyTorch's."""
    raised = dict(seeded(lambda: LSTM(SHAPE, 4, hidden=3)).rnn.named_parameters())
    for name, value in seeded(lambda: plain(2)).named_parameters():
        moved = torch.tensor([0.0] * 3 + [1.0] * 3 + [0.0] * 6) if name.startswith("bias_ih") else torch.zeros(())
        close((raised.pop(name) - value).detach(), moved.expand_as(value))
    assert not raised


def test_a_higher_start_keeps_the_state() -> None:
    """Without what the seed drew, a cell of 1 is sigmoid(1) a step later."""
    module, drawn = seeded(lambda: LSTM(SHAPE, 4, hidden=3, layers=1)).rnn, seeded(lambda: plain(1))
    with torch.no_grad():
        for parameter, other in zip(module.parameters(), drawn.parameters(), strict=True):
            parameter.sub_(other)
        _, (_, cell) = module(torch.ones(1, 1, 8), (torch.ones(1, 1, 3), torch.ones(1, 1, 3)))
    close(cell.flatten(), torch.ones(3).sigmoid())


@pytest.mark.parametrize("kind", [LSTM, GRU])
def test_the_last_state_answers(kind: type[Recurrent]) -> None:
    """All characters count, and in their order."""
    module = seeded(lambda: kind(SHAPE, 4, hidden=6, layers=2))
    text = torch.tensor([[1, 2, 3, 4, 5]])
    out = module({"text": text})
    _, last = module.rnn(module.embedding(text))
    top = last[0] if kind is LSTM else last
    close(out.detach(), module.head(top[-1]).detach())
    for i in range(5):
        other = text.clone()
        other[0, i] = 9
        assert not torch.allclose(module({"text": other}), out)
    assert not torch.allclose(module({"text": text.flip(1)}), out)


@pytest.mark.parametrize("kind", [LSTM, GRU])
def test_many_clients_at_once_train_as_each_one(kind: type[Recurrent]) -> None:
    """The fused layers of one client, and what is written out for several: a round's rows differ by less than 1e-5."""
    arrays = SyntheticDialogue(roles=3, characters=120, length=6).load()
    split = split_of((11, 20, 15))
    rows = {}
    for plan in ("loop", "vmap", "threaded pairs"):
        module = seeded(lambda: kind({"text": (6,)}, 80, hidden=7))
        e = engine(arrays, split, module, plan=plan, epochs=2)
        assert e.model.uses_vmap
        rows[plan] = all_clients(e).train(e.model.init_row()).theta
    assert (rows["loop"] - rows["loop"][0]).abs().max() > 1e-3
    for plan in ("vmap", "threaded pairs"):
        assert (rows[plan] - rows["loop"]).abs().max() < 1e-5


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(
    "shape, said",
    [
        ((1, 8, 8), r"inputs \[1, 8, 8\]"),
        ((20,), r"inputs \[20\]"),
        ({"image": (1, 8, 8), "text": (6,)}, r"image \[1, 8, 8\], text \[6\]"),
    ],
)
def test_only_texts_are_read(name: str, shape: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=rf"model={name} needs one input, text \[T\] of tokens, but .*{said}"):
        KINDS[name](shape, 10)


def test_a_small_vocabulary_is_a_sentence() -> None:
    cfg = compose(["dataset=synthetic_dialogue", "dataset.characters=300", "partition=domain", "model=lstm"])
    cfg.model.vocab = 10
    arrays = build.data(cfg)
    federation = build.federation(cfg, arrays, build.partition(cfg, arrays), torch.device("cpu"))
    most = int(arrays.parts()["text"].max())
    words = rf"LSTM has an embedding of {most} tokens \(embedding\), but .* text has tokens up to {most}: use at"
    with pytest.raises(ConfigError, match=words):
        check_outputs(FlatModel(LSTM({"text": (20,)}, 80, vocab=most)), federation, "LSTM")
    check_outputs(FlatModel(LSTM({"text": (20,)}, 80, vocab=most + 1)), federation, "LSTM")
