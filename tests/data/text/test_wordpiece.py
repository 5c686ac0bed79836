"""BERT's uncased WordPiece: by hand, and against the library tokenizers where it is there."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fedbench.core.options import ConfigError
from fedbench.data.text._wordpiece import split, tokenize

WORDS = (
    "[PAD] [UNK] [CLS] [SEP] what is the un ##aff ##able aff ##s a b ##b ? ! , . $ ' - 中 文 cafe naive x ##x ##y "
    "ray ct mri ##i 1 2 ##3 in show ##n image"
)
PIECES = WORDS.split()
TEXTS = [
    "What is the unaffable?",
    "",
    "  is\tthe\nCAFÉ  naïve, x-ray?!  ",
    "what's $12 in the 中文image",
    "xxyxz is unknown",
    "zebra",
    "x" * 100 + " " + "x" * 101,
    "is\u200bthe\u0000 the\ufffd\u00a0ct \u2014 mri\u3000a",
    "shown " * 30,
    "ΑΣ İ ß ﬁ x",
]


@pytest.fixture
def vocab(tmp_path: Path) -> Path:
    path = tmp_path / "vocab.txt"
    path.write_text("\n".join(PIECES) + "\n", encoding="utf-8")
    return path


def test_by_hand(vocab: Path) -> None:
    """un ##aff ##able: the longest pieces from the left; cut to make room for [SEP]."""
    number = {piece: i for i, piece in enumerate(PIECES)}

    def row(*pieces: str) -> list[int]:
        return [number[p] for p in pieces]

    found = tokenize(["the unaffable?", "zebra a", "a a a a a a a a"], vocab, 8)
    assert found.dtype == np.int64
    assert found[0].tolist() == [*row("[CLS]", "the", "un", "##aff", "##able", "?", "[SEP]"), 0]
    assert found[1].tolist() == [*row("[CLS]", "[UNK]", "a", "[SEP]"), 0, 0, 0, 0]
    assert found[2].tolist() == row("[CLS]", *"aaaaaa", "[SEP]")


def test_words() -> None:
    assert " ".join(split("Qu'est-ce que l'IRM, à 3T?")) == "qu ' est - ce que l ' irm , a 3t ?"


@pytest.mark.parametrize("length", [2, 5, 40])
def test_as_the_library(vocab: Path, length: int) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    library = tokenizers.BertWordPieceTokenizer(str(vocab), lowercase=True)
    library.enable_truncation(length)
    library.enable_padding(length=length)
    assert tokenize(TEXTS, vocab, length).tolist() == [e.ids for e in library.encode_batch(TEXTS)]


@pytest.mark.parametrize(
    "pieces, words",
    [
        (None, "is not there"),
        (["[PAD]", "[UNK]", "a"], r"lacks \[CLS\], \[SEP\]"),
        (["a", "[PAD]", "[UNK]", "[CLS]", "[SEP]"], "in line 2, not in the first"),
    ],
)
def test_what_is_refused(tmp_path: Path, pieces: list[str] | None, words: str) -> None:
    if pieces is not None:
        (tmp_path / "vocab.txt").write_text("\n".join(pieces))
    with pytest.raises(ConfigError, match=words):
        tokenize(["a"], tmp_path / "vocab.txt", 4)


def test_a_length_without_room_is_refused(vocab: Path) -> None:
    with pytest.raises(ConfigError, match="a text of 1 tokens"):
        tokenize(["a"], vocab, 1)
