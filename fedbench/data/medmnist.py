"""The twelve 2D sets of MedMNIST v2 by flag, 28x28, with their published train, val and test parts.

Source: Yang et al., Scientific Data 2023; files, md5 and class names of release 3.0.2 (Zenodo record
10519652).  The files are plain npz: the medmnist package is not needed.  For the larger sizes of MedMNIST+
give dataset.path and dataset.verify=false.
"""

from pathlib import Path
from typing import Literal

from fedbench.core.options import Count, require
from fedbench.data._files import download, md5_of
from fedbench.data._published import PARTS, Published
from fedbench.data.base import Arrays
from fedbench.data.npz import load_known

URL = "https://zenodo.org/records/10519652/files"
ORGANS = (
    "bladder; femur-left; femur-right; heart; kidney-left; kidney-right; liver; lung-left; lung-right; pancreas; spleen"
)
SIDES = (28, 64, 128, 224)  # of MedMNIST+
# flag: (md5, class names, channels, train, val and test images)
FILES = {
    "bloodmnist": (
        "7053d0359d879ad8a5505303e11de1dc",
        "basophil; eosinophil; erythroblast; immature granulocytes; lymphocyte; monocyte; neutrophil; platelet",
        3,
        (11_959, 1_712, 3_421),
    ),
    "breastmnist": (
        "750601b1f35ba3300ea97c75c52ff8f6",
        "malignant; normal or benign",
        1,
        (546, 78, 156),
    ),
    "chestmnist": (
        "02c8a6516a18b556561a56cbdd36c4a8",
        "atelectasis; cardiomegaly; effusion; infiltration; mass; nodule; pneumonia; pneumothorax; "
        "consolidation; edema; emphysema; fibrosis; pleural; hernia",
        1,
        (78_468, 11_219, 22_433),
    ),
    "dermamnist": (
        "0744692d530f8e62ec473284d019b0c7",
        "actinic keratoses and intraepithelial carcinoma; basal cell carcinoma; "
        "benign keratosis-like lesions; dermatofibroma; melanoma; melanocytic nevi; vascular lesions",
        3,
        (7_007, 1_003, 2_005),
    ),
    "octmnist": (
        "c68d92d5b585d8d81f7112f81e2d0842",
        "choroidal neovascularization; diabetic macular edema; drusen; normal",
        1,
        (97_477, 10_832, 1_000),
    ),
    "organamnist": (
        "68e3f8846a6bd62f0c9bf841c0d9eacc",
        ORGANS,
        1,
        (34_561, 6_491, 17_778),
    ),
    "organcmnist": (
        "b9ceb9546e10131b32923c5bbeaea2b1",
        ORGANS,
        1,
        (12_975, 2_392, 8_216),
    ),
    "organsmnist": (
        "9ab87b696fb54e2a387ebe992d6ed5f1",
        ORGANS,
        1,
        (13_932, 2_452, 8_827),
    ),
    "pathmnist": (
        "a8b06965200029087d5bd730944a56c1",
        "adipose; background; debris; lymphocytes; mucus; smooth muscle; normal colon mucosa; "
        "cancer-associated stroma; colorectal adenocarcinoma epithelium",
        3,
        (89_996, 10_004, 7_180),
    ),
    "pneumoniamnist": (
        "28209eda62fecd6e6a2d98b1501bb15f",
        "normal; pneumonia",
        1,
        (4_708, 524, 624),
    ),
    "retinamnist": (
        "bd4c0672f1bba3e3a89f0e4e876791e4",
        "grade 0; grade 1; grade 2; grade 3; grade 4",
        3,
        (1_080, 120, 400),
    ),
    "tissuemnist": (
        "ebe78ee8b05294063de985d821c1c34b",
        "collecting duct, connecting tubule; distal convoluted tubule; glomerular endothelial cells; "
        "interstitial endothelial cells; leukocytes; podocytes; proximal tubule segments; "
        "thick ascending limb",
        1,
        (165_466, 23_640, 47_280),
    ),
}


class MedMNIST:
    """flag: which set.  path: its npz; None: data_dir/<flag>.npz, downloaded if it is not there.

    verify: refuse a file, found or downloaded, whose md5 is not the published one.
    resize: side in pixels.  mirror: address of a folder to download from instead.
    chestmnist is multi-label; all others, the ordinal retinamnist too, are classification.
    """

    def __init__(
        self,
        data_dir: str,
        flag: Literal[
            "bloodmnist",
            "breastmnist",
            "chestmnist",
            "dermamnist",
            "octmnist",
            "organamnist",
            "organcmnist",
            "organsmnist",
            "pathmnist",
            "pneumoniamnist",
            "retinamnist",
            "tissuemnist",
        ] = "pneumoniamnist",
        path: str | None = None,
        resize: Count | None = None,
        mirror: str | None = None,
        verify: bool = True,
    ):
        self.data_dir, self.flag, self.path, self.resize = Path(data_dir), flag, path, resize
        self.mirror, self.verify = mirror, verify

    def load(self) -> Arrays:
        """Read, or download; ConfigError where the file is another one or cannot be had."""
        md5, names, channels, counts = FILES[self.flag]
        classes = names.split("; ")
        known = Published(self.flag, channels, SIDES, classes, dict(zip(PARTS, counts)))
        file = Path(self.path) if self.path is not None else self.data_dir / f"{self.flag}.npz"
        if file.is_file():
            require(
                not self.verify or md5_of(file) == md5,
                f"{file} is not the published {self.flag}.npz (its md5 is not {md5}): delete it to download "
                "it again, or use it as it is with dataset.verify=false",
            )
        elif self.path is None:
            base = (self.mirror or URL).rstrip("/")
            url = f"{base}/{self.flag}.npz" + ("" if self.mirror else "?download=1")
            download([url], file, md5 if self.verify else None, self.flag)
        task = "multilabel" if self.flag == "chestmnist" else "classification"
        return load_known(file, str(self.data_dir), self.resize, known, task)
