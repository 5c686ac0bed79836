"""BERT's uncased WordPiece: by hand, and on real text."""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from fedbench.core.digests import digest
from fedbench.core.options import ConfigError
from fedbench.data.text._plays import split_plays
from fedbench.data.text._wordpiece import tokenize
from fedbench.data.text.shakespeare import BUNDLED

WORDS = (
    "[PAD] [UNK] [CLS] [SEP] what is the un ##aff ##able aff ##s a b ##b ? ! , . $ ' - 中 文 cafe naive x ##x ##y "
    "ray ct mri ##i 1 2 ##3 in show ##n image"
)
PIECES = WORDS.split()
EARLIER = "37173d2ebd77765ff24e931e231a464f5c95d17c12511e53efb7fffe5d67736a"
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


def test_a_special_token_in_a_text_is_text(vocab: Path) -> None:
    number = {piece: i for i, piece in enumerate(PIECES)}
    assert tokenize(["[SEP] a"], vocab, 8)[0].tolist() == [
        *(number[p] for p in ("[CLS]", "[UNK]", "[UNK]", "[UNK]", "a", "[SEP]")), 0, 0
    ]  # fmt: skip


def test_real_text_has_the_numbers_that_earlier_releases_gave(tmp_path: Path) -> None:
    """The speeches of a play, with its 400 most frequent words and all letters as pieces."""
    lines = [
        line
        for lines in split_plays((BUNDLED / "twelfth_night.txt").read_text("utf-8"), "x")["x"].values()
        for line in lines
    ]
    words = Counter(re.findall(r"[a-z]+|[^\sa-z]", " ".join(lines).lower()))
    letters = sorted(set("".join(words)))
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *letters, *(f"##{c}" for c in letters)]
    pieces += sorted(word for word, _ in words.most_common(400) if word not in letters)
    (tmp_path / "vocab.txt").write_text("\n".join(pieces), encoding="utf-8")
    assert digest(tokenize(lines, tmp_path / "vocab.txt", 24)) == EARLIER


@pytest.mark.parametrize("length", [2, 5, 40])
def test_as_the_library(vocab: Path, length: int) -> None:
    import tokenizers

    library = tokenizers.BertWordPieceTokenizer(str(vocab), lowercase=True)
    library.enable_truncation(length)
    library.enable_padding(length=length)
    assert tokenize(TEXTS, vocab, length).tolist() == [e.ids for e in library.encode_batch(TEXTS)]


@pytest.mark.parametrize(
    "pieces, words",
    [
        (None, "does not exist"),
        (["[PAD]", "[UNK]", "a"], r"lacks \[CLS\], \[SEP\]"),
        (["a", "[PAD]", "[UNK]", "[CLS]", "[SEP]"], "in line 2, but it must be in the first"),
    ],
)
def test_what_is_refused(tmp_path: Path, pieces: list[str] | None, words: str) -> None:
    if pieces is not None:
        (tmp_path / "vocab.txt").write_text("\n".join(pieces))
    with pytest.raises(ConfigError, match=words):
        tokenize(["a"], tmp_path / "vocab.txt", 4)


def test_without_the_library_there_is_one_sentence(vocab: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ConfigError, match=r"dataset\.vocab needs the package tokenizers: run pip install tokenizers"):
        tokenize(["a"], vocab, 4)


def test_a_length_without_room_is_refused(vocab: Path) -> None:
    with pytest.raises(ConfigError, match=r"dataset\.tokens=1 must be at least 2"):
        tokenize(["a"], vocab, 1)
