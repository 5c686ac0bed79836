"""Texts as tokens for language models: tokenizers, and sequences of a fixed length with their next tokens.

Letters: T tokens of a sample, n samples.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from fedbench.core.options import ConfigError, listed, require
from fedbench.data.base import TEST, TRAIN, Arrays
from fedbench.tasks.next_token import IGNORED

log = logging.getLogger("fedbench.data")

PADDING = 0  # the token of padding for language models; no earlier position depends on it
PADDINGS = ("[PAD]", "<pad>")  # names of the token of padding in a tokenizer.json


@dataclass(frozen=True)
class Tokenizer:
    """A map between texts and tokens.

    Attributes:
        size: The number of tokens, which are 0 to size - 1.
        encode: Returns the tokens of a text, without special tokens.
        encode_whole: Returns at most as many tokens of a text as the second argument says, with the special tokens that
            an encoder expects, such as [CLS] and [SEP].
        decode: Returns the text of tokens, without special tokens.
        start: The token before a document, or None.
        end: The token after a document, or None.
        names: The names of the tokens, or None.
        padding: The token of padding, on which an encoder may base positions.
        separator: The text between a prompt and what follows it, such as a line end before a response.
    """

    size: int
    encode: Callable[[str], list[int]]
    encode_whole: Callable[[str, int], list[int]]
    decode: Callable[[Sequence[int]], str]
    start: int | None = None
    end: int | None = None
    names: list[str] | None = None
    padding: int = PADDING
    separator: str = ""


@runtime_checkable
class HasTokenizer(Protocol):
    """A data set of texts, which a model trained on it can continue."""

    def load_tokenizer(self) -> Tokenizer:
        """Return the tokenizer that makes tokens of this data set's texts; raise ConfigError if it cannot be read."""
        ...


class Sequences(NamedTuple):
    """Samples of a language model: tokens (text) and, at each position, the next token (target), [n, T] each.

    Attributes:
        text: Tokens, padded at the end.  # [n, T] int64
        target: The next token at each position, IGNORED where there is none.  # [n, T] int64
    """

    text: np.ndarray
    target: np.ndarray


def cut(tokens: Sequence[int], length: int, ignored: int = 0) -> Sequences:
    """Cut a document into consecutive samples, so that each token except the first one is a target once.

    Args:
        tokens: The m tokens of the document.
        length: T.
        ignored: The first tokens, as many as this, are no targets.  The very first one never is.

    Returns:
        The samples: texts and targets [n, T] with n = ceil((m - 1) / T), padded by PADDING and IGNORED at the end.
    """
    document = np.asarray(tokens, np.int64)
    count = max(0, len(document) - 1)  # targets
    n = -(-count // length)  # rounded up
    text, target = np.full(n * length, PADDING), np.full(n * length, IGNORED)
    text[:count], target[:count] = document[:-1], document[1:]
    target[: max(0, ignored - 1)] = IGNORED  # the target of position i is token i + 1
    return Sequences(text.reshape(n, length), target.reshape(n, length))


def joined(samples: Iterable[Sequences]) -> Sequences:
    """Concatenate samples [n, T] of several documents, at least one, along their first axis."""
    texts, targets = zip(*samples, strict=True)
    return Sequences(np.concatenate(texts), np.concatenate(targets))


# -- clients ---------------------------------------------------------------------------------------------
class Client(NamedTuple):
    """The samples of a natural client.

    Attributes:
        name: The name of the client.
        train: Its training samples.
        test: Its test samples.
    """

    name: str
    train: Sequences
    test: Sequences


def language_arrays(clients: Sequence[Client], tokenizer: Tokenizer, source: str) -> Arrays:
    """Return the data set of all clients that have a target token in training and in test samples.

    The test perplexity of the frequencies of training tokens is logged.

    Args:
        clients: The training and test samples of each client.
        tokenizer: The tokenizer of their texts.
        source: The data set, for messages.

    Raises:
        ConfigError: No client remains.
    """
    used = [c for c in clients if all((part.target != IGNORED).any() for part in (c.train, c.test))]
    require(
        bool(used),
        f"{source}: none of {len(clients):,} clients has both training and test tokens: give clients longer texts",
    )
    samples = joined(part for c in used for part in (c.train, c.test))
    sizes = np.array([[len(c.train.text), len(c.test.text)] for c in used])  # [N, 2]
    arrays = Arrays(
        inputs={"text": samples.text},
        targets=samples.target,
        split=np.repeat(np.tile(np.array([TRAIN, TEST], np.int8), len(used)), sizes.flatten()),
        num_classes=tokenizer.size,
        task="next_token",
        class_names=tokenizer.names,
        domain=np.repeat(np.arange(len(used)), sizes.sum(1)),
        domain_names=[c.name for c in used],
    ).check()
    log.info(
        "%s: %s clients, %s samples of %d tokens, %s target tokens; the frequencies of training tokens have a test "
        "perplexity of %.2f",
        source, f"{len(used):,}", f"{len(arrays):,}", samples.text.shape[1],
        f"{int((samples.target != IGNORED).sum()):,}", unigram_perplexity(arrays),
    )  # fmt: skip
    return arrays


def unigram_perplexity(arrays: Arrays) -> float:
    """Return the test perplexity of a model that predicts tokens by their frequency in the training part.

    Every token is counted once more than it occurs, so that none has the probability 0.

    Args:
        arrays: Targets [n, T], IGNORED where there is none.
    """
    train, test = (arrays.targets[arrays.split == part] for part in (TRAIN, TEST))
    counts = 1 + np.bincount(train[train != IGNORED], minlength=arrays.num_classes)  # [C]
    log_p = np.log(counts / counts.sum())
    return float(np.exp(-log_p[test[test != IGNORED]].mean()))


# -- tokenizers ------------------------------------------------------------------------------------------
def characters(alphabet: str, unknown: str | None = None, end: str | None = None) -> Tokenizer:
    """Return a tokenizer whose tokens are characters.

    Args:
        alphabet: The characters, by token.
        unknown: The character of the alphabet that replaces all others.  None: others are refused.
        end: The name of an additional last token, which ends a document.  None: there is no such token.
    """
    index = {c: i for i, c in enumerate(alphabet)}

    def encode(text: str) -> list[int]:
        """Return the tokens of a text: for each character, its index in the alphabet, or that of ``unknown``.

        ``unknown`` is the character of the alphabet that stands for all others.  If it is None, they are refused.
        """
        others = [] if unknown is not None else sorted(set(text) - index.keys())
        require(
            not others,
            f"the text has the characters {listed(map(repr, others))}, which the data set of the run does not have: "
            "write the text without them",
        )
        return [index.get(c, index.get(unknown or "", 0)) for c in text]  # 0 is never used: others were refused

    names = [SHOWN.get(c, c) for c in alphabet]  # SHOWN: names of characters that cannot be seen
    return Tokenizer(
        size=len(alphabet) + (end is not None),
        encode=encode,
        encode_whole=lambda text, length: encode(text)[:length],
        decode=lambda tokens: "".join(alphabet[i] for i in tokens if i < len(alphabet)),
        end=None if end is None else len(alphabet),
        names=names if end is None else [*names, end],
    )


SHOWN = {"\n": "newline", " ": "space", "\t": "tab", "\r": "return"}  # names of characters that cannot be seen


def read_tokenizer(path: str) -> Tokenizer:
    """Read a tokenizer from the disk.

    Args:
        path: A tokenizer.json of the library tokenizers, or a folder that save_pretrained of transformers wrote.

    Raises:
        ConfigError: It does not exist or cannot be read, or a library is not installed.
    """
    require(
        Path(path).exists(),
        f"dataset.tokenizer={path} does not exist: set it to a tokenizer.json, a folder of transformers, or null for "
        "characters",
    )
    return _folder_tokenizer(path) if Path(path).is_dir() else _file_tokenizer(path)


def _file_tokenizer(path: str) -> Tokenizer:
    """Return the tokenizer of the file tokenizer.json at `path`; raise ConfigError if it cannot be read.

    It has no start and end token, because the file does not name them.
    """
    try:
        from tokenizers import Tokenizer as FileTokenizer
    except ImportError as error:
        raise ConfigError("dataset.tokenizer needs the package tokenizers: run pip install tokenizers") from error
    try:
        loaded = FileTokenizer.from_file(path)
    except Exception as error:  # the library raises no narrower type
        raise _unreadable(path, error) from error
    loaded.no_padding()
    loaded.no_truncation()
    padding = next((i for word in PADDINGS if (i := loaded.token_to_id(word)) is not None), PADDING)

    def encode_whole(text: str, length: int) -> list[int]:
        """Return at most `length` tokens of a text, with the special tokens that an encoder expects, such as [CLS]."""
        loaded.enable_truncation(length)
        try:
            return loaded.encode(text).ids
        finally:
            loaded.no_truncation()

    return Tokenizer(
        size=loaded.get_vocab_size(),
        encode=lambda text: loaded.encode(text, add_special_tokens=False).ids,
        encode_whole=encode_whole,
        padding=padding,
        decode=lambda tokens: loaded.decode(list(tokens)),
    )


def _folder_tokenizer(path: str) -> Tokenizer:
    """Return the tokenizer of a folder of transformers; raise ConfigError if it cannot be read.

    Its end token is the stored one, or None.  It has a start token only if it adds one to texts itself.
    """
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ConfigError("dataset.tokenizer needs the package transformers: run pip install transformers") from error
    try:
        loaded: Any = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise _unreadable(path, error) from error
    adds_start = loaded("").input_ids[:1] == [loaded.bos_token_id]
    return Tokenizer(
        size=len(loaded),
        encode=lambda text: loaded(text, add_special_tokens=False, verbose=False).input_ids,
        encode_whole=lambda text, length: loaded(text, truncation=True, max_length=length).input_ids,
        padding=PADDING if loaded.pad_token_id is None else loaded.pad_token_id,
        decode=lambda tokens: loaded.decode(list(tokens), skip_special_tokens=True),
        start=loaded.bos_token_id if adds_start else None,
        end=loaded.eos_token_id,
    )


def _unreadable(path: str, error: Exception) -> ConfigError:
    """Return the ConfigError for a tokenizer at a path that a library cannot read, with the first line of its error."""
    reason = next(iter(str(error).splitlines()), type(error).__name__)
    return ConfigError(
        f"dataset.tokenizer={path} cannot be read: {reason}; set it to a tokenizer.json, a folder of transformers, or "
        "null for characters"
    )
