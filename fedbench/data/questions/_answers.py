"""Answers as classes: how they are written, and which of a silo's there are."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Kept = Literal["all", "top100_drop"]
Normalizer = Literal["plain", "vqa"]
TOP = 100  # FedDAT's
CLOSED = frozenset(("yes", "no"))
ARTICLES = frozenset(("a", "an", "the"))
DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
NUMBERS = {"none": "0", **{word: str(i) for i, word in enumerate(DIGITS)}}
NEGATED = (
    *("ai", "are", "ca", "could", "did", "does", "do", "had", "has", "have", "is", "might", "must", "need", "should"),
    *("was", "were", "wo", "would"),
)
SHORTENED = {  # what others are drawn to, but for what is a word itself then (its, well, were)
    **{"i": "m ve", "you": "d ll re ve", "they": "d ll re ve", "we": "ve", "he": "d s", "it": "d ll", "that": "s"},
    **{"there": "s re", "what": "s ll re ve", "who": "d ll s ve", "where": "s d ve", "how": "s d ll", "when": "s"},
    **dict.fromkeys(("could", "should", "would", "might", "must"), "ve"),
}
CONTRACTIONS = {
    **{f"{verb}nt": f"{verb}n't" for verb in NEGATED},
    **{word + end: f"{word}'{end}" for word, ends in SHORTENED.items() for end in ends.split()},
}


@dataclass(frozen=True)
class Answers:
    """min_count: how often an answer occurs in a silo's training part, or it is no class; questions with others stay,
    and are answered wrongly.  kept: all; or top100_drop, the 100 most frequent, and no question with another answer,
    in training or test (FedDAT).  normalizer: plain, or vqa (`as_in_vqa`)."""

    min_count: int = 1
    kept: Kept = "all"
    normalizer: Normalizer = "plain"

    def written(self, answer: object) -> str:
        """An answer as it is compared."""
        return normalized(answer) if self.normalizer == "plain" else as_in_vqa(answer)

    def classes(self, trained: Iterable[str]) -> list[str]:
        """Those among a silo's training answers, sorted; of equally frequent ones the first in the alphabet."""
        counts = Counter(trained)
        often = [answer for answer in counts if counts[answer] >= self.min_count]
        if self.kept == "top100_drop":
            often = sorted(often, key=lambda answer: (-counts[answer], answer))[:TOP]
        return sorted(often)


EVERY = Answers()


def normalized(answer: object) -> str:
    """An answer in small letters, blanks collapsed, without a final period."""
    return re.sub(r"\s+", " ", str(answer).lower().strip()).removesuffix(".").strip()


def as_in_vqa(answer: object) -> str:
    """An answer as the evaluation of VQA (visualqa.org/evaluation), and FedDAT, compare it: in small letters, number
    words as digits (none as 0), without articles and with the apostrophes of contractions; no periods but of decimals,
    no commas, and blanks for all other punctuation but apostrophe and colon.

    Of the contractions that its code lists the double ones (couldn't've) are left out; it drops rather than replaces
    punctuation that stands beside a blank, which is the same once blanks are collapsed.
    """
    text = re.sub(r"(?<!\d)\.|\.(?!\d)|,", "", str(answer).lower())
    found = (NUMBERS.get(word, word) for word in re.sub(r"[^\w\s.':]|_", " ", text).split())
    return " ".join(CONTRACTIONS.get(word, word) for word in found if word not in ARTICLES)


def is_closed(answer: str, answer_type: str | None = None) -> bool:
    """By the data set's own type where it has one, else by the answer yes or no."""
    return answer_type.strip().lower() == "closed" if answer_type else answer in CLOSED
