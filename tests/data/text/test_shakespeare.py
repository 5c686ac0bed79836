"""Next characters by speaker: windows and their cut, the layouts of plays, LEAF's files, generated dialects."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny import compose

from fedbench.core.options import ConfigError
from fedbench.data.base import TEST, TRAIN, Arrays
from fedbench.data.text import synthetic_dialogue
from fedbench.data.text._plays import join_lines, split_plays
from fedbench.data.text._speech import ALPHABET, baselines, cut_windows, encode, select_windows, speaker_arrays
from fedbench.data.text.shakespeare import Shakespeare
from fedbench.data.text.synthetic_dialogue import SyntheticDialogue
from fedbench.simulation import build

LONG = " ".join(f"line {i} of what is said," for i in range(40))


def read(numbers: np.ndarray) -> str:
    return "".join(ALPHABET[i] for i in numbers)


def shown(arrays: Arrays, speaker: str, split: int) -> list[str]:
    """A speaker's samples: what is shown, and what follows it."""
    assert arrays.domain is not None and arrays.domain_names is not None
    mine = (arrays.domain == arrays.domain_names.index(speaker)) & (arrays.split == split)
    return [read(text) + read(target[None]) for text, target in zip(arrays.parts()["text"][mine], arrays.targets[mine])]


# -- windows ---------------------------------------------------------------------------------------------
def test_the_alphabet_is_leafs() -> None:
    assert len(ALPHABET) == 80 and ALPHABET.startswith("\n !\"&'(),-.0123456789:;>?AB")
    assert ALPHABET.endswith("YZ[]abcdefghijklmnopqrstuvwxyz}")
    assert encode("a~é\U0001f3ad\x7f").tolist() == [ALPHABET.index("a"), 1, 1, 1, 1]


@pytest.mark.parametrize(
    "stride, starts, parts",
    [
        (1, [*range(16), 18, 19], [TRAIN] * 16 + [TEST] * 2),  # 16 of 20, and 2 = length - 1 between
        (3, [0, 3, 6, 9, 12, 15, 18], [TRAIN] * 6 + [TEST]),
        (17, [0], [TRAIN]),  # 17 lies between
    ],
)
def test_the_first_windows_train_and_the_last_test(stride: int, starts: list[int], parts: list[int]) -> None:
    start, split = select_windows(20, 3, stride, 0.2)
    assert start.tolist() == starts and split.tolist() == parts and split.dtype == np.int8


def test_a_share_is_counted_as_written() -> None:
    assert (select_windows(10, 1, 1, 0.1)[1] == TEST).sum() == 1  # 0.9 * 10 is below 9 in floating point
    assert (select_windows(30, 1, 1, 0.3)[1] == TRAIN).sum() == 21


def test_windows_slide_and_ask_for_what_follows() -> None:
    text = "To be, or not to be"
    made = cut_windows("HAMLET", text, 4, 1, 0.2)
    start, split = select_windows(len(text) - 4, 4, 1, 0.2)
    assert [read(row) for row in made.text] == [text[i : i + 4] for i in start]
    assert [ALPHABET[i] for i in made.target] == [text[i + 4] for i in start]
    assert made.split.tolist() == split.tolist()
    for text in ("To b", "T"):
        assert len(cut_windows("nobody", text, 4, 1, 0.2).target) == 0


def test_those_who_cannot_be_tested_are_no_client() -> None:
    spoken = [cut_windows(name, text, 4, 1, 0.2) for name, text in (("A", LONG), ("B", "short words"), ("C", LONG))]
    arrays = speaker_arrays(spoken, "x")
    assert arrays.domain_names == ["A", "C"] and np.bincount(arrays.domain).tolist() == [len(spoken[0].target)] * 2
    with pytest.raises(ConfigError, match="x: none of 1 speakers has enough text"):
        speaker_arrays(spoken[1:2], "x")


def test_counting_characters_by_hand(caplog: pytest.LogCaptureFixture) -> None:
    """Trained on: a after x three times, b after y twice, b after x once, c after z once.  Tested: x a, y b, z b, d b.
    The most frequent one of training is a (3 of 7; b is 3, and later).  Behind d, never seen, a is the guess."""
    pairs = ["xa", "xa", "xa", "yb", "yb", "xb", "zc"], ["xa", "yb", "zb", "db"]
    both = [*pairs[0], *pairs[1]]
    arrays = Arrays(
        {"text": np.stack([encode("-" + p[0]) for p in both])},
        np.concatenate([encode(p[1]) for p in both]),
        np.array([TRAIN] * 7 + [TEST] * 4, np.int8),
        80,
    )
    assert baselines(arrays) == (0.25, 0.5)
    caplog.set_level("INFO", "fedbench.data")
    speaker_arrays([cut_windows("A", "ab" * 40, 4, 1, 0.2)], "spoken")
    assert "spoken: 1 speakers, 73 samples; of the test characters, 46.2%" in caplog.text
    assert "and 100.0% the most frequent one after" in caplog.text


# -- the plays that come with fedbench -------------------------------------------------------------------
def test_the_bundled_plays() -> None:
    arrays = Shakespeare(stride=10).load()
    names = arrays.domain_names
    assert names is not None and len(names) == 51 == arrays.num_domains  # 53 at stride 1
    assert {"the_tempest_PROSPERO", "twelfth_night_SIR_TOBY", "richard_ii_KING_RICHARD"} <= set(names)
    first = shown(arrays, "the_tempest_CALIBAN", TRAIN)[0]
    assert first.startswith("There's wood enough within. As wicked dew as e'er my mother brush'd With raven's")
    assert arrays.parts()["text"].shape[1:] == (80,) and len(arrays) == 28_990
    assert not set("[]_*<0123456789") & set(read(np.unique(arrays.parts()["text"])))
    kept = Shakespeare(stride=10, min_samples=5000).load().domain_names
    assert kept is not None and 10 < len(kept) < 30 and set(kept) < set(names)


def test_every_speaker_is_a_client_and_training_comes_before_testing() -> None:
    cfg = compose(["dataset=shakespeare", "dataset.stride=20", "partition=domain", "model=gru"])
    arrays = build.data(cfg)
    split = build.partition(cfg, arrays)
    assert split.num_clients == arrays.num_domains > 45
    for client in range(split.num_clients):
        assert (arrays.domain[split.train[client]] == client).all()
        assert split.train[client].max() < split.test[client].min()


# -- layouts ---------------------------------------------------------------------------------------------
COMPLETE = f"""The Project Gutenberg Etext of The Complete Works
*** START OF THIS PROJECT ***
1609

THE SONNETS

by William Shakespeare

  O no. it is an ever-fixed mark
    That looks on tempests and is never shaken

1601

THE TRAGEDY OF NOBODY

by William Shakespeare


Dramatis Personae
  ONE, a lord
  TWO, his man


<<THIS ELECTRONIC VERSION OF
THE COMPLETE WORKS>>

ACT I. SCENE 1.
A street

Enter ONE and TWO

  ONE. {LONG}
    Who calls on me?  I   wait.                      Exit
  Two. He is gone.
  Enter THREE
    I said so.

ACT II. SCENE 1.

  TWO. And back again.
THE END

1593

THE COMEDY OF ERRORS

by William Shakespeare

ACT I. SCENE 1
ONE. I stand at the margin
and go on there
ACT II. SCENE 1
nobody says this
TWO. What now?
<<THIS ELECTRONIC VERSION OF
"""


def test_the_layout_of_1994() -> None:
    plays = split_plays(COMPLETE, "100")
    assert list(plays) == ["THE TRAGEDY OF NOBODY", "THE COMEDY OF ERRORS"]  # the sonnets have no acts
    said = {name: join_lines(lines) for name, lines in plays["THE TRAGEDY OF NOBODY"].items()}
    assert said == {  # as LEAF: the direction Exit is a word, the line Enter is none, casings are one name
        "ONE": f"{LONG} Who calls on me? I wait. Exit",
        "TWO": "He is gone. I said so. And back again.",
    }
    flush = {name: join_lines(lines) for name, lines in plays["THE COMEDY OF ERRORS"].items()}
    assert flush == {"ONE": "I stand at the margin and go on there", "TWO": "What now?"}


ONE_PLAY = f"""NOBODY

by William Shakespeare

Persons Represented
ONE, a lord.

TWO.
a man who is only listed

ACT I.

SCENE I. A street.

[Enter ONE
and TWO.]

ONE.
{LONG}

[Exit.]

And then, [Aside.] no more.

First Man.
Who's “there”—friend?

SCENE II. Another street.

Not said by anybody.

FIRST MAN
I, without a point.
 _Exeunt._
"""


def test_one_play_in_a_file(tmp_path: Path) -> None:
    said = {name: join_lines(lines) for name, lines in split_plays(ONE_PLAY, "nobody")["nobody"].items()}
    assert said == {
        "ONE": f"{LONG} And then, no more.",
        "FIRST MAN": 'Who\'s "there"--friend? I, without a point. _Exeunt._',
    }
    (tmp_path / "nobody.txt").write_text(ONE_PLAY)
    older = f"ACT I\n\nC\xe6sar.\nA\n\nZOE.\n{LONG} \xe9\n\nZOE.\nOh\n\nZOE.\nMe\n"
    (tmp_path / "older.txt").write_bytes(older.encode("latin-1"))
    arrays = Shakespeare(str(tmp_path), length=10).load()
    assert arrays.domain_names == ["nobody_ONE", "older_ZOE"]
    assert shown(arrays, "older_ZOE", TEST)[-1].endswith("id, e Oh Me")


def test_the_complete_works_of_today() -> None:
    play = (
        "Contents\n\nACT I\nScene I. A street.\n\n\nDramatis Personæ\n\nONE, a lord\n\nACT I\n\nSCENE I. A street.\n\n"
        f"ONE.\n{LONG}\n\n Enter Two.\n\nTWO.\nNo.\n\n"
    )
    text = (
        "Gutenberg\n*** START OF THE EBOOK ***\nThe Complete Works\n\n    Contents\n\n"
        "    THE SONNETS\n    ALL’S WELL\n    NOBODY\n\n\nTHE SONNETS\n\n  1\n\nFrom fairest.\ncreatures\n\n"
        f"ALL’S WELL\n\n{play}NOBODY\n\n{play}*** END OF THE EBOOK ***\n\nTWO.\nLicence.\n"
    )
    plays = split_plays(text, "pg100")
    assert list(plays) == ["ALL'S WELL", "NOBODY"]
    for speeches in plays.values():
        assert {name: join_lines(lines) for name, lines in speeches.items()} == {"ONE": LONG, "TWO": "No."}


def test_poems_alone_have_no_speakers(tmp_path: Path) -> None:
    (tmp_path / "venus.txt").write_text("VENUS\n\nEven as the sun.\nwith purple face\n")
    with pytest.raises(ConfigError, match=r"no speaker in .* has dataset.min_samples=0 windows of 80 characters"):
        Shakespeare(str(tmp_path)).load()


# -- LEAF's files ----------------------------------------------------------------------------------------
def leaf(path: Path, samples: dict[str, tuple[list[str], list[str]]], **other: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"users": list(samples), "num_samples": [len(y) for _, y in samples.values()],
               "user_data": {user: {"x": x, "y": y} for user, (x, y) in samples.items()}}  # fmt: skip
    path.write_text(json.dumps(content | other))


def sliding(text: str, length: int = 80) -> tuple[list[str], list[str]]:
    """As LEAF makes a user's samples of its text."""
    return [text[i : i + length] for i in range(len(text) - length)], list(text[length:])


def test_leafs_samples_are_those_of_its_text(tmp_path: Path) -> None:
    users = {"NOBODY_ONE": LONG, "NOBODY_TWO": LONG[::-1], "NOBODY_FEW": "few words"}
    leaf(tmp_path / "all_data" / "all_data_0.json", {user: sliding(text) for user, text in users.items()})
    leaf(tmp_path / "all_data" / "all_data_1.json", {"NOBODY_ZOE": sliding(LONG.upper())})
    options: dict[str, Any] = {"stride": 3, "test": 0.3, "min_samples": 5}
    found = Shakespeare(str(tmp_path), **options).load()
    plain = tmp_path / "plain"
    plain.mkdir()
    texts = {**users, "NOBODY_ZOE": LONG.upper()}
    (plain / "NOBODY.txt").write_text("ACT I.\n\n" + "\n\n".join(f"{u[7:]}.\n{t}" for u, t in texts.items()))
    expected = Shakespeare(str(plain), **options).load()
    assert found.domain_names == expected.domain_names == ["NOBODY_ONE", "NOBODY_TWO", "NOBODY_ZOE"]
    assert found.digest == expected.digest
    shorter = Shakespeare(str(tmp_path), length=12, **options).load()
    assert shown(shorter, "NOBODY_ONE", TRAIN)[1] == LONG[71:84]


def test_leafs_own_cut_is_kept(tmp_path: Path) -> None:
    x, y = sliding(LONG)
    leaf(tmp_path / "all_data" / "all_data.json", {"ignored": (x, y)})
    leaf(tmp_path / "train" / "a_train_8.json", {"ONE": (x[:50], y[:50]), "ALONE": (x, y), "TWO": (x[10:30], y[10:30])})
    leaf(tmp_path / "test" / "a_test_8.json", {"TWO": (x[60:61], y[60:61]), "ONE": (x[40:52], y[40:52])})
    arrays = Shakespeare(str(tmp_path), test=0.5).load()
    assert arrays.domain_names == ["ONE", "TWO"]
    assert shown(arrays, "ONE", TRAIN) == [a + b for a, b in zip(x[:50], y[:50])]
    assert shown(arrays, "ONE", TEST) == [a + b for a, b in zip(x[40:52], y[40:52])]
    assert len(shown(arrays, "TWO", TRAIN)) == 20 and len(shown(arrays, "TWO", TEST)) == 1
    thinned = Shakespeare(str(tmp_path), stride=7).load()
    assert shown(thinned, "ONE", TRAIN) == [a + b for a, b in zip(x[:50:7], y[:50:7])]
    assert len(shown(thinned, "TWO", TEST)) == 1
    assert Shakespeare(str(tmp_path), min_samples=22).load().domain_names == ["ONE"]
    assert Shakespeare(str(tmp_path / "train" / "a_train_8.json")).load().domain_names == ["ALONE"]  # others: too few


X, Y = sliding(LONG)


@pytest.mark.parametrize(
    "users, other, said",
    [
        ({"ONE": (X, Y[:-1])}, {}, r"ONE has \d+ x and \d+ y"),
        ({"ONE": (X, Y)}, {"user_data": {}}, "KeyError"),
        ({"ONE": (X, Y)}, {"users": None}, "TypeError"),
        ({"ONE": (["abc", "ab"], ["d", "e"])}, {}, "ONE has x of 2, 3 characters"),
        ({"ONE": (["abc", "bcd"], ["d", "ef"])}, {}, "and y of 1"),
    ],
)
def test_other_json_files_are_refused(tmp_path: Path, users: Any, other: dict[str, Any], said: str) -> None:
    leaf(tmp_path / "data.json", users, **other)
    with pytest.raises(ConfigError, match=said):
        Shakespeare(str(tmp_path), length=2).load()


def test_what_is_not_there_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist: set it to LEAF's JSON files"):
        Shakespeare(str(tmp_path / "nowhere")).load()
    with pytest.raises(ConfigError, match="has no texts: set it to LEAF's JSON files"):
        Shakespeare(str(tmp_path)).load()
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(ConfigError, match=r"broken.json is not one of LEAF's files"):
        Shakespeare(str(tmp_path)).load()
    leaf(tmp_path / "broken.json", {"ONE": sliding(LONG)})
    with pytest.raises(ConfigError, match=r"ONE has x of 80 characters, .* dataset.length=81 .*, and y of 1"):
        Shakespeare(str(tmp_path), length=81).load()


# -- generated dialects ----------------------------------------------------------------------------------
def spoken(arrays: Arrays, role: int) -> set[str]:
    """The words that a role says in training, without those at the edges."""
    said = shown(arrays, f"role_{role}", TRAIN)
    return {word.strip(".").lower() for text in said for word in text.split()[1:-1]}


def test_dialects_differ_in_the_endings_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(synthetic_dialogue, "STEMS", 30)

    def roles(dialect: float) -> list[set[str]]:
        monkeypatch.setattr(synthetic_dialogue, "DIALECT", dialect)
        arrays = SyntheticDialogue(roles=3, stride=1, length=40).load()
        return [spoken(arrays, role) for role in range(3)]

    one_language = roles(0.0)
    assert len(set.union(*one_language)) <= 30 and all(len(word) == 6 for word in set.union(*one_language))
    dialects = roles(0.5)
    stems = [{word[:4] for word in said} for said in dialects]
    assert len(set.union(*stems)) <= 30
    both = stems[0] & stems[1]
    same = {word[:4] for word in dialects[0] & dialects[1]}
    assert 0.1 < len(same) / len(both) < 0.7  # 0.5 * 0.5 and a few that drew alike


def test_generated_speech_is_a_function_of_its_options() -> None:
    options: dict[str, Any] = {"roles": 4, "characters": 400}
    arrays = SyntheticDialogue(**options).load()
    assert arrays.digest == SyntheticDialogue(**options).load().digest
    assert arrays.digest != SyntheticDialogue(**options, seed=1).load().digest
    assert arrays.domain_names == [f"role_{i}" for i in range(4)]
    sizes = np.bincount(SyntheticDialogue(roles=30, characters=600, stride=1, length=5).load().domain)
    assert sizes.min() >= 290 and sizes.max() <= 900 and sizes.std() > 50
    with pytest.raises(ConfigError, match="dataset=synthetic_dialogue: none of 2 speakers has enough text"):
        SyntheticDialogue(roles=2, characters=20).load()
