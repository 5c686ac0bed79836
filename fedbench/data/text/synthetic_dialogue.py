"""Generated speech of roles with dialects of one language: a substitute for Shakespeare by speaker without a text.

The language has stems of two syllables, with frequencies by Zipf's law, and an ending for each.  Each role replaces the
endings of some stems by random ones.  Most of what a role says is therefore best learned from all roles, and some of it
only from this role.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedbench.core.options import AtLeast2, Count, NonNegativeInt
from fedbench.core.rng import generator
from fedbench.data.base import Arrays
from fedbench.data.text._speech import cut_windows, speaker_arrays

CONSONANTS, VOWELS = "bdfgklmnprstv", "aeiou"
ENDINGS = tuple(vowel + consonant for vowel in VOWELS for consonant in "lnrs")
STEMS = 200  # of the language
DIALECT = 0.3  # fraction of the stems to which a role gives another ending
TEST_FRACTION = 0.2  # of a role's samples, the last ones
WORDS = (3, 9)  # of a sentence: minimum, and maximum + 1


@dataclass
class SyntheticDialogue:
    """Generated speech: inputs text int64 [n, length], targets int64 [n] in [0, 80); roles are natural clients.

    Args:
        roles: The number of roles.
        characters: Mean length of a role's text; lengths are from half to one and a half of it.
        length: Characters of a window.
        stride: Characters from one window to the next.
        seed: Seed of the generator.
    """

    roles: AtLeast2 = 20
    characters: Count = 3000
    length: Count = 20
    stride: Count = 2
    seed: NonNegativeInt = 0

    def load(self) -> Arrays:
        """Return the windows of the generated speech of all roles.

        The language has STEMS words, each with a random stem of two syllables and an ending.

        Raises:
            ConfigError: The texts are too short for a window.
        """
        rng = generator(self.seed, "synthetic_dialogue")
        stems = ["".join(rng.choice(list(kind)) for kind in (CONSONANTS, VOWELS) * 2) for _ in range(STEMS)]
        endings = rng.choice(ENDINGS, STEMS)
        speakers = []
        for role in range(self.roles):
            text = self._text(role, stems, endings)
            speakers.append(cut_windows(f"role_{role}", text, self.length, self.stride, TEST_FRACTION))
        return speaker_arrays(speakers, "dataset=synthetic_dialogue")

    def _text(self, role: int, stems: list[str], endings: np.ndarray) -> str:
        """Generate all that a role says.

        Args:
            role: The index of the role.
            stems: The stems of the language.
            endings: The ending of each stem in the language, [STEMS].
        """
        rng = generator(self.seed, "synthetic_dialogue", role)
        # DIALECT: the probability that a stem has another ending in the role's dialect
        dialect = np.where(rng.random(STEMS) < DIALECT, rng.choice(ENDINGS, STEMS), endings)
        words = [stem + ending for stem, ending in zip(stems, dialect)]
        frequency = 1 / np.arange(1, STEMS + 1)  # Zipf's law
        length, text = int(self.characters * rng.uniform(0.5, 1.5)), ""  # characters: the mean length
        while len(text) < length:
            # WORDS: the range of the number of words in a sentence
            sentence = rng.choice(words, rng.integers(*WORDS), p=frequency / frequency.sum())
            text += " ".join(sentence).capitalize() + ". "
        return text[:length]
