"""Generated speech of roles that share a language and have dialects: what Shakespeare by speaker is, without a text.

The language has stems of two syllables, used as often as Zipf's law has it, and an ending for each.  A role says
another ending for some of the stems, its own choice of both.  So most of what a role says is best learned from all, and
some of it from this role alone.
"""

from __future__ import annotations

import numpy as np

from fedbench.core.options import AtLeast2, Count, NonNegativeInt
from fedbench.core.rng import generator
from fedbench.data.base import Arrays
from fedbench.data.text._speech import arrays_of, windows

CONSONANTS, VOWELS = "bdfgklmnprstv", "aeiou"
ENDINGS = tuple(vowel + consonant for vowel in VOWELS for consonant in "lnrs")
STEMS = 200  # of the language
DIALECT = 0.3  # share of the stems that a role ends in its way
TEST_SHARE = 0.2  # of a role's samples, the last ones
WORDS = (3, 9)  # of a sentence: at least, and less than


class SyntheticDialogue:
    """inputs text int64 [n, length], targets int64 [n] in [0, 80); each role is a natural silo.

    roles: speakers.  characters: that a role says, on average: from half of it to one and a half.
    length, stride: as in Shakespeare.
    """

    def __init__(
        self,
        roles: AtLeast2 = 20,
        characters: Count = 3000,
        length: Count = 20,
        stride: Count = 2,
        seed: NonNegativeInt = 0,
    ):
        self.roles, self.characters = roles, characters
        self.length, self.stride, self.seed = length, stride, seed

    def load(self) -> Arrays:
        """Generate the speeches; ConfigError where they are too short for a window."""
        rng = generator(self.seed, "synthetic_dialogue")
        stems = ["".join(rng.choice(list(kind)) for kind in (CONSONANTS, VOWELS) * 2) for _ in range(STEMS)]
        endings = rng.choice(ENDINGS, STEMS)
        spoken = [windows(f"role_{r}", self._said(r, stems, endings), self.length, self.stride, TEST_SHARE)
                  for r in range(self.roles)]  # fmt: skip
        return arrays_of(spoken, "dataset=synthetic_dialogue")

    def _said(self, role: int, stems: list[str], endings: np.ndarray) -> str:
        rng = generator(self.seed, "synthetic_dialogue", role)
        own = np.where(rng.random(STEMS) < DIALECT, rng.choice(ENDINGS, STEMS), endings)
        lexicon = [stem + ending for stem, ending in zip(stems, own)]
        often = 1 / np.arange(1, STEMS + 1)
        wanted, text = int(self.characters * rng.uniform(0.5, 1.5)), ""
        while len(text) < wanted:
            sentence = rng.choice(lexicon, rng.integers(*WORDS), p=often / often.sum())
            text += " ".join(sentence).capitalize() + ". "
        return text[:wanted]
