"""Answers as classes: how they are compared, and which answers of a natural client are classes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Selection = Literal["all", "top100_drop"]
Normalizer = Literal["plain", "vqa"]
TOP = 100  # number of answers that are classes with top100_drop
CLOSED = frozenset(("yes", "no"))
ARTICLES = frozenset(("a", "an", "the"))
DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
NUMBERS = {"none": "0", **{word: str(i) for i, word in enumerate(DIGITS)}}
NEGATED_VERBS = (  # without the ending n't
    *("ai", "are", "ca", "could", "did", "does", "do", "had", "has", "have", "is", "might", "must", "need", "should"),
    *("was", "were", "wo", "would"),
)
# Endings of contractions by their first word, as in i'm.  Those that are words without apostrophe (its, well, were) are
# left out.
ENDINGS = {
    **{"i": "m ve", "you": "d ll re ve", "they": "d ll re ve", "we": "ve", "he": "d s", "it": "d ll", "that": "s"},
    **{"there": "s re", "what": "s ll re ve", "who": "d ll s ve", "where": "s d ve", "how": "s d ll", "when": "s"},
    **dict.fromkeys(("could", "should", "would", "might", "must"), "ve"),
}
CONTRACTIONS = {  # from the form without apostrophe
    **{f"{verb}nt": f"{verb}n't" for verb in NEGATED_VERBS},
    **{word + end: f"{word}'{end}" for word, ends in ENDINGS.items() for end in ends.split()},
}


@dataclass(frozen=True)
class AnswerRule:
    """The rule of which answers are classes of a natural client (a hospital or a data set).

    Args:
        min_count: The smallest number of occurrences in the client's training part that makes an answer a class.
            Questions with other answers remain and count as answered wrongly.
        selection: all answers, or top100_drop: the 100 most frequent ones, where training and test questions with
            another answer are removed (FedDAT).
        normalizer: plain (`normalize_plain`) or vqa (`normalize_vqa`).
    """

    min_count: int = 1
    selection: Selection = "all"
    normalizer: Normalizer = "plain"

    @property
    def drops_questions(self) -> bool:
        """Whether questions whose answer is not a class are removed.  If not, they count as answered wrongly."""
        return self.selection == "top100_drop"

    def normalize(self, answer: object) -> str:
        """Return an answer as text in which equal answers are equal, such as "yes" for "Yes.".

        With ``normalizer="vqa"``, the rules of the evaluation of VQA apply, else those of `normalize_plain`.
        """
        return normalize_plain(answer) if self.normalizer == "plain" else normalize_vqa(answer)

    def classes(self, answers: Iterable[str]) -> list[str]:
        """Return the answers that are classes of a natural client, sorted.

        They occur at least ``min_count`` times.  With the option selection=top100_drop, only the 100 most frequent ones
        are classes, and questions with other answers are removed.

        Args:
            answers: The normalized training answers, with repetitions.
        """
        counts = Counter(answers)
        classes = sorted(answer for answer in counts if counts[answer] >= self.min_count)
        if self.drops_questions:  # with selection top100_drop
            classes = sorted(sorted(classes, key=lambda answer: -counts[answer])[:TOP])  # ties in alphabetical order
        return classes


ALL_ANSWERS = AnswerRule()


def normalize_plain(answer: object) -> str:
    """Return an answer as text in lower case, with single blanks between words and without a final period."""
    return re.sub(r"\s+", " ", str(answer).lower().strip()).removesuffix(".").strip()


def normalize_vqa(answer: object) -> str:
    """Return an answer as the evaluation of VQA (visualqa.org/evaluation) and FedDAT compare it.

    It is in lower case, with digits for number words (0 for none), without articles, and with apostrophes in
    contractions.  Periods (except in decimals) and commas are removed.  Other punctuation, except apostrophe and colon,
    becomes a blank.

    Departs from VQA's code: double contractions (couldn't've) are not restored.  That code removes punctuation next to
    a blank, which is equal once blanks are merged.
    """
    text = re.sub(r"(?<!\d)\.|\.(?!\d)|,", "", str(answer).lower())  # periods, except between digits, and commas
    words = (NUMBERS.get(word, word) for word in re.sub(r"[^\w\s.':]|_", " ", text).split())
    # CONTRACTIONS: from forms without apostrophe, such as dont
    return " ".join(CONTRACTIONS.get(word, word) for word in words if word not in ARTICLES)


def is_closed(answer: str, answer_type: str | None = None) -> bool:
    """Return whether a question is closed: it asks for one of a few given answers, mostly yes or no.

    Args:
        answer: The normalized answer.
        answer_type: The published type, such as "CLOSED".  None or empty: the question is closed if the answer is yes
            or no.
    """
    return answer_type.strip().lower() == "closed" if answer_type else answer in CLOSED
