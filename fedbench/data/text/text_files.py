"""Texts of the user for language models: a folder with the texts of each client, or a file of JSON lines.

Layout of dataset.path, one of::

    <client>.txt                   one text per client
    <client>/*.txt                 several texts per client, at any depth
    <file>.jsonl                   a JSON object per line, with a client and a text, or a prompt and a response

A text ends with an end token, unless the tokenizer has none.  With prompts and responses, the model predicts the
responses only.  The last texts of a client are tested on.  If it has one text, its last tokens are.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from fedbench.core.options import ConfigError, Count, OpenUnit, require
from fedbench.data.base import Arrays
from fedbench.data.text._tokens import (
    Client,
    Sequences,
    Tokenizer,
    characters,
    cut,
    joined,
    language_arrays,
    read_tokenizer,
)

log = logging.getLogger("fedbench.data")
SOURCE = "dataset=text_files"
EXPECTED = "a folder with <client>.txt or <client>/*.txt, or a .jsonl file"


class Document(NamedTuple):
    """A text of a client.

    Attributes:
        client: The name of the client.
        prompt: The beginning of the text, which is not predicted; "" for a plain text.
        text: The text, or the response.
    """

    client: str
    prompt: str
    text: str


@dataclass
class TextFiles:
    """Texts of clients: inputs text int64 [n, length], targets int64 [n, length], -1 for padding and prompts.

    Args:
        path: See the module.
        tokenizer: A tokenizer.json, or a folder of transformers.  None: the characters of the texts.
        length: Tokens of a sample.  Longer plain texts become several samples, and longer responses are cut.
        test: The fraction of a client's texts that is tested on, at least one.
        client_key: The key of the client in a JSON line.
        text: The key of a plain text in a JSON line.  None: "text", or none if there are prompts.
        prompt: The key of the prompt in a JSON line.
        response: The key of the response in a JSON line.
        separator: The text between a prompt and its response.
    """

    path: str | None = None
    tokenizer: str | None = None
    length: Count = 128
    test: OpenUnit = 0.2
    client_key: str = "client"
    text: str | None = None
    prompt: str | None = None
    response: str | None = None
    separator: str = "\n"

    def __post_init__(self) -> None:
        require(
            (self.prompt is None) == (self.response is None),
            f"dataset.prompt={self.prompt} and dataset.response={self.response} belong together: set both, or none",
        )
        require(
            self.prompt is None or self.text is None,
            f"dataset.text={self.text} and dataset.prompt={self.prompt} exclude each other: omit one of them",
        )

    def load(self) -> Arrays:
        """Return the samples of all clients with training and test texts.

        Raises:
            ConfigError: The texts cannot be read, or are too short.
        """
        documents = list(self._documents())  # client, prompt ("" if there is none) and text of each
        tokenizer = self._tokenizer_of(documents)
        by_client: dict[str, list[Document]] = {}
        for document in documents:
            by_client.setdefault(document.client, []).append(document)
        clients = [self._client(name, texts, tokenizer) for name, texts in sorted(by_client.items())]
        return language_arrays(clients, tokenizer, SOURCE)

    def load_tokenizer(self) -> Tokenizer:
        """Return the tokenizer named in dataset.tokenizer; if None, one with a token per character in the texts."""
        return self._tokenizer_of(list(self._documents()) if self.tokenizer is None else [])

    def _tokenizer_of(self, documents: list[Document]) -> Tokenizer:
        """Return the tokenizer that dataset.tokenizer names; without it, the characters of the texts are the tokens.

        Args:
            documents: All texts, whose characters are the alphabet.  An end token is added to it.
        """
        separator = self.separator if self.prompt is not None else ""
        if self.tokenizer is not None:
            return replace(read_tokenizer(self.tokenizer), separator=separator)
        alphabet = {c for document in documents for c in document.prompt + document.text} | set(separator)
        return replace(characters("".join(sorted(alphabet)), end="end of text"), separator=separator)

    # -- samples -----------------------------------------------------------------------------------------
    def _client(self, name: str, documents: list[Document], tokenizer: Tokenizer) -> Client:
        """Return the training and test samples of a client.

        Args:
            name: The name of the client.
            documents: Its texts, in order.
            tokenizer: The tokenizer.
        """
        if len(documents) == 1 and self.prompt is None:  # a single plain text is divided itself
            tokens = _tokens(documents[0], tokenizer)
            first_test = round((1 - self.test) * len(tokens))
            return Client(name, cut(tokens[:first_test], self.length), cut(tokens[first_test:], self.length))
        # the last texts are for testing, a fraction ``test`` of them, at least one
        first_test = len(documents) - max(1, round(self.test * len(documents)))
        train, test = (self._samples(part, tokenizer) for part in (documents[:first_test], documents[first_test:]))
        return Client(name, train, test)

    def _samples(self, documents: list[Document], tokenizer: Tokenizer) -> Sequences:
        """Return the samples of documents as one Sequences, in their order; no samples if there are no documents.

        With the option prompt, a document is at most one sample (`_pair`); else it is cut into samples of one length.
        """
        none = cut([], self.length)
        if self.prompt is None:
            return joined([none, *(cut(_tokens(document, tokenizer), self.length) for document in documents)])
        return joined([none, *(self._pair(document, tokenizer) for document in documents)])

    def _pair(self, document: Document, tokenizer: Tokenizer) -> Sequences:
        """Return one sample of a prompt and its response, or none if the prompt alone is too long.

        The tokens of the prompt, and of the separator behind it, are no targets.  The end of a long response is cut.

        Args:
            document: The prompt and the response (text).
            tokenizer: The tokenizer, which may have a start and an end token.
        """
        start = [] if tokenizer.start is None else [tokenizer.start]
        prompt = [*start, *tokenizer.encode(document.prompt + tokenizer.separator)]
        tokens = [*prompt, *_ended(tokenizer.encode(document.text), tokenizer)]  # _ended adds the end token, if any
        if len(prompt) > self.length:
            log.warning(
                "%s: a prompt of client %s has %d tokens, so that no response fits into dataset.length=%d: it is "
                "left out; raise dataset.length to keep it", SOURCE, document.client, len(prompt), self.length,
            )  # fmt: skip
            return cut([], self.length)
        return cut(tokens[: self.length + 1], self.length, ignored=len(prompt))

    # -- files -------------------------------------------------------------------------------------------
    def _documents(self) -> Iterator[Document]:
        """Yield all texts, those of a client in their order.

        Raises:
            ConfigError: There are none, or a file cannot be read.
        """
        require(self.path is not None, f"{SOURCE} needs texts, but dataset.path is null: set it to {EXPECTED}")
        path = Path(str(self.path))
        require(path.exists(), f"dataset.path={path} does not exist: set it to {EXPECTED}")
        if path.is_file():
            yield from self._json_lines(path)
            return
        keys = {"text": self.text, "prompt": self.prompt, "response": self.response}  # options: keys of JSON lines
        given = [name for name, key in keys.items() if key is not None]
        require(
            not given,
            f"dataset.{', dataset.'.join(given)} are keys of JSON lines, but dataset.path={path} is a folder of texts: "
            "omit them, or set dataset.path to a .jsonl file",
        )
        files = [file for file in sorted(path.rglob("*.txt")) if not _is_hidden(file.relative_to(path))]
        require(bool(files), f"dataset.path={path} has no .txt files: set it to {EXPECTED}")
        for file in files:
            inside = file.relative_to(path)
            client = inside.parts[0] if len(inside.parts) > 1 else file.stem
            yield Document(client, prompt="", text="\n".join(line for _, line in _lines(file)))

    def _json_lines(self, path: Path) -> Iterator[Document]:
        """Yield the texts of a file of JSON lines; blank lines are skipped.

        Args:
            path: The file.

        Raises:
            ConfigError: A line is no JSON object with the keys, or there is none.
        """
        # the key of plain texts, or with prompts that of the responses
        text_key = (self.text or "text") if self.response is None else self.response
        is_empty = True
        for number, line in _lines(path):
            if not line.strip():
                continue
            where, is_empty = f"{path}, line {number}", False
            try:
                values = json.loads(line)
            except ValueError as error:
                raise ConfigError(f"{where} is not JSON: {error}; write one JSON object per line") from error
            require(isinstance(values, dict), f"{where} is no JSON object: write one per line, in braces")
            client = _value(values, self.client_key, "dataset.client_key", where, (str, int))
            prompt = "" if self.prompt is None else _value(values, self.prompt, "dataset.prompt", where)
            option = "dataset.text" if self.response is None else "dataset.response"
            yield Document(str(client), prompt, _value(values, text_key, option, where))
        require(not is_empty, f"dataset.path={path} has no lines: write one JSON object per line")


def _tokens(document: Document, tokenizer: Tokenizer) -> list[int]:
    """Return the tokens of a document without a prompt, between the tokenizer's start and end token if it has them."""
    start = [] if tokenizer.start is None else [tokenizer.start]
    return [*start, *_ended(tokenizer.encode(document.text), tokenizer)]


def _ended(tokens: list[int], tokenizer: Tokenizer) -> list[int]:
    """Return tokens with the tokenizer's end token behind them; unchanged if the tokenizer has none."""
    return tokens if tokenizer.end is None else [*tokens, tokenizer.end]


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (number from 1, line without its end) for each line of a text file in UTF-8.

    Raises:
        ConfigError: A line is not UTF-8.
    """
    for number, line in enumerate(path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        try:
            yield number, line.removesuffix(b"\r").decode()
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path}, line {number} is not UTF-8: save the file in this encoding") from error


def _value(values: dict[str, Any], key: str, option: str, where: str, kinds: tuple[type, ...] = (str,)) -> Any:
    """Return the value of a key of a JSON line.

    Args:
        values: The JSON object.
        key: The key.
        option: The option that names it, for messages.
        where: File and line, for messages.
        kinds: The types that the value may have.

    Raises:
        ConfigError: The key is missing, or its value has another type.
    """
    require(
        key in values, f"{where} has no key {key!r}, only {', '.join(values) or 'none'}: add it, or set {option} to one"
    )
    value = values[key]
    expected = " or ".join({"str": "a text", "int": "an integer"}[kind.__name__] for kind in kinds)
    require(
        isinstance(value, kinds) and not isinstance(value, bool),
        f"{where}: the value of {key!r} is {json.dumps(value)[:40]}, expected {expected}: replace it, or set {option} "
        "to another key",
    )
    return value


def _is_hidden(path: Path) -> bool:
    """Return whether any component of a path, a file or one of its folders, begins with a dot."""
    return any(part.startswith(".") for part in path.parts)
