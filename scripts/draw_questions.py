r"""Questions about labelled pictures, in VQA-RAD's repackaged layout, to train a small backbone on before it is frozen.

    uv run python scripts/draw_questions.py questions --pictures 6000 --vocab-of vqa_rad.zip dataset=cifar10
    uv run python -m fedbench dataset=med_vqa dataset.sets=[vqa_rad] +dataset.paths.vqa_rad=questions \
      dataset.vocab=questions/vocab.txt partition=domain ...

What stands at the end are fedbench's words for a data set of pictures, from whose training part these are drawn.  Half
of the questions ask what is shown, half whether it is this or that, yes as often as no.  vocab.txt has the words of
these questions and, with --vocab-of, those of VQA-RAD's training questions, so that both are read by the same numbers.
"""

from __future__ import annotations

import argparse
import json
import re
import zipfile
from pathlib import Path

import numpy as np
from PIL import Image

from fedbench.app.compose import compose
from fedbench.core.options import require
from fedbench.data.base import TRAIN
from fedbench.simulation import build

OPEN = ("what is shown in this image?", "what is this?", "which object is seen in the image?")
CLOSED = ("is there a {} in this image?", "is this a {}?", "does the image show a {}?")
TEST_SHARE = 20  # every so manyth picture is tested on


def questions(labels: np.ndarray, names: list[str], rng: np.random.Generator) -> list[dict]:
    """Two rows a picture, as VQA-RAD has them; all of one organ, so that partition=domain makes one client."""
    rows = []
    for i, label in enumerate(labels):
        right = names[label]
        said = right if rng.random() < 0.5 else names[(label + rng.integers(1, len(names))) % len(names)]
        both = [
            (OPEN[rng.integers(len(OPEN))], right, "OPEN"),
            (CLOSED[rng.integers(len(CLOSED))].format(said), "Yes" if said == right else "No", "CLOSED"),
        ]
        rows += [
            {"image_name": f"{i}.png", "image_organ": "HEAD", "question": q, "answer": a, "answer_type": kind}
            for q, a, kind in both
        ]
    return rows


def words(texts: list[str]) -> set[str]:
    """Lower-case words and marks."""
    return {word for text in texts for word in re.findall(r"[a-z0-9]+|[^\sa-z0-9]", text.lower())}


def training_questions(path: Path) -> list[str]:
    """Of a folder or a zip of VQA-RAD; its test questions are not looked at."""
    if path.is_dir():
        text = (path / "trainset.json").read_text(encoding="utf-8")
    else:
        with zipfile.ZipFile(path) as file:
            text = file.read(next(n for n in file.namelist() if n.endswith("trainset.json"))).decode("utf-8")
    return [str(row["question"]) for row in json.loads(text)]


def main() -> None:
    """Write OUT/trainset.json, testset.json, vocab.txt and images."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="a new folder")
    parser.add_argument("overrides", nargs="+", help="dataset=cifar10 and its options")
    parser.add_argument("--pictures", type=int, default=6000, help="how many are drawn (default 6000)")
    parser.add_argument("--vocab-of", type=Path, help="VQA-RAD, whose training questions' words are known, too")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_intermixed_args()
    rng, arrays = np.random.default_rng(args.seed), build.data(compose(args.overrides))
    names = arrays.class_names or []
    require(bool(names), f"{' '.join(args.overrides)}: its labels have no names")
    chosen = rng.permutation(np.flatnonzero(arrays.split == TRAIN))[: args.pictures]
    require(isinstance(arrays.inputs, np.ndarray), f"{' '.join(args.overrides)}: its inputs are not pictures alone")
    x, y = np.asarray(arrays.inputs)[chosen], arrays.targets[chosen]  # [n, channels, H, W] uint8, [n]
    (args.out / "images").mkdir(parents=True)
    for i, picture in enumerate(x):
        Image.fromarray(picture.transpose(1, 2, 0).squeeze()).convert("RGB").save(args.out / "images" / f"{i}.png")
    rows = questions(y, names, rng)
    tested = [int(row["image_name"].split(".")[0]) % TEST_SHARE == 0 for row in rows]
    for name, part in (("trainset", False), ("testset", True)):
        kept = [row for row, t in zip(rows, tested) if t == part]
        (args.out / f"{name}.json").write_text(json.dumps(kept), encoding="utf-8")
    known = words([row["question"] for row in rows])
    known |= words(training_questions(args.vocab_of)) if args.vocab_of else set()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    (args.out / "vocab.txt").write_text("\n".join([*special, *sorted(known)]) + "\n", encoding="utf-8")
    print(f"{args.out}: {len(rows):,} questions about {len(x):,} pictures, {len(known) + len(special):,} words")


if __name__ == "__main__":
    main()
