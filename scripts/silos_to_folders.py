"""Write a data set of pictures, divided among clients, as folders silo/class/picture.

    python scripts/silos_to_folders.py FOLDER dataset=pneumoniamnist partition=practical partition.num_clients=4

Published parts are merged.  What is written is read by dataset=image_folder partition=domain, which cuts each silo's
test part anew, and to which dataset.extra can add pictures for training.
"""

import sys
from pathlib import Path

import numpy as np
from PIL import Image

from fedbench.app.compose import compose
from fedbench.config.check import check
from fedbench.simulation import build


def main() -> None:
    """Compose the run's options, divide, write."""
    folder, overrides = Path(sys.argv[1]), sys.argv[2:]
    cfg = compose(overrides)
    check(cfg)
    arrays = build.data(cfg)
    split, names = build.partition(cfg, arrays), arrays.class_names or [str(c) for c in range(arrays.num_classes)]
    for client in range(split.num_clients):
        mine = np.sort(np.concatenate([part[client] for part in (split.train, split.val, split.test)]))
        for index in mine:
            target = folder / f"silo{client}" / names[arrays.targets[index]] / f"{index:05d}.png"
            target.parent.mkdir(parents=True, exist_ok=True)
            picture = arrays.inputs[index].transpose(1, 2, 0)  # type: ignore[index]
            Image.fromarray(picture[..., 0] if picture.shape[2] == 1 else picture).save(target)
        print(f"silo{client}: {len(mine):,} pictures")


if __name__ == "__main__":
    main()
