"""Who says what in a play: plays as plain text, in the two layouts of Project Gutenberg.

indented: the complete works of 1994 (100.txt), which LEAF reads.  "by William Shakespeare" stands below a play's title,
"  NAME. words" begins a speech and four spaces continue it; one play stands flush left.  LEAF's reading is followed,
with its flaws: a stage direction at the end of an indented line is taken for words.
headed: one play in a file (those of 1998), or the complete works of today, whose table of contents names the plays.  A
line NAME. stands above a speech, blank lines around it, stage directions in brackets.
"""

from __future__ import annotations

import re
import unicodedata
from collections import defaultdict
from itertools import pairwise

Speeches = dict[str, list[str]]  # by speaker: lines, in the order of the play

AUTHOR = "by William Shakespeare"
ACT = re.compile(r"\s*((ACT|SCENE) ?[.:]? *[IVX\d]+\b|SCENE[.:]|PROLOGUE|EPILOGUE|INDUCTION)", re.IGNORECASE)
INDENTED = re.compile(r"  ([A-Za-z][A-Za-z ]*)\. (.*)")
FLUSH = re.compile(r"([A-Za-z][A-Za-z ]*)\. (.*)")
HEADING = re.compile(r"[A-Z][A-Za-z' &-]{0,38}\.|[A-Z][A-Z' &-]{2,38}")  # in one of the plays without the point
DIRECTION = re.compile(r"\[[^\]]*\]")
MOVES = re.compile(r"\s*_*(Enter|Re-enter|Exit|Exeunt|Flourish|Alarum)\b", re.IGNORECASE)
WRITTEN = str.maketrans({"’": "'", "‘": "'", "“": '"', "”": '"', "—": "--", "–": "-", "æ": "ae", "Æ": "Ae", "œ": "oe"})


def plays_of(text: str, name: str) -> dict[str, Speeches]:
    """The plays of a file, by title.  name: of the play where the file names none."""
    text = _plain(text)
    lines = text.splitlines()
    headed = sum(HEADING.fullmatch(line) is not None and bool(below.strip()) for line, below in pairwise(lines))
    if sum(INDENTED.match(line) is not None for line in lines) > headed:
        return {title: _indented(part) for title, part in _below_titles(lines).items()}
    return {title: _headed(part) for title, part in _below_contents(lines, name).items()}


def words(lines: list[str]) -> str:
    """What somebody says as one line, with single spaces."""
    return re.sub(r"  +", " ", " ".join(lines)).strip()


def _plain(text: str) -> str:
    """In ASCII as far as it goes, and without what Project Gutenberg says before and behind the text."""
    text = re.sub(r"\A.*?^\*\*\* ?START OF TH[^\n]*$", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"^\*\*\* ?END OF TH.*\Z", "", text, flags=re.DOTALL | re.MULTILINE)
    apart = unicodedata.normalize("NFKD", text.translate(WRITTEN))
    return "".join(c for c in apart if not unicodedata.combining(c))


# -- indented --------------------------------------------------------------------------------------------
def _below_titles(lines: list[str]) -> dict[str, list[str]]:
    """What follows each line "by William Shakespeare", by the line above it, if that is a play."""
    starts = [i for i, line in enumerate(lines) if AUTHOR in line]
    plays = {}
    for start, stop in zip(starts, [*starts[1:], len(lines)]):
        title = next((line.strip() for line in reversed(lines[max(0, start - 7) : start]) if line.strip()), "")
        part = lines[start + 1 : stop]
        if any(ACT.match(line) for line in part):  # poems have no acts
            plays[title] = part
    return plays


def _indented(lines: list[str]) -> Speeches:
    found = [line for line in lines if FLUSH.match(line) and not ACT.match(line)]
    flush = len(found) > sum(INDENTED.match(line) is not None for line in lines)
    begins, indent = (FLUSH, "") if flush else (INDENTED, "    ")
    speeches, speaker = defaultdict[str, list[str]](list), None
    for line in lines:
        match = begins.match(line)
        if flush and (ACT.match(line) or line.startswith("<")):  # < begins the notice between acts
            speaker = None
        elif match:
            speaker = match[1].upper()
            speeches[speaker].append(match[2])
        elif speaker is not None and line.startswith(indent):
            speeches[speaker].append(line[len(indent) :])
    return dict(speeches)


# -- headed ----------------------------------------------------------------------------------------------
def _below_contents(lines: list[str], name: str) -> dict[str, list[str]]:
    """The parts of a file below the titles that its table of contents lists, if they are plays; without one, the whole,
    as the play `name`."""
    stripped = [line.strip() for line in lines]
    at = stripped.index("Contents") if "Contents" in stripped else len(lines)
    listed = set()
    for title in filter(None, stripped[at + 1 :]):
        if title in listed or ACT.match(title):  # the first title again: the table is over
            break
        listed.add(title)
    starts = [i for i, line in enumerate(lines) if i > at + len(listed) and line.rstrip() in listed]
    if not starts:
        return {name: lines}
    parts = {lines[i].strip(): lines[i + 1 : stop] for i, stop in zip(starts, [*starts[1:], len(lines)])}
    return {title: part for title, part in parts.items() if any(ACT.match(line) for line in part)}


def _headed(lines: list[str]) -> Speeches:
    speeches, speaker, begun = defaultdict[str, list[str]](list), None, False  # persons are listed before the first act
    for block in re.split(r"\n\s*\n", DIRECTION.sub("", "\n".join(lines))):
        first, *rest = [line.strip() for line in block.strip("\n").split("\n")]
        if ACT.match(first):
            speaker, begun = None, True
        elif begun and HEADING.fullmatch(first) and rest:
            speaker = first.removesuffix(".").upper()
            speeches[speaker] += rest
        elif speaker is not None and not MOVES.match(first):  # a speech goes on behind a stage direction
            speeches[speaker] += [first, *rest]
    return {name: said for name, said in speeches.items() if any(said)}
