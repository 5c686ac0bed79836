"""Small federations of texts for language models, and a method on one of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedbench.core.split import Split
from fedbench.data.base import Arrays
from fedbench.simulation.run_state import Simulation
from fedbench.tasks.next_token import IGNORED
from fedbench.testing._cases import TRAIN_SIZES, VAL_SIZES, Case
from fedbench.testing._federation import split_of

LENGTH, VOCAB = 6, 9
BERT_WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "to", "be", "or", "not", ","]


def language(sizes: tuple[int, ...] = TRAIN_SIZES, val: tuple[int, ...] = VAL_SIZES) -> tuple[Arrays, Split]:
    """Return random walks over tokens as texts of different lengths, and a split of clients of these sizes."""
    rng = np.random.default_rng(0)
    split = split_of(sizes, val=val)
    n = 2 * sum(sizes) + sum(val)
    walk = (rng.integers(0, VOCAB, (n, 1)) + rng.integers(0, 3, (n, LENGTH + 1)).cumsum(1)) % VOCAB
    text, target = walk[:, :-1].copy(), walk[:, 1:].copy()
    is_padding = np.arange(LENGTH) >= rng.integers(2, LENGTH + 1, (n, 1))
    text[is_padding], target[is_padding] = 0, IGNORED
    target[rng.random(n) < 0.3, 0] = IGNORED  # as for a prompt
    return Arrays({"text": text}, target, np.zeros(n, np.int8), VOCAB, task="next_token").check(), split


class LanguageCase(Case):
    """A method on texts instead of images, for the checks of methods."""

    def simulation(self, plan: Any = "vmap", split: Any = None, arrays: Any = None, **values: Any) -> Simulation:
        """Return a new run on the texts."""
        own_arrays, own_split = language()
        return super().simulation(plan, split or own_split, arrays or own_arrays, **values)


def bert_tokenizer(folder: Path) -> Path:
    """Write a tokenizer of words in the layout of transformers, with BERT's special tokens."""
    tokenizers, transformers = pytest.importorskip("tokenizers"), pytest.importorskip("transformers")
    made = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({w: i for i, w in enumerate(BERT_WORDS)}, unk_token="[UNK]")
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    loaded = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]"
    )
    loaded.save_pretrained(folder)
    return folder
