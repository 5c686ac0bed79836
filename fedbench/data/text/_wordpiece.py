"""BERT's uncased WordPiece: convert texts to token indices of a vocabulary file by the library tokenizers.

Special tokens in a text, such as "[SEP]", are treated as text.

References: Devlin et al., BERT, NAACL 2019.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from fedbench.core.options import ConfigError, require

PAD, UNKNOWN, FIRST, LAST = "[PAD]", "[UNK]", "[CLS]", "[SEP]"


def tokenize(texts: Iterable[str], vocab_file: str | Path, length: int) -> np.ndarray:
    """Return token indices of texts: [CLS], the pieces of words and [SEP], cut, or padded with [PAD], to a length.

    Args:
        texts: n texts.
        vocab_file: vocab.txt of a BERT tokenizer, one piece per line.
        length: Tokens of each text, at least 2.

    Returns:
        Indices, [n, length] int64.

    Raises:
        ConfigError: The file does not exist or lacks a special token, or tokenizers is not installed.
    """
    vocab = read_vocab(vocab_file)
    require(length >= 2, f"dataset.tokens={length} must be at least 2, for {FIRST} and {LAST}: raise it")
    try:
        from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
    except ImportError as error:
        raise ConfigError("dataset.vocab needs the package tokenizers: run pip install tokenizers") from error
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token=UNKNOWN, max_input_chars_per_word=100))  # as BERT
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    encoded = tokenizer.encode_batch(list(texts), add_special_tokens=False)
    out = np.full((len(encoded), length), vocab[PAD], np.int64)
    for row, text in zip(out, encoded, strict=True):
        indices = [vocab[FIRST], *text.ids[: length - 2], vocab[LAST]]  # [CLS] and [SEP]
        row[: len(indices)] = indices
    return out


def read_vocab(vocab_file: str | Path) -> dict[str, int]:
    """Return the index of each piece of words (token) in a vocabulary: the number of its line, counted from 0.

    Args:
        vocab_file: vocab.txt of a BERT tokenizer, one piece per line.

    Raises:
        ConfigError: The file does not exist or lacks a special token, or [PAD] is not in the first line.
    """
    path = Path(vocab_file)
    require(path.is_file(), f"{path} does not exist: set dataset.vocab to the vocab.txt of a BERT tokenizer")
    lines = path.read_text(encoding="utf-8").split("\n")
    vocab = {line.rstrip("\r"): index for index, line in enumerate(lines) if line.rstrip("\r")}
    missing = [token for token in (PAD, UNKNOWN, FIRST, LAST) if token not in vocab]  # [PAD], [UNK], [CLS] and [SEP]
    require(
        not missing,
        f"{path} is not a vocabulary of BERT: it lacks {', '.join(missing)}; set dataset.vocab to the vocab.txt of a "
        "BERT tokenizer",
    )
    require(
        vocab[PAD] == 0,
        f"{path} has {PAD} in line {vocab[PAD] + 1}, but it must be in the first one, because padding has the index 0: "
        "use the original vocab.txt",
    )
    return vocab
