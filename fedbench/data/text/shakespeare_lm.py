"""Shakespeare by speaker for language models: the next token at each position of what each role of each play says.

Source: plays of Project Gutenberg, three of which are included (plays/SOURCE.md).
Licence: the plays are in the public domain.
Layout of dataset.path: *.txt, plays, or the complete works in one file (_plays.py).

The first tokens of a role are trained on, and the last ones are tested on.  LEAF's JSON files are not read, because
they contain overlapping windows instead of texts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fedbench.core.options import Count, NonNegativeInt, OpenUnit, require
from fedbench.data.base import Arrays
from fedbench.data.text._speech import ALPHABET
from fedbench.data.text._tokens import Client, Tokenizer, characters, cut, language_arrays, read_tokenizer
from fedbench.data.text.shakespeare import BUNDLED, find_files, speeches_of

SOURCE = "dataset=shakespeare_lm"


@dataclass
class ShakespeareLM:
    """Shakespeare's roles: inputs text int64 [n, length], targets int64 [n, length], -1 for padding.

    Each role of a play is a natural client.

    Args:
        path: A play as .txt, or a folder of plays.  None: the included plays.
        tokenizer: A tokenizer.json, or a folder of transformers.  None: LEAF's 80 characters.
        length: Tokens of a sample.
        test: The fraction of a role's tokens that is tested on.
        min_tokens: The smallest number of tokens of a role.
    """

    path: str | None = None
    tokenizer: str | None = None
    length: Count = 64
    test: OpenUnit = 0.2
    min_tokens: NonNegativeInt = 1000

    def load(self) -> Arrays:
        """Return the samples of all roles with enough tokens.  Without a path, those of the BUNDLED plays.

        Raises:
            ConfigError: There are no plays, or no role says enough.
        """
        path = BUNDLED if self.path is None else Path(self.path)
        require(path.exists(), f"dataset.path={path} does not exist: set it to plays as .txt, or null")
        files = find_files(path)
        require(
            "txt" in files,
            f"dataset.path={path} has JSON files of LEAF, which {SOURCE} does not read: set it to plays as .txt, or "
            "choose dataset=shakespeare",
        )
        tokenizer = self.load_tokenizer()
        clients = list(self._clients(files["txt"], tokenizer))
        require(
            bool(clients),
            f"{SOURCE}: no role in {path} has dataset.min_tokens={self.min_tokens:,} tokens: lower dataset.min_tokens",
        )
        return language_arrays(clients, tokenizer, SOURCE)

    def load_tokenizer(self) -> Tokenizer:
        """Return the tokenizer that dataset.tokenizer names; if None, one of the characters of ALPHABET.

        It reads all other characters as spaces."""
        return characters(ALPHABET, unknown=" ") if self.tokenizer is None else read_tokenizer(self.tokenizer)

    def _clients(self, files: list[Path], tokenizer: Tokenizer) -> Iterator[Client]:
        """Yield the roles of plays that have enough tokens.

        Args:
            files: Text files of plays.
            tokenizer: The tokenizer.
        """
        for speaker, speech in speeches_of(files):
            tokens = tokenizer.encode(speech)
            if len(tokens) >= self.min_tokens:
                first_test = round((1 - self.test) * len(tokens))
                train, test = (cut(part, self.length) for part in (tokens[:first_test], tokens[first_test:]))
                yield Client(speaker, train, test)
