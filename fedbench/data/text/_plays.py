"""Split plays in plain text into the speeches of their roles, in the two layouts of Project Gutenberg.

Indented: the complete works of 1994 (100.txt), which LEAF reads.  "by William Shakespeare" is below a play's title,
"  NAME. words" begins a speech, and four spaces continue it; one play is flush left.  The reading is LEAF's, with its
errors: a stage direction at the end of an indented line counts as speech.
Headed: one play in a file (those of 1998), or the complete works of today, with a table of contents.  A line NAME. is
above a speech, with blank lines around it, and stage directions are in brackets.
"""

from __future__ import annotations

import re
import unicodedata
from collections import defaultdict
from itertools import pairwise

Speeches = dict[str, list[str]]  # the lines of each role, in the order of the play

AUTHOR = "by William Shakespeare"
ACT = re.compile(r"\s*((ACT|SCENE) ?[.:]? *[IVX\d]+\b|SCENE[.:]|PROLOGUE|EPILOGUE|INDUCTION)", re.IGNORECASE)
INDENTED = re.compile(r"  ([A-Za-z][A-Za-z ]*)\. (.*)")  # first line of a speech, indented: role and words
FLUSH = re.compile(r"([A-Za-z][A-Za-z ]*)\. (.*)")  # the same without indentation
HEADING = re.compile(r"[A-Z][A-Za-z' &-]{0,38}\.|[A-Z][A-Z' &-]{2,38}")  # one play omits the period
DIRECTION = re.compile(r"\[[^\]]*\]")
MOVES = re.compile(r"\s*_*(Enter|Re-enter|Exit|Exeunt|Flourish|Alarum)\b", re.IGNORECASE)
ASCII = str.maketrans({"’": "'", "‘": "'", "“": '"', "”": '"', "—": "--", "–": "-", "æ": "ae", "Æ": "Ae", "œ": "oe"})


def split_plays(text: str, name: str) -> dict[str, Speeches]:
    """Return the speeches of each play in a file.

    Args:
        text: The content of the file.
        name: The title of the play if the file has no table of contents.

    Returns:
        By title, the lines of each role.
    """
    lines = _clean(text).splitlines()
    # The layout is the one in which more lines begin a speech: a name above its words, or indented name and words.
    headed = sum(HEADING.fullmatch(line) is not None and bool(below.strip()) for line, below in pairwise(lines))
    if sum(INDENTED.match(line) is not None for line in lines) > headed:
        return {title: _indented_speeches(part) for title, part in _plays_below_titles(lines).items()}
    return {title: _headed_speeches(part) for title, part in _plays_in_contents(lines, name).items()}


def join_lines(lines: list[str]) -> str:
    """Return the lines that a role speaks as one text, in which several spaces are merged to one."""
    return re.sub(r"  +", " ", " ".join(lines)).strip()


def _clean(text: str) -> str:
    """Return the text without Project Gutenberg's header and footer, and with plain letters, quotes and hyphens.

    Accents are removed, and typographic quotes and dashes are replaced.
    """
    text = re.sub(r"\A.*?^\*\*\* ?START OF TH[^\n]*$", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"^\*\*\* ?END OF TH.*\Z", "", text, flags=re.DOTALL | re.MULTILINE)
    decomposed = unicodedata.normalize("NFKD", text.translate(ASCII))
    return "".join(c for c in decomposed if not unicodedata.combining(c))


# -- indented --------------------------------------------------------------------------------------------
def _plays_below_titles(lines: list[str]) -> dict[str, list[str]]:
    """Divide the lines of a file in the indented layout by play, and return the lines of each play by its title.

    Poems are left out.

    A play begins after a line "by William Shakespeare" (AUTHOR), and its title is in the last line above that is not
    empty.
    """
    starts = [i for i, line in enumerate(lines) if AUTHOR in line]
    plays = {}
    for start, stop in zip(starts, [*starts[1:], len(lines)]):
        # the nearest of the seven lines above that is not empty
        title = next((line.strip() for line in reversed(lines[max(0, start - 7) : start]) if line.strip()), "")
        part = lines[start + 1 : stop]
        if any(ACT.match(line) for line in part):  # poems have no acts
            plays[title] = part
    return plays


def _indented_speeches(lines: list[str]) -> Speeches:
    """Return the lines that each role of a play speaks, by the name of the role.

    A speech begins with "  NAME. words" (INDENTED), and the lines below it are indented.  If more lines begin with
    "NAME. words" without indentation (FLUSH), the whole play is flush left.  ACT is the beginning of an act or scene.
    """
    flush_lines = [line for line in lines if FLUSH.match(line) and not ACT.match(line)]
    is_flush = len(flush_lines) > sum(INDENTED.match(line) is not None for line in lines)
    begins, indent = (FLUSH, "") if is_flush else (INDENTED, "    ")
    speeches, speaker = defaultdict[str, list[str]](list), None
    for line in lines:
        match = begins.match(line)
        if is_flush and (ACT.match(line) or line.startswith("<")):  # < begins the notice between acts
            speaker = None
        elif match:
            speaker = match[1].upper()
            speeches[speaker].append(match[2])
        elif speaker is not None and line.startswith(indent):
            speeches[speaker].append(line[len(indent) :])
    return dict(speeches)


# -- headed ----------------------------------------------------------------------------------------------
def _plays_in_contents(lines: list[str], name: str) -> dict[str, list[str]]:
    """Divide the lines of a file in the headed layout by play, and return the lines of each play by its title.

    Args:
        lines: The lines of the file.  The titles are those in its table of contents.
        name: The title of the only play if there is no table of contents.
    """
    stripped = [line.strip() for line in lines]
    contents = stripped.index("Contents") if "Contents" in stripped else len(lines)
    titles = set()
    for title in filter(None, stripped[contents + 1 :]):
        if title in titles or ACT.match(title):  # the first title again, or an act or scene: the table ends
            break
        titles.add(title)
    first = contents + len(titles)  # lines up to this one are in the table of contents
    starts = [i for i, line in enumerate(lines) if i > first and line.rstrip() in titles]
    if not starts:
        return {name: lines}
    parts = {lines[i].strip(): lines[i + 1 : stop] for i, stop in zip(starts, [*starts[1:], len(lines)])}
    return {title: part for title, part in parts.items() if any(ACT.match(line) for line in part)}  # no poems


def _headed_speeches(lines: list[str]) -> Speeches:
    """Return the lines that each role of a play speaks, by the name of the role.

    A speech is a block of lines between blank lines, and its first line is the name of the role (HEADING).  Stage
    directions in brackets (DIRECTION) are removed.  ACT is the beginning of an act or scene.
    """
    speeches, speaker = defaultdict[str, list[str]](list), None
    has_begun = False  # roles are listed before the first act
    for block in re.split(r"\n\s*\n", DIRECTION.sub("", "\n".join(lines))):
        first, *rest = [line.strip() for line in block.strip("\n").split("\n")]
        if ACT.match(first):
            speaker, has_begun = None, True
        elif has_begun and HEADING.fullmatch(first) and rest:
            speaker = first.removesuffix(".").upper()
            speeches[speaker] += rest
        elif speaker is not None and not MOVES.match(first):  # not "Enter ...": a speech that such a block interrupted
            speeches[speaker] += [first, *rest]
    return {name: spoken for name, spoken in speeches.items() if any(spoken)}
