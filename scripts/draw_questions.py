r"""Generate questions about labelled images in the layout of VQA-RAD, to pretrain a small backbone.

    uv run python scripts/draw_questions.py questions --pictures 6000 --vocab-of vqa_rad.zip dataset=cifar10
    uv run python -m fedbench dataset=med_vqa dataset.sets=[vqa_rad] +dataset.paths.vqa_rad=questions \
      dataset.vocab=questions/vocab.txt partition=domain ...

The last arguments select an image data set, whose training images are sampled.  Half of the questions are open, half
are closed, with as many answers yes as no.  vocab.txt contains the words of these questions and, with --vocab-of, those
of VQA-RAD's training questions, so that both have the same tokens.
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
TEST_EVERY = 20  # each 20th image is a test image


def questions(labels: np.ndarray, names: list[str], rng: np.random.Generator) -> list[dict]:
    """Return an open and a closed question per image.  All have one organ, so partition=domain makes one client.

    Args:
        labels: The class of each image.  # [n]
        names: The names of the classes.
        rng: The generator that draws the wording, and the class that a closed question is about.
    """
    rows = []
    for i, label in enumerate(labels):
        name = names[label]
        asked = name if rng.random() < 0.5 else names[(label + rng.integers(1, len(names))) % len(names)]
        both = [
            (OPEN[rng.integers(len(OPEN))], name, "OPEN"),
            (CLOSED[rng.integers(len(CLOSED))].format(asked), "Yes" if asked == name else "No", "CLOSED"),
        ]
        rows += [
            {"image_name": f"{i}.png", "image_organ": "HEAD", "question": q, "answer": a, "answer_type": kind}
            for q, a, kind in both
        ]
    return rows


def words(texts: list[str]) -> set[str]:
    """Return the words and punctuation marks of texts, in lower case."""
    return {word for text in texts for word in re.findall(r"[a-z0-9]+|[^\sa-z0-9]", text.lower())}


def training_questions(path: Path) -> list[str]:
    """Return the training questions of a folder or a zip file of VQA-RAD."""
    if path.is_dir():
        text = (path / "trainset.json").read_text(encoding="utf-8")
    else:
        with zipfile.ZipFile(path) as file:
            text = file.read(next(n for n in file.namelist() if n.endswith("trainset.json"))).decode("utf-8")
    return [str(row["question"]) for row in json.loads(text)]


def main() -> None:
    """Write trainset.json, testset.json, vocab.txt and images to the folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="a new folder")
    parser.add_argument("overrides", nargs="+", help="dataset=cifar10 and its options")
    parser.add_argument("--pictures", type=int, default=6000, help="number of images (default 6000)")
    parser.add_argument("--vocab-of", type=Path, help="VQA-RAD, for the words of its training questions")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_intermixed_args()
    rng, arrays = np.random.default_rng(args.seed), build.data(compose(args.overrides))
    names = arrays.class_names or []
    require(bool(names), f"{' '.join(args.overrides)}: the labels have no names, choose another data set")
    chosen = rng.permutation(np.flatnonzero(arrays.split == TRAIN))[: args.pictures]
    require(
        isinstance(arrays.inputs, np.ndarray),
        f"{' '.join(args.overrides)}: the inputs are not images only, choose another data set",
    )
    x, y = np.asarray(arrays.inputs)[chosen], arrays.targets[chosen]  # [n, channels, H, W] uint8, [n]
    (args.out / "images").mkdir(parents=True)
    for i, image in enumerate(x):
        Image.fromarray(image.transpose(1, 2, 0).squeeze()).convert("RGB").save(args.out / "images" / f"{i}.png")
    rows = questions(y, names, rng)
    tested = [int(row["image_name"].split(".")[0]) % TEST_EVERY == 0 for row in rows]
    for name, part in (("trainset", False), ("testset", True)):
        rows_of_part = [row for row, t in zip(rows, tested) if t == part]
        (args.out / f"{name}.json").write_text(json.dumps(rows_of_part), encoding="utf-8")
    vocabulary = words([row["question"] for row in rows])
    vocabulary |= words(training_questions(args.vocab_of)) if args.vocab_of else set()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    (args.out / "vocab.txt").write_text("\n".join([*special, *sorted(vocabulary)]) + "\n", encoding="utf-8")
    print(f"{args.out}: {len(rows):,} questions about {len(x):,} images, {len(vocabulary) + len(special):,} words")


if __name__ == "__main__":
    main()
