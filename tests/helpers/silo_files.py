"""Silos of pictures on disk: a table of patients, and further pictures for training."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
from PIL import Image

SILOS = ("A", "B", "C")
PATIENTS = {"A": 20, "B": 12, "C": 16}


def picture(path: Path, value: int, side: int = 10) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.full((side, side + 2), value % 256, np.uint8)
    Image.fromarray(pixels).save(path)


def write_csv(path: Path, rows: list[dict]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def make_table(folder: Path) -> tuple[Path, list[dict]]:
    """Patients with 2 to 4 pictures; every fourth has cancer, in one breast only."""
    rng, rows = np.random.default_rng(0), []
    for silo, patients in PATIENTS.items():
        for p in range(patients):
            for view in range(int(rng.integers(2, 5))):
                name = f"images/{silo}{p}_{view}.png"
                picture(folder / name, int(rng.integers(256)))
                sick = p % 4 == 0 and view == 0
                rows.append({"image": name, "label": "cancer" if sick else "normal", "patient": f"{silo}{p}",
                             "silo": silo})  # fmt: skip
    return write_csv(folder / "table.csv", rows), rows


def make_extra(folder: Path, silos: dict[str, int], label: str = "cancer") -> Path:
    for silo, count in silos.items():
        for i in range(count):
            picture(folder / silo / label / f"{i}.png", 7 * i + 1)
    return folder


def overrides(folder: Path, *more: str) -> list[str]:
    return ["dataset=image_table", f"dataset.path={folder}/table.csv", f"data_dir={folder}/data", "dataset.resize=8",
            "dataset.classes=[normal,cancer]", "partition=domain", *more]  # fmt: skip
