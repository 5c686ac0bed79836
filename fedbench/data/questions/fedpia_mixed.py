"""Questions about pictures and radiographs with labels, each set a client: FedPIA's Task 5.

SLAKE, VQA-RAD and VQA-Med 2019 ask questions (med_vqa.py); Open-I and MIMIC-CXR have reports and 15 labels
(medvill.py).  Their modules name sources, licences and layouts.  One model reads both: words and lengths of texts are
the same, every client has a head.
FedPIA trains on 34,323 samples, which leaves 10,711 for MIMIC-CXR: 80% of 13,389 pairs.  It does not say which.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from fedbench.core.options import Count, OpenUnit, Seed, require
from fedbench.data.base import TRAIN, Arrays
from fedbench.data.questions._answers import Answers, Kept, Normalizer
from fedbench.data.questions._labelled import Labelled, mixed_of
from fedbench.data.questions._question_files import Layout, questions_of
from fedbench.data.questions.med_vqa import MedVQA
from fedbench.data.questions.medvill import MedViLL

SOURCE = "dataset=fedpia_mixed"


class FedPIAMixed:
    """inputs image uint8 [m, 1 or 3, side, side], each stored once, and text int64 [n, tokens]; targets of task=mixed.

    sets: of questions, as in MedVQA.  labelled: folders of MedViLL's pairs, by names of one's own, and how many pairs
    of each are drawn, before the cut (null: all).  paths: folders or zips of either; of others data_dir/<name>.  test,
    seed: of that cut, see MedViLL.  All else: see VQARad; tokens of reports, too.
    """

    def __init__(
        self,
        sets: list[str],
        labelled: dict[str, Count | None],
        paths: dict[str, str] | None = None,
        test: OpenUnit = 0.2,
        seed: Seed = 0,
        side: Count = 64,
        color: Literal["rgb", "grey"] = "rgb",
        tokens: Count = 40,
        vocab: str | None = None,
        min_count: Count = 1,
        answers: Kept = "all",
        normalizer: Normalizer = "plain",
        data_dir: str = "data",
    ):
        paths = paths or {}
        require(bool(labelled), "dataset.labelled must name one folder of pairs or more")
        both = [name for name in labelled if name in sets]
        require(not both, f"dataset.labelled names {', '.join(both)}, which dataset.sets does too")
        few = [name for name, count in labelled.items() if count is not None and count < 2]
        require(
            not few, f"dataset.labelled must be null or at least 2 pairs for {', '.join(few)}, or nothing can be cut"
        )
        odd = [name for name in paths if name not in (*sets, *labelled)]
        require(not odd, f"dataset.paths knows {', '.join((*sets, *labelled))}, not {', '.join(odd)}")
        own = {name: paths.get(name) or str(Path(data_dir) / name) for name in sets}
        self.questions = MedVQA(sets, own)
        self.most = labelled
        where = {name: paths.get(name) or str(Path(data_dir) / name) for name in labelled}
        self.labelled = {name: MedViLL(path, test, seed, side, color, tokens, vocab) for name, path in where.items()}
        self.layout = Layout(side, color, tokens, vocab, data_dir, Answers(min_count, answers, normalizer))

    def load(self) -> Arrays:
        """Questions set after set, then pairs."""
        sets, names = self.questions.sets, list(self.labelled)
        questions, listed = questions_of(self.questions.read(), sets, SOURCE, self.layout.answers)
        labelled: list[Labelled] = []
        before = sum(len(some) for _, some in listed)
        for silo, name in enumerate(names):
            pairs = self.labelled[name].pairs(self.most[name])
            each = zip(pairs.texts, pairs.labels, pairs.split.tolist())
            labelled += [Labelled(before + i, text, own, part, silo) for i, (text, own, part) in enumerate(each)]
            listed.append((pairs.files, pairs.pictures))
            before += len(pairs.pictures)
        trained = [q.question for q in questions if q.split == TRAIN]
        tokens = self.layout.tokenizer([*trained, *(one.text for one in labelled if one.split == TRAIN)])
        pictures = self.layout.pictures(listed, "fedpia_mixed")
        return mixed_of(questions, labelled, pictures, tokens, (sets, names), SOURCE, self.layout.answers)
