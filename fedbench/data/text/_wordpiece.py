"""BERT's uncased WordPiece: texts as numbers of a vocabulary file, by the library tokenizers.

A text that spells a special token, such as "[SEP]", is text.

References: Devlin et al., BERT, NAACL 2019.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from fedbench.core.options import ConfigError, require

PAD, UNKNOWN, FIRST, LAST = "[PAD]", "[UNK]", "[CLS]", "[SEP]"


def tokenize(texts: Iterable[str], vocab_file: str | Path, length: int) -> np.ndarray:
    """Return the numbers of [CLS], the pieces and [SEP] of every text, cut or padded with 0 to a length.

    Args:
        texts: n texts.
        vocab_file: vocab.txt of a BERT tokenizer, one piece a line.
        length: Numbers of each text, at least 2.

    Returns:
        [n, length] int64.

    Raises:
        ConfigError: The file is absent or lacks a special token, or tokenizers is not installed.
    """
    vocab = read_vocab(vocab_file)
    require(length >= 2, f"a text of {length} tokens has no place for {FIRST} and {LAST}: at least 2")
    try:
        from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
    except ImportError as error:
        raise ConfigError("dataset.vocab needs tokenizers: pip install tokenizers") from error
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token=UNKNOWN, max_input_chars_per_word=100))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    encoded = tokenizer.encode_batch(list(texts), add_special_tokens=False)
    out = np.full((len(encoded), length), vocab[PAD], np.int64)
    for row, text in zip(out, encoded, strict=True):
        numbers = [vocab[FIRST], *text.ids[: length - 2], vocab[LAST]]
        row[: len(numbers)] = numbers
    return out


def read_vocab(vocab_file: str | Path) -> dict[str, int]:
    """Return the number of each piece, its line from 0; ConfigError if a special token is absent."""
    path = Path(vocab_file)
    require(path.is_file(), f"{path} is not there: name the vocab.txt of a BERT tokenizer, one piece a line")
    lines = path.read_text(encoding="utf-8").split("\n")
    vocab = {line.rstrip("\r"): number for number, line in enumerate(lines) if line.rstrip("\r")}
    missing = [token for token in (PAD, UNKNOWN, FIRST, LAST) if token not in vocab]
    require(not missing, f"{path} is no vocabulary of BERT: it lacks {', '.join(missing)}")
    require(vocab[PAD] == 0, f"{path} has {PAD} in line {vocab[PAD] + 1}, not in the first: padding is 0")
    return vocab
