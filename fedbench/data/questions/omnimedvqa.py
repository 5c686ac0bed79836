"""Questions of OmniMedVQA about pictures of many kinds, a client a kind: FedPIA's Task 2.

Source: Hu et al., CVPR 2024 (huggingface.co/datasets/foreverbeliever/OmniMedVQA).
Licence: each picture has that of its data set.
Layout of dataset.path::

    Images/{data set}/...
    QA_information/Open-access/{data set}.json      questions

Questions of restricted data sets name pictures that are not in it, and are not read.  Of a question its right answer
alone is used, not the options: the answer is the class.
FedPIA's list of 41 data sets and the unit of its cut are not published.  Here all data sets of a modality are taken,
and of each client's pictures a share, rounded up, is tested on with all of their questions.
"""

from __future__ import annotations

import logging
import math
import re
from collections import Counter
from pathlib import Path
from typing import Any, Literal

from fedbench.core.options import Count, OpenUnit, Seed, require
from fedbench.core.rng import generator
from fedbench.data.base import TEST, TRAIN, Arrays
from fedbench.data.questions._answers import Answers, Kept, Normalizer
from fedbench.data.questions._question_files import Files, Layout, Row, assembled

log = logging.getLogger(__name__)
LISTS = "QA_information/Open-access/"
WHERE = "huggingface.co/datasets/foreverbeliever/OmniMedVQA (each picture under its own data set's licence)"


class OmniMedVQA:
    """inputs image uint8 [m, 1 or 3, side, side], each stored once, and text int64 [n, tokens]; targets [n, 2]
    (data/questions/_questions.py).

    clients: in order; questions of others are not read.  modalities: the client that each modality_type of the files is
    of, in small letters and without what it has in brackets.  sets: the client of a data set where its modality would
    tell another one.  path: the folder, or a zip of it; null: data_dir/omnimedvqa.  test: the share of each client's
    pictures that is tested on, drawn from seed.  All else: see VQARad.
    """

    def __init__(
        self,
        clients: list[str],
        modalities: dict[str, str],
        sets: dict[str, str] | None = None,
        path: str | None = None,
        test: OpenUnit = 0.2,
        seed: Seed = 0,
        side: Count = 64,
        color: Literal["rgb", "grey"] = "rgb",
        tokens: Count = 24,
        vocab: str | None = None,
        min_count: Count = 1,
        answers: Kept = "all",
        normalizer: Normalizer = "plain",
        data_dir: str = "data",
    ):
        require(
            0 < len(clients) == len(set(clients)),
            f"dataset.clients={clients} must name one client or more, each once",
        )
        told = {*modalities.values(), *(sets or {}).values()}
        odd = [client for client in clients if client not in told]
        require(not odd, f"dataset.modalities and dataset.sets assign nothing to {', '.join(odd)} of dataset.clients")
        self.clients = clients
        self.modalities = {plain(name): client for name, client in modalities.items()}
        self.sets = {plain(name): client for name, client in (sets or {}).items()}
        self.path, self.test, self.seed = Path(path or Path(data_dir) / "omnimedvqa"), test, seed
        self.layout = Layout(side, color, tokens, vocab, data_dir, Answers(min_count, answers, normalizer))

    def load(self) -> Arrays:
        """Data set after data set, in the alphabet."""
        files = Files(self.path, "OmniMedVQA", WHERE)
        lists = [name for name in files.names if LISTS in f"/{name}" and name.endswith(".json")]
        require(bool(lists), f"dataset.path={files.path}: {LISTS}<data set>.json of OmniMedVQA are not there")
        asked, unread = [], Counter()
        for row in (row for name in lists for row in files.json(name)):
            client = self.client_of(files, row)
            if client in self.clients:
                asked.append((client, files.find(files.value(row, "image_path").replace("\\", "/")), row))
            else:
                unread[files.value(row, "modality_type")] += 1
        log.info("omnimedvqa: %d questions are of no client: %s", sum(unread.values()), dict(unread))
        tested: set[str] = set()
        for client in self.clients:
            tested.update(self._tested(client, {image for whose, image, _ in asked if whose == client}))
        rows = [
            Row(
                image,
                files.value(row, "question"),
                (files.value(row, "gt_answer"),),
                None,
                TEST if image in tested else TRAIN,
                client,
            )
            for client, image, row in asked
        ]
        return assembled([(files, rows)], self.clients, self.layout, "dataset=omnimedvqa")

    def client_of(self, files: Files, row: dict[str, Any]) -> str | None:
        """By the data set where it is in sets, else by the modality; None where neither has a client."""
        by_modality = self.modalities.get(plain(files.value(row, "modality_type").split("(")[0]))
        return self.sets.get(plain(files.value(row, "dataset")), by_modality)

    def _tested(self, client: str, images: set[str]) -> list[str]:
        """Those that are drawn, whoever the other clients are."""
        order = generator(self.seed, "omnimedvqa", client).permutation(len(images))
        names = sorted(images)
        return [names[i] for i in order[: num_tested(len(images), self.test)]]


def plain(name: str) -> str:
    """Letters and digits: NLM- Malaria Data and nlm_malaria_data are one."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def num_tested(n: int, test: float) -> int:
    """How many of n pictures are tested on."""
    return math.ceil(test * n - 1e-9)  # 0.2 * 15 is 3, whatever its last bit
