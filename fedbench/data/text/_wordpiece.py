"""BERT's uncased WordPiece: texts as numbers of a vocabulary file, one piece a line.

Devlin et al., NAACL 2019, as in their released code: text is cleaned, lower-cased and freed of accents, cut at spaces,
around punctuation and around ideographs; of each word the longest piece that the vocabulary has is taken, and again of
the rest, whose pieces are written ##piece.  Departs from transformers': a text that spells a special token, "[SEP]", is
text.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np

from fedbench.core.options import require

PAD, UNKNOWN, FIRST, LAST = "[PAD]", "[UNK]", "[CLS]", "[SEP]"
LONGEST_WORD = 100  # characters; a longer one is unknown
IDEOGRAPHS = (
    *((0x4E00, 0x9FFF), (0x3400, 0x4DBF), (0x20000, 0x2A6DF), (0x2A700, 0x2B73F), (0x2B740, 0x2B81F)),
    *((0x2B820, 0x2CEAF), (0xF900, 0xFAFF), (0x2F800, 0x2FA1F)),
)
ASCII_PUNCTUATION = ((33, 47), (58, 64), (91, 96), (123, 126))


def tokenize(texts: Iterable[str], vocab_file: str | Path, length: int) -> np.ndarray:
    """[CLS] pieces [SEP] of every text, cut to `length` numbers, 0 behind them.  # [n, length] int64

    ConfigError where the file is not there or lacks a token that every text needs.
    """
    vocab = read_vocab(vocab_file)
    require(length >= 2, f"a text of {length} tokens has no place for {FIRST} and {LAST}: at least 2")
    texts = list(texts)
    out = np.zeros((len(texts), length), np.int64)
    for row, text in zip(out, texts):
        pieces = [p for word in split(text) for p in pieces_of(word, vocab)]
        numbers = [vocab[FIRST], *pieces[: length - 2], vocab[LAST]]
        row[: len(numbers)] = numbers
    return out


def read_vocab(vocab_file: str | Path) -> dict[str, int]:
    """The number of each piece: that of its line, from 0."""
    path = Path(vocab_file)
    require(path.is_file(), f"{path} is not there: name the vocab.txt of a BERT tokenizer, one piece a line")
    lines = path.read_text(encoding="utf-8").split("\n")
    vocab = {line.rstrip("\r"): number for number, line in enumerate(lines) if line.rstrip("\r")}
    missing = [token for token in (PAD, UNKNOWN, FIRST, LAST) if token not in vocab]
    require(not missing, f"{path} is no vocabulary of BERT: it lacks {', '.join(missing)}")
    require(vocab[PAD] == 0, f"{path} has {PAD} in line {vocab[PAD] + 1}, not in the first: padding is 0")
    return vocab


def split(text: str) -> list[str]:
    """Words in lower case without accents, and marks of punctuation by themselves."""
    cleaned = "".join(_cleaned(text)).lower()
    plain = (c for c in unicodedata.normalize("NFD", cleaned) if unicodedata.category(c) != "Mn")
    return "".join(f" {c} " if _is_punctuation(c) else c for c in plain).split()


def pieces_of(word: str, vocab: Mapping[str, int]) -> list[int]:
    """The numbers of a word's pieces, each the longest there is; [UNK] alone where some rest has none."""
    found, start = [], 0
    while start < len(word) <= LONGEST_WORD:
        mark = "##" if start else ""
        end = next((e for e in range(len(word), start, -1) if mark + word[start:e] in vocab), None)
        if end is None:
            return [vocab[UNKNOWN]]
        found.append(vocab[mark + word[start:end]])
        start = end
    return found or [vocab[UNKNOWN]]


def _cleaned(text: str) -> Iterator[str]:
    """Every character but those of control, any white space as a space, ideographs between spaces."""
    for c in text:
        if c in "\t\n\r" or unicodedata.category(c) == "Zs":
            yield " "
        elif ord(c) not in (0, 0xFFFD) and not unicodedata.category(c).startswith("C"):
            yield f" {c} " if _within(ord(c), IDEOGRAPHS) else c


def _is_punctuation(c: str) -> bool:
    """Everything of ASCII that is neither letter, number nor space counts, such as $ and ^."""
    return _within(ord(c), ASCII_PUNCTUATION) or unicodedata.category(c).startswith("P")


def _within(number: int, ranges: Iterable[tuple[int, int]]) -> bool:
    return any(low <= number <= high for low, high in ranges)
