"""Questions about pictures, and radiographs with labels; each data set is a client: FedPIA's Task 5.

SLAKE, VQA-RAD and VQA-Med 2019 have questions (med_vqa.py); Open-I and MIMIC-CXR have reports and 15 labels
(medvill.py).  Their modules name sources, licences and layouts.  One model reads all of them: they have one vocabulary
and one length of texts, and every client has a head.
FedPIA trains on 34,323 samples, which leaves 10,711 for MIMIC-CXR: 80% of 13,389 pairs.  It does not say which.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fedbench.core.options import Count, OpenUnit, Seed, require
from fedbench.data.base import TRAIN, Arrays
from fedbench.data.questions._labelled import Labelled, mixed_arrays
from fedbench.data.questions._question_files import QuestionOptions, rows_to_questions
from fedbench.data.questions.med_vqa import MedVQA
from fedbench.data.questions.medvill import MedViLL

SOURCE = "dataset=fedpia_mixed"


@dataclass(kw_only=True)
class FedPIAMixed(QuestionOptions):
    """Questions and labelled radiographs: inputs image and text, targets of task=mixed.

    `tokens` is the length of questions and reports.

    Args:
        sets: Data sets of questions, as in MedVQA.
        labelled: Names of your choice for data sets of MedViLL's pairs (radiograph and report), and how many pairs of
            each are sampled before the split.  None: all.
        paths: The folder or zip of a data set by its name.  Data sets that are not in it are in data_dir/<name>.
        test: The fraction of the pairs of each data set that is tested on.
        seed: Seed of the split of the pairs.
    """

    sets: list[str]
    labelled: dict[str, Count | None]
    paths: dict[str, str] | None = None
    test: OpenUnit = 0.2
    seed: Seed = 0
    tokens: Count = 40

    def __post_init__(self) -> None:
        names = [*self.sets, *self.labelled]
        require(
            bool(self.labelled),
            "dataset.labelled is empty, but must name at least one data set of pairs: use dataset=med_vqa for "
            "questions only",
        )
        twice = [name for name in self.labelled if name in self.sets]
        require(
            not twice, f"dataset.labelled and dataset.sets both name {', '.join(twice)}: remove it from one of them"
        )
        few = [name for name, count in self.labelled.items() if count is not None and count < 2]
        require(
            not few,
            f"dataset.labelled has fewer than 2 pairs for {', '.join(few)}, too few for training and testing: set it "
            "to at least 2, or to null for all pairs",
        )
        unknown = [name for name in self.paths or {} if name not in names]
        require(
            not unknown,
            f"dataset.paths names {', '.join(unknown)}, but must name only data sets of dataset.sets and "
            f"dataset.labelled: {', '.join(names)}; correct or remove the others",
        )
        paths = {name: (self.paths or {}).get(name) or str(Path(self.data_dir) / name) for name in names}
        self._questions = MedVQA(sets=self.sets, paths={name: paths[name] for name in self.sets})
        self._labelled = {name: MedViLL(path=paths[name], test=self.test, seed=self.seed) for name in self.labelled}

    def load(self) -> Arrays:
        """Return the questions of the data sets in ``sets``, then the labelled radiographs of those in ``labelled``.

        ``labelled`` is a dict from the name of a data set to the number of pairs of a radiograph and a report to use.
        """
        # rule: which answers are classes; picture_names: for each data set, its files and the names of its pictures
        questions, picture_names = rows_to_questions(self._questions.read(), self.sets, SOURCE, self.rule)
        labelled: list[Labelled] = []
        num_pictures = sum(len(names) for _, names in picture_names)
        # silo: the index of the natural client; source: a MedViLL, which reads the files
        for silo, (name, source) in enumerate(self._labelled.items()):
            pairs = source.pairs(limit=self.labelled[name])  # at most this many; None: all
            for i, (text, labels, part) in enumerate(zip(pairs.texts, pairs.labels, pairs.split.tolist())):
                labelled.append(Labelled(image=num_pictures + i, text=text, labels=labels, split=part, silo=silo))
            picture_names.append((pairs.files, pairs.pictures))
            num_pictures += len(pairs.pictures)
        training = [question.question for question in questions if question.split == TRAIN]
        training += [sample.text for sample in labelled if sample.split == TRAIN]
        pictures = self.pictures(picture_names, "fedpia_mixed")
        silos = (self.sets, list(self.labelled))  # names of the clients with questions, and of those with labels
        return mixed_arrays(questions, labelled, pictures, self.tokenizer(training), silos, SOURCE, self.rule)
