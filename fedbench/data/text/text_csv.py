"""Texts with labels from a CSV file of the user, for text classification: one row per sample.

With partition=domain, each value of the client column is a client.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedbench.core.options import Count, error_prefix, listed, require, require_distinct
from fedbench.data._names import check_spelling, positions
from fedbench.data.base import TRAIN, Arrays
from fedbench.data.tables._csv import Column, CsvTable, ordered, split_codes
from fedbench.data.text._tokens import Tokenizer, characters, read_tokenizer

SOURCE = "dataset=text_csv"
ROLES = {"text": "text", "label": "label", "client": None, "split": None}  # default column of each role


@dataclass
class TextCsv:
    """Labelled texts: inputs text and mask int64 [n, length], targets int64 [n].

    mask is 1 for tokens and 0 for padding.  Texts are tokenized once, with the special tokens of the tokenizer.

    Args:
        path: A CSV file in UTF-8 whose first line names the columns.
        tokenizer: A tokenizer.json, or a folder of transformers, such as that of the model.  None: characters.
        length: Tokens of a sample.  Longer texts are cut.
        delimiter: The character between cells, or a backslash and a t for a tab.
        columns: The columns of text, label, client and split.  client and split may be None: no natural clients, no
            published split.  split contains train, val or test.
        classes: The labels in the order of their indices.  None: those in the file, sorted.
    """

    path: str | None = None
    tokenizer: str | None = None
    length: Count = 128
    delimiter: str = ","
    columns: dict[str, str | None] | None = None
    classes: list | None = None

    def __post_init__(self) -> None:
        self.delimiter = "\t" if self.delimiter == "\\t" else self.delimiter
        require(
            len(self.delimiter) == 1,
            f"dataset.delimiter={self.delimiter!r} is not one character: set it to a comma, a semicolon, or \\t for a "
            "tab",
        )
        self.roles = {**ROLES, **(self.columns or {})}
        unknown = sorted(set(self.roles) - set(ROLES))
        require(
            not unknown,
            f"dataset.columns has the keys {', '.join(unknown)}, but only {', '.join(ROLES)} are allowed: remove "
            "the others",
        )
        absent = [role for role in ("text", "label") if self.roles[role] is None]
        require(
            not absent, f"dataset.columns.{' and '.join(absent)} must not be null: set it to the name of the column"
        )
        require_distinct(map(str, self.classes or ()), "dataset.classes")

    def load(self) -> Arrays:
        """Return the tokens and labels of all rows.

        Raises:
            ConfigError: The file or the tokenizer cannot be read, or a cell is wrong.
        """
        require(self.path is not None, f"{SOURCE} needs a file, but dataset.path is null: set dataset.path to one")
        table = CsvTable(Path(str(self.path)), SOURCE, self.delimiter)
        table.require_columns([name for name in self.roles.values() if name], "set their names in dataset.columns")
        texts = self._cells(table, "text") or []  # not None: the option requires this column
        tokens, mask = self._tokens(texts)
        class_names, targets = self._targets(table)
        split, clients = self._cells(table, "split"), self._cells(table, "client")
        client_names = None if clients is None else ordered(clients)
        with error_prefix(f"{self.path}"):
            return Arrays(
                inputs={"text": tokens, "mask": mask},
                targets=targets,
                split=np.full(len(table), TRAIN, np.int8)
                if split is None
                else split_codes(split, f"{table.path}: {self.roles['split']}"),
                num_classes=len(class_names),
                class_names=class_names,
                domain=None if clients is None else positions(clients, client_names or []),
                domain_names=client_names,
            ).check()

    def _cells(self, table: CsvTable, role: str) -> list[str] | None:
        """Return the cells of the column that has a role, one per sample; None if the options name no column for it.

        Args:
            table: The CSV file.
            role: Such as "text" or "label".

        Raises:
            ConfigError: A cell is empty.
        """
        name = self.roles[role]
        return None if name is None else Column(table, name, {""}).require_values()

    def _tokens(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens of texts, padded at the end, and 1 where a token is no padding.  # [n, length] int64 each

        Args:
            texts: The texts, [n].
        """
        tokenizer = self._tokenizer(texts)
        tokens = np.full((len(texts), self.length), tokenizer.padding, np.int64)
        mask = np.zeros_like(tokens)
        for i, text in enumerate(texts):
            encoded = tokenizer.encode_whole(text, self.length)
            tokens[i, : len(encoded)], mask[i, : len(encoded)] = encoded, 1
        return tokens, mask

    def _tokenizer(self, texts: list[str]) -> Tokenizer:
        """Return the tokenizer named in dataset.tokenizer; if None, one with a token for each character in `texts`."""
        if self.tokenizer is not None:
            return read_tokenizer(self.tokenizer)
        return characters("".join(sorted(set("".join(texts)))))

    def _targets(self, table: CsvTable) -> tuple[list[str], np.ndarray]:
        """Return the class names by index, and the class index of each row of the table [n] int64.

        The names are the option classes, or if it is None the sorted labels.  Raise ConfigError for other labels.
        """
        cells = self._cells(table, "label") or []  # not None: the option requires this column
        where = f"{table.path}: column {self.roles['label']}"
        names = ordered(cells) if self.classes is None else [str(name) for name in self.classes]
        check_spelling(names, where if self.classes is None else "dataset.classes", are_labels=self.classes is None)
        unknown = sorted(set(cells) - set(names))
        require(not unknown, f"{where} has labels that are not in dataset.classes: {listed(unknown)}; add them to it")
        return names, positions(cells, names)
