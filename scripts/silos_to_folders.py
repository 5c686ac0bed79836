"""Write a partitioned image data set as folders client/class/image.

    python scripts/silos_to_folders.py FOLDER dataset=pneumoniamnist partition=practical partition.num_clients=4

Training, validation and test samples are merged.  dataset=image_folder partition=domain reads the folders, with a new
test part for each client, and dataset.extra can add training images.
"""

import sys
from pathlib import Path

import numpy as np
from PIL import Image

from fedbench.app.compose import compose
from fedbench.config.check import check
from fedbench.simulation import build


def main() -> None:
    """Compose the configuration, and write the images of each client."""
    folder, overrides = Path(sys.argv[1]), sys.argv[2:]
    cfg = compose(overrides)
    check(cfg)
    arrays = build.data(cfg)
    split, names = build.partition(cfg, arrays), arrays.class_names or [str(c) for c in range(arrays.num_classes)]
    for client in range(split.num_clients):
        samples = np.sort(np.concatenate([part[client] for part in (split.train, split.val, split.test)]))
        for index in samples:
            path = folder / f"silo{client}" / names[arrays.targets[index]] / f"{index:05d}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            image = arrays.inputs[index].transpose(1, 2, 0)  # type: ignore[index]
            Image.fromarray(image[..., 0] if image.shape[2] == 1 else image).save(path)
        print(f"silo{client}: {len(samples):,} images")


if __name__ == "__main__":
    main()
