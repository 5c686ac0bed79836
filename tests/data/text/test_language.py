"""Texts for language models: cutting, tokenizers, Shakespeare's roles."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tiny import compose

from fedbench.core.options import ConfigError
from fedbench.data.base import TEST, TRAIN
from fedbench.data.text._speech import ALPHABET
from fedbench.data.text._tokens import (
    Client,
    Sequences,
    characters,
    cut,
    language_arrays,
    read_tokenizer,
    unigram_perplexity,
)
from fedbench.data.text.shakespeare import BUNDLED, speeches_of
from fedbench.data.text.shakespeare_lm import ShakespeareLM
from fedbench.simulation import build


# -- cutting ---------------------------------------------------------------------------------------------
def test_each_token_but_the_first_is_a_target_once() -> None:
    text, target = cut([5, 6, 7, 8, 9, 4], 2)
    assert text.tolist() == [[5, 6], [7, 8], [9, 0]] and text.dtype == target.dtype == np.int64
    assert target.tolist() == [[6, 7], [8, 9], [4, -1]]
    assert cut([5, 6, 7], 2).target.tolist() == [[6, 7]]
    assert cut([5], 2).target.shape == cut([], 2).target.shape == (0, 2)


def test_a_prompt_is_no_target() -> None:
    """Of the prompt 5 6 7, nothing; of the response 8 9, both."""
    assert cut([5, 6, 7, 8, 9], 4, ignored=3).target.tolist() == [[-1, -1, 8, 9]]
    assert cut([5, 6, 7, 8, 9], 4, ignored=1).target.tolist() == cut([5, 6, 7, 8, 9], 4).target.tolist()


def test_a_unigram_model_by_hand() -> None:
    """Training targets 1 1 2 (of tokens 0 to 3), each counted once more: 1 3 2 1 of 7.  Tested: 1 and 3."""
    tokenizer = characters("abcd", unknown="a")
    client = Client("x", Sequences(np.array([[0, 0, 0, 0]]), np.array([[1, 1, 2, -1]])), cut([0, 1, 3], 4))
    arrays = language_arrays([client], tokenizer, "x")
    assert unigram_perplexity(arrays) == pytest.approx((7 / 3 * 7 / 1) ** 0.5)
    assert arrays.split.tolist() == [TRAIN, TEST] and arrays.class_names == ["a", "b", "c", "d"]


def test_clients_without_test_tokens_are_left_out() -> None:
    tokenizer, some = characters("abcd", unknown="a"), cut([0, 1, 2, 3], 2)
    none = Sequences(some.text[:1], np.full((1, 2), -1))
    clients = [Client("A", some, none), Client("B", some, some), Client("C", none, some)]
    arrays = language_arrays(clients, tokenizer, "x")
    assert arrays.domain_names == ["B"] and len(arrays) == 4
    with pytest.raises(ConfigError, match="x: none of 2 clients has both training and test tokens"):
        language_arrays([clients[0], clients[2]], tokenizer, "x")


# -- tokenizers ------------------------------------------------------------------------------------------
def test_characters_and_back() -> None:
    tokenizer = characters("ab \n", unknown=" ", end="end of text")
    assert tokenizer.encode("aé\nb") == [0, 2, 3, 1] and tokenizer.decode([0, 2, 3, 1, 4]) == "a \nb"
    assert (tokenizer.size, tokenizer.end) == (5, 4) and tokenizer.names == [
        "a",
        "b",
        "space",
        "newline",
        "end of text",
    ]


def make_tokenizer(path: Path) -> Path:
    """Write a tokenizer.json of words, in the format of the library tokenizers."""
    tokenizers = pytest.importorskip("tokenizers")
    vocab = {word: i for i, word in enumerate(["<unk>", "<s>", "</s>", "to", "be", "or", "not"])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    made.save(str(path))
    return path


def test_a_tokenizer_of_a_file_and_of_a_folder(tmp_path: Path) -> None:
    """A file names no start and end; a folder does, and adds its start itself."""
    file = make_tokenizer(tmp_path / "tokenizer.json")
    read = read_tokenizer(str(file))
    assert (read.size, read.start, read.end) == (7, None, None)
    assert read.encode("to be or what") == [3, 4, 5, 0] and read.decode([3, 4]) == "to be"
    transformers = pytest.importorskip("transformers")
    loaded = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(file), bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    loaded.save_pretrained(tmp_path / "folder")
    read = read_tokenizer(str(tmp_path / "folder"))
    assert (read.size, read.start, read.end) == (7, 1, 2)
    assert read.encode("to be") == [3, 4] and read.decode([1, 3, 4, 2]) == "to be"


def test_a_tokenizer_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text("{}")
    for path, words in (
        (tmp_path / "gone", "gone does not exist: set it to a tokenizer.json"),
        (tmp_path / "bad.json", "bad.json cannot be read: "),
        (tmp_path, "cannot be read: "),
    ):
        with pytest.raises(ConfigError, match=words) as error:
            read_tokenizer(str(path))
        assert "\n" not in str(error.value)


# -- Shakespeare -----------------------------------------------------------------------------------------
def test_a_roles_text_is_cut_in_time_and_nothing_is_lost() -> None:
    arrays = ShakespeareLM(length=50).load()
    assert arrays.task == "next_token" and arrays.num_classes == 80 and arrays.domain is not None
    names = arrays.domain_names
    assert names is not None and 30 < len(names) < 60 and "the_tempest_CALIBAN" in names
    speech = dict(speeches_of(sorted(BUNDLED.glob("*.txt"))))["the_tempest_CALIBAN"]
    is_his = arrays.domain == names.index("the_tempest_CALIBAN")
    parts = []
    for part in (TRAIN, TEST):
        chosen = is_his & (arrays.split == part)
        text, target = arrays.parts()["text"][chosen], arrays.targets[chosen]
        assert (text[:, 1:] == target[:, :-1])[target[:, 1:] != -1].all()
        parts.append("".join(ALPHABET[i] for i in [text[0, 0], *target[target != -1]]))
    assert "".join(parts) == speech and len(parts[0]) == round(0.8 * len(speech))


def test_every_role_is_a_client_of_a_run() -> None:
    cfg = compose(["dataset=shakespeare_lm", "partition=domain", "model=gpt_tiny"])
    arrays = build.data(cfg)
    split = build.partition(cfg, arrays)
    assert split.num_clients == arrays.num_domains > 30
    for client in range(split.num_clients):
        assert (arrays.domain[split.train[client]] == client).all()
        assert split.train[client].max() < split.test[client].min()


def test_word_pieces_of_a_tokenizer(tmp_path: Path) -> None:
    file = make_tokenizer(tmp_path / "tokenizer.json")
    arrays = ShakespeareLM(tokenizer=str(file), length=10).load()
    assert (
        arrays.num_classes == 7 and arrays.class_names is None and set(np.unique(arrays.targets)) <= {-1, 0, 3, 4, 5, 6}
    )


def test_roles_that_say_little_are_left_out(tmp_path: Path) -> None:
    few = ShakespeareLM(min_tokens=6000).load().domain_names
    assert few is not None and 3 < len(few) < 20
    with pytest.raises(ConfigError, match=r"no role in .* has dataset.min_tokens=9,999,999 tokens: lower"):
        ShakespeareLM(min_tokens=9_999_999).load()
    (tmp_path / "data.json").write_text("{}")
    with pytest.raises(ConfigError, match="has JSON files of LEAF, which dataset=shakespeare_lm does not read"):
        ShakespeareLM(path=str(tmp_path)).load()
    with pytest.raises(ConfigError, match="gone does not exist"):
        ShakespeareLM(path=str(tmp_path / "gone")).load()
