"""Questions of OmniMedVQA about pictures of many modalities, one client for each modality: FedPIA's Task 2.

Source: Hu et al., CVPR 2024 (huggingface.co/datasets/foreverbeliever/OmniMedVQA).
Licence: each picture has that of its data set.
Layout of dataset.path::

    Images/{data set}/...
    QA_information/Open-access/{data set}.json      questions

Questions of restricted data sets name pictures that it does not contain, and are not read.  The correct answer is the
class; the options of a question are not used.
FedPIA's list of 41 data sets and the unit of its split are not published.  Here all data sets of a modality are used.
A fraction of each client's pictures, rounded up, is tested on with all of their questions.
"""

from __future__ import annotations

import logging
import math
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedbench.core.options import OpenUnit, Seed, require
from fedbench.core.rng import generator
from fedbench.data.base import TEST, TRAIN, Arrays
from fedbench.data.questions._question_files import Files, QuestionOptions, Row, rows_to_arrays

log = logging.getLogger(__name__)
LISTS = "QA_information/Open-access/"
WHERE = "huggingface.co/datasets/foreverbeliever/OmniMedVQA (each picture under its own data set's licence)"


@dataclass(kw_only=True)
class OmniMedVQA(QuestionOptions):
    """OmniMedVQA: inputs image and text, targets [n, 2]: index of the answer, and 1 for a closed question.

    Args:
        clients: The names of the natural clients in order.  Questions of others are not used.
        modalities: The client of each modality.  Keys are values of modality_type in the files, in lower case and
            without brackets.
        sets: The client of a data set by its name, if it is not that of its modality.
        path: The folder, or a zip of it.  None: data_dir/omnimedvqa.
        test: The fraction of each client's pictures that is tested on.
        seed: Seed of the selection of test pictures.
    """

    clients: list[str]
    modalities: dict[str, str]
    sets: dict[str, str] | None = None
    path: str | None = None
    test: OpenUnit = 0.2
    seed: Seed = 0

    def __post_init__(self) -> None:
        is_valid = 0 < len(self.clients) == len(set(self.clients))
        require(
            is_valid,
            f"dataset.clients={self.clients} must name at least one client, and each once: list different names, "
            "as in [ct,mr]",
        )
        assigned = {*self.modalities.values(), *(self.sets or {}).values()}
        empty = [client for client in self.clients if client not in assigned]
        require(
            not empty,
            f"dataset.modalities and dataset.sets assign nothing to {', '.join(empty)} of dataset.clients: assign a "
            "modality to it, or remove it from dataset.clients",
        )
        self._client_of_modality = {plain_name(name): client for name, client in self.modalities.items()}
        self._client_of_set = {plain_name(name): client for name, client in (self.sets or {}).items()}

    def load(self) -> Arrays:
        """Return the questions of the natural clients in ``clients``, in the alphabetical order of the files.

        A random fraction ``test`` of each client's pictures is for testing.  Questions of other clients are left out.
        """
        files = Files(Path(self.path or Path(self.data_dir) / "omnimedvqa"), "OmniMedVQA", where=WHERE)
        # LISTS: the folder of the lists of questions, a file for each data set
        lists = [name for name in files.names if LISTS in f"/{name}" and name.endswith(".json")]
        require(bool(lists), f"{files.key}: {LISTS}<data set>.json of OmniMedVQA do not exist: copy them there")
        used: list[tuple[str, str, dict[str, Any]]] = []  # (client, path of the picture, question's dict in a file)
        ignored = Counter()
        for row in (row for name in lists for row in files.json(name)):
            client = self.client_of(files, row)
            if client in self.clients:
                used.append((client, files.find(files.value(row, "image_path").replace("\\", "/")), row))
            else:
                ignored[files.value(row, "modality_type")] += 1
        log.info("omnimedvqa: %d questions belong to no client and are not used, by modality: %s",
                 sum(ignored.values()), dict(ignored))  # fmt: skip
        test_images: set[str] = set()
        for client in self.clients:
            test_images |= self._test_images(client, {image for owner, image, _ in used if owner == client})
        rows = []
        for client, image, row in used:
            split = TEST if image in test_images else TRAIN
            question, answers = files.value(row, "question"), (files.value(row, "gt_answer"),)
            rows.append(Row(image, question, answers, answer_type=None, split=split, source=client))
        return rows_to_arrays([(files, rows)], self.clients, self, "dataset=omnimedvqa")

    def client_of(self, files: Files, row: dict[str, Any]) -> str | None:
        """Return the client of a question: that of its data set, or else that of its modality.

        Args:
            files: The files of OmniMedVQA.
            row: The question's dict in a file.

        Returns:
            The name of the client.  None: the options assign neither the data set nor the modality to one.
        """
        # plain_name: the letters and digits of a name, in lower case
        of_modality = self._client_of_modality.get(plain_name(files.value(row, "modality_type").split("(")[0]))
        return self._client_of_set.get(plain_name(files.value(row, "dataset")), of_modality)

    def _test_images(self, client: str, images: set[str]) -> set[str]:
        """Return the test pictures of a natural client, a random part of its pictures.

        Args:
            client: The name of the client, part of the random seed, so that clients do not depend on each other.
            images: The names of its pictures.
        """
        order = generator(self.seed, "omnimedvqa", client).permutation(len(images))
        names = sorted(images)
        return {names[i] for i in order[: num_test(len(images), self.test)]}


def plain_name(name: str) -> str:
    """Return the letters (in lower case) and digits of a name.

    The result is equal for "NLM- Malaria Data" and "nlm_malaria_data", two spellings in the files.
    """
    return re.sub(r"[^a-z0-9]", "", name.lower())


def num_test(n: int, fraction: float) -> int:
    """Return the number of test pictures among n pictures: fraction * n, rounded up."""
    return math.ceil(fraction * n - 1e-9)  # 1e-9: rounding errors must not turn 3 = 0.2 * 15 into 4
