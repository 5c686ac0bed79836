"""OmniMedVQA in a generated folder: clients by modality and data set, and the cut by picture."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from omegaconf import OmegaConf
from PIL import Image
from tiny import compose

from fedbench.config.check import check
from fedbench.core.options import ConfigError
from fedbench.data.base import TEST, TRAIN, Arrays
from fedbench.data.questions import _question_files
from fedbench.data.questions.omnimedvqa import OmniMedVQA, num_test
from fedbench.simulation import simulator

OPEN = "OmniMedVQA/QA_information/Open-access"
# By data set: what the files call its modality, and how many pictures are generated; two questions about each.
SETS = {
    "Chest CT Scan": ("CT(Computed Tomography)", 6),
    "Covid CT": ("CT(Computed Tomography)", 5),
    "BreakHis": ("Microscopy Images", 4),
    "NLM- Malaria Data": ("Microscopy Images", 4),
    "OCT & X-Ray 2017": ("OCT (Optical Coherence Tomography", 3),
    "Knee MR": ("MR (Mag-netic Resonance Imaging)", 3),
}
CLIENTS = ["ct", "oct", "microscopy", "histopathology"]
# 0.2 of 11, 3, 4 and 4 pictures, rounded up
TESTED = [3, 1, 1, 1]


def shipped() -> dict[str, Any]:
    """The lists of the YAML."""
    cfg = compose(["dataset=omnimedvqa"]).dataset
    return {name: OmegaConf.to_container(cfg[name]) for name in ("modalities", "sets")}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Six data sets in the published layout; a restricted list names a picture that is not there."""
    root, level = tmp_path / "omnimedvqa", 0
    for name, (modality, count) in SETS.items():
        rows = []
        for i in range(count):
            image, level = f"Images/{name}/train/{i}.png", level + 9
            path = root / "OmniMedVQA" / image
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.full((10, 12, 3), level, np.uint8)).save(path)
            about = {
                "dataset": name,
                "question_type": "Modality Recognition",
                "image_path": image,
                "modality_type": modality,
            }
            options = {"option_A": "Yes", "option_B": "A cyst.", "option_C": "No", "option_D": "MR"}
            asked = (("Is it healthy?", "Yes"), (f"What shows picture {i}?", f"A {'cyst' if i % 2 else 'mass'}."))
            rows += [
                {**about, **options, "question_id": f"{name}_{i}_{j}", "question": question, "gt_answer": answer}
                for j, (question, answer) in enumerate(asked)
            ]
        path = root / OPEN / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(rows), encoding="utf-8")
    restricted = root / OPEN.replace("Open", "Restricted") / "AIDA.json"
    restricted.parent.mkdir()
    row = {"dataset": "AIDA", "modality_type": "CT(Computed Tomography)", "image_path": "Images/AIDA/none.png"}
    restricted.write_text(json.dumps([{**row, "question": "Is it there?", "gt_answer": "No"}]))
    return root


def load(path: Path, clients: list[str] = CLIENTS, **options: Any) -> Arrays:
    return OmniMedVQA(clients=clients, **shipped(), path=str(path), side=8, tokens=8, **options).load()


def test_clients_by_modality_and_data_set(folder: Path) -> None:
    """BreakHis is histopathology though the files say microscopy; MR is of no client; restricted sets are not read."""
    made = load(folder)
    assert made.domain is not None and made.domain_names == CLIENTS
    assert np.bincount(made.domain).tolist() == [22, 6, 8, 8]
    images = made.parts()["image"]
    assert made.shared is not None and len(images) == 22  # once each
    levels = {c: {int(images[i].max()) // 9 for i in made.shared["image"][made.domain == c]} for c in range(4)}
    starts = dict(zip(SETS, np.cumsum([0, *(count for _, count in SETS.values())]) + 1))
    of = {name: set(range(starts[name], starts[name] + count)) for name, (_, count) in SETS.items()}
    assert levels == {
        0: of["Chest CT Scan"] | of["Covid CT"],
        1: of["OCT & X-Ray 2017"],
        2: of["NLM- Malaria Data"],
        3: of["BreakHis"],
    }


def test_the_cut_is_by_picture(folder: Path) -> None:
    """A client's share is rounded up; a picture's questions stay together; other clients do not matter."""
    made = load(folder)
    assert made.shared is not None and made.domain is not None
    image = made.shared["image"]
    assert [len(set(image[(made.domain == c) & (made.split == TEST)])) for c in range(4)] == TESTED
    assert not set(image[made.split == TRAIN]) & set(image[made.split == TEST])
    assert load(folder).digest == made.digest
    assert (load(folder, seed=1).split != made.split).any()
    np.testing.assert_array_equal(load(folder, ["ct"]).split, made.split[made.domain == 0])
    assert [num_test(n, 0.2) for n in (4646, 6679, 10991, 15)] == [
        930,
        1336,
        2199,
        3,
    ]  # FedPIA's sizes, if by question


def test_answers_are_of_the_clients_training_part(folder: Path) -> None:
    made = load(folder)
    assert made.class_mask is not None and made.domain is not None
    for client, own in enumerate(made.class_mask.sum(1)):
        mine = made.targets[made.domain == client]
        trained = mine[made.split[made.domain == client] == TRAIN]
        assert set(trained[:, 0]) == set(range(own))
        assert mine[::2, 1].all() and not mine[1::2, 1].any()  # yes is closed


def test_a_zip_is_the_folder(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where pictures are decoded once and left on disk."""
    made = load(folder)
    zipped = Path(shutil.make_archive(str(tmp_path / "OmniMedVQA"), "zip", folder))
    monkeypatch.setattr(_question_files, "MAX_IN_MEMORY", 1)
    for _ in range(2):
        assert load(zipped, data_dir=str(tmp_path)).digest == made.digest
        monkeypatch.setattr(_question_files, "decode", None)
    assert len(list((tmp_path / "cache").glob("omnimedvqa-*.npy"))) == 1


def test_a_run(folder: Path, tmp_path: Path) -> None:
    words = "dataset=omnimedvqa dataset.clients=[ct,oct,histopathology] dataset.side=16 dataset.color=grey "
    plan = "dataset.tokens=8 partition=domain model=vilt_tiny algorithm=fedavg rounds=1 sample_rate=1 hardware=cpu"
    cfg = compose([*(words + plan).split(), f"data_dir={tmp_path}"])
    check(cfg)
    (tmp_path / "run").mkdir()
    summary = simulator.run(cfg, tmp_path / "run")
    assert 0 <= summary["last"]["personal/accuracy"] <= summary["last"]["personal/ceiling"]


def test_what_is_missing(folder: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"nowhere: this folder or zip of OmniMedVQA does not exist; download it from huggingface"
    ):
        load(folder / "nowhere")
    with pytest.raises(ConfigError, match=r"assign nothing to endoscopy of dataset\.clients"):
        load(folder, ["ct", "endoscopy"])
    with pytest.raises(ConfigError, match="there are no training questions of fundus"):
        load(folder, ["ct", "fundus"])
    with pytest.raises(ConfigError, match="must name at least one client"):
        load(folder, ["ct", "ct"])
    lost = folder / "OmniMedVQA" / "Images" / "Covid CT" / "train" / "2.png"
    lost.unlink()
    with pytest.raises(ConfigError, match=r"Images/Covid CT/train/2\.png of OmniMedVQA does not exist"):
        load(folder)
    shutil.rmtree(folder / OPEN)
    with pytest.raises(ConfigError, match=r"QA_information/Open-access/<data set>\.json of OmniMedVQA do not exist"):
        load(folder)
