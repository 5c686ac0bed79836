"""Texts for language models: cutting, tokenizers, Shakespeare's roles."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tiny import compose

from fedbench.core.options import ConfigError
from fedbench.data.base import TEST, TRAIN, Arrays
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
from fedbench.data.text.text_files import TextFiles
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


# -- texts of the user -----------------------------------------------------------------------------------
def read(arrays: Arrays, client: str, part: int) -> list[str]:
    """The samples of a client as texts: what is read, and in brackets what is predicted."""
    assert arrays.domain_names is not None and arrays.domain is not None and arrays.class_names is not None
    chosen = (arrays.domain == arrays.domain_names.index(client)) & (arrays.split == part)
    names = [
        "$" if name == "end of text" else {"space": " ", "newline": "/"}.get(name, name) for name in arrays.class_names
    ]
    shown = []
    for text, target in zip(arrays.parts()["text"][chosen], arrays.targets[chosen]):
        count = int(np.flatnonzero(target != -1)[-1]) + 1
        shown.append("".join(names[i] for i in text[:count]) + "[" + "".join(names[i] for i in target if i != -1) + "]")
    return shown


def test_a_folder_with_a_text_or_a_folder_per_client(tmp_path: Path) -> None:
    """One text is cut in time: of 8 tokens with the end, 6.4 train.  Of three texts, the last one is tested on."""
    (tmp_path / "ann.txt").write_text("to beor")
    (tmp_path / ".hidden.txt").write_text("~")
    for name, text in (("1.txt", "be"), ("2.txt", "or\r\nnot"), ("late/3.txt", "tobe")):
        (tmp_path / "bob" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "bob" / name).write_bytes(text.encode())
    arrays = TextFiles(str(tmp_path), length=5).load()
    assert arrays.domain_names == ["ann", "bob"] and arrays.class_names == [
        "newline",
        "space",
        *"benort",
        "end of text",
    ]
    assert read(arrays, "ann", TRAIN) == ["to be[o beo]"] and read(arrays, "ann", TEST) == ["r[$]"]
    assert read(arrays, "bob", TRAIN) == ["be[e$]", "or/no[r/not]", "t[$]"] and read(arrays, "bob", TEST) == [
        "tobe[obe$]"
    ]


def lines(path: Path, *rows: dict | str) -> str:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n")
    return str(path)


def test_json_lines_of_plain_texts(tmp_path: Path) -> None:
    rows = [{"who": who, "words": words} for who, words in ((7, "ab"), ("x", "b"), (7, "ba"), ("x", "aa"), (7, "bb"))]
    arrays = TextFiles(lines(tmp_path / "t.jsonl", *rows, "", "  "), length=4, client_key="who", text="words").load()
    assert arrays.domain_names == ["7", "x"]
    assert read(arrays, "7", TRAIN) == ["ab[b$]", "ba[a$]"] and read(arrays, "7", TEST) == ["bb[b$]"]
    assert read(arrays, "x", TRAIN) == ["b[$]"] and read(arrays, "x", TEST) == ["aa[a$]"]


def test_the_loss_is_on_the_response_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The separator predicts the first token of the response.  A long response is cut, a long prompt left out."""
    rows = [
        {"client": "A", "ask": ask, "say": say}
        for ask, say in (("ab", "cd"), ("a", "bbbbb"), ("abcde", "d"), ("d", "a"))
    ]
    path = lines(tmp_path / "pairs.jsonl", *rows)
    arrays = TextFiles(path, length=5, prompt="ask", response="say").load()
    assert read(arrays, "A", TRAIN) == ["ab/cd[cd$]", "a/bbb[bbbb]"] and read(arrays, "A", TEST) == ["d/a[a$]"]
    assert "a prompt of client A has 6 tokens, so that no response fits into dataset.length=5" in caplog.text
    arrays = TextFiles(path, length=5, prompt="ask", response="say", separator=" > ").load()
    assert read(arrays, "A", TRAIN) == ["ab > [c]", "a > b[bb]"]


def test_start_and_end_of_a_folder_of_transformers(tmp_path: Path) -> None:
    """<s> to be \n is the prompt, or not </s> the response."""
    transformers = pytest.importorskip("transformers")
    file = make_tokenizer(tmp_path / "tokenizer.json")
    loaded = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(file), bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    loaded.save_pretrained(tmp_path / "folder")
    path = lines(tmp_path / "t.jsonl", *[{"client": 0, "q": "to be", "a": "or not"}] * 2)
    arrays = TextFiles(path, str(tmp_path / "folder"), length=6, prompt="q", response="a").load()
    assert arrays.parts()["text"][0].tolist() == [1, 3, 4, 5, 6, 0] and arrays.targets[0].tolist() == [
        -1,
        -1,
        5,
        6,
        2,
        -1,
    ]
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "A.txt").write_text("to be or not " * 5)
    arrays = TextFiles(str(tmp_path / "texts"), str(tmp_path / "folder"), length=30).load()
    assert arrays.parts()["text"][0, :3].tolist() == [1, 3, 4] and arrays.targets[1].tolist()[2:4] == [2, -1]


GOOD = {"client": "A", "text": "x"}


@pytest.mark.parametrize(
    "rows, options, words",
    [
        ([GOOD, "{"], {}, r"t.jsonl, line 2 is not JSON: .*; write one JSON object per line"),
        ([GOOD, "", "[1]"], {}, r"t.jsonl, line 3 is no JSON object"),
        ([GOOD, {"text": "x"}], {}, r"line 2 has no key 'client', only text: add it, or set dataset.client_key to one"),
        (
            [GOOD, {"client": "A", "Text": "x"}],
            {},
            r"line 2 has no key 'text', only client, Text: add it, or set dataset.text",
        ),
        ([{"client": "A", "text": 3}], {}, r"line 1: the value of 'text' is 3, expected a text: replace it"),
        ([{"client": 0.5, "text": "x"}], {}, r"the value of 'client' is 0.5, expected a text or an integer"),
        (
            [{"client": "A", "q": "x"}],
            {"prompt": "q", "response": "a"},
            r"no key 'a', only .*, or set dataset.response",
        ),
        ([""], {}, r"t.jsonl has no lines"),
        ([GOOD, GOOD], {"prompt": "q"}, "dataset.prompt=q and dataset.response=None belong together"),
        ([GOOD], {"prompt": "q", "response": "a", "text": "text"}, "exclude each other"),
        ([GOOD], {}, "none of 1 clients has both training and test tokens"),
    ],
)
def test_a_mistake_in_a_file_is_one_sentence_with_its_line(
    tmp_path: Path, rows: list, options: dict[str, str], words: str
) -> None:
    path = lines(tmp_path / "t.jsonl", *rows)
    with pytest.raises(ConfigError, match=words) as error:
        TextFiles(path, **options).load()  # type: ignore[arg-type]
    assert "\n" not in str(error.value)


def test_a_mistake_in_a_folder_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"dataset=text_files needs texts, but dataset.path is null"):
        TextFiles().load()
    with pytest.raises(ConfigError, match=r"gone does not exist: set it to a folder with <client>.txt"):
        TextFiles(str(tmp_path / "gone")).load()
    with pytest.raises(ConfigError, match=r"has no .txt files"):
        TextFiles(str(tmp_path)).load()
    (tmp_path / "a.txt").write_bytes(b"good\nb\xe4d\n")
    with pytest.raises(ConfigError, match=r"a.txt, line 2 is not UTF-8: save the file in this encoding"):
        TextFiles(str(tmp_path)).load()
    with pytest.raises(ConfigError, match=r"dataset.text are keys of JSON lines, but .* is a folder of texts"):
        TextFiles(str(tmp_path), text="text").load()
