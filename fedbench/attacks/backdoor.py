"""Backdoor: attackers teach the model to answer a trigger with a class of their choice.

The trigger is a square of pixels in the lower right corner with the largest value: Gu, Dolan-Gavitt and Garg, BadNets,
2017.  Attackers train on images of which a fraction has the trigger and the target label.  With scale > 1 they also
multiply their change before the upload, so that it outweighs the others: model replacement, Bagdasaryan et al.,
AISTATS 2020.
The attack success rate of a model is the fraction of triggered test images that it assigns to the target class.  These
are copies of the honest clients' test images of other classes.
"""

from dataclasses import replace

import numpy as np
from torch import Tensor

from fedbench.attacks._copies import append_copies, entries_of, require_classes, with_entries
from fedbench.attacks.base import Attack, Observed, Poisoned
from fedbench.core import rng
from fedbench.core.options import Count, Fraction, NonNegativeInt, Positive, UnitInterval, require
from fedbench.core.split import Ragged, Split
from fedbench.data.base import Arrays


class Backdoor(Attack):
    """Images with a trigger, a white square, and the target label among the attackers' training samples.

    Args:
        fraction: Fraction of the training clients that attack.
        clients: The attackers by client index, instead of a random fraction.
        target: The class that triggered images shall get.
        poisoned: Fraction of an attacker's training samples with the trigger.
        size: Width of the square, in pixels.
        scale: Factor of the attackers' changes; 1: they upload what they trained.
    """

    def __init__(
        self,
        fraction: UnitInterval = 0.2,
        clients: list[NonNegativeInt] | None = None,
        target: NonNegativeInt = 0,
        poisoned: Fraction = 0.5,
        size: Count = 2,
        scale: Positive = 1.0,
    ):
        super().__init__(fraction, clients)
        self.target, self.poisoned, self.size, self.scale = target, poisoned, size, scale
        self.changes_uploads = scale != 1

    def corrupt(self, o: Observed) -> Tensor:
        """Return the uploads of the f attackers, which have trained on poisoned samples, times the option scale.

        Args:
            o: The uploads of the round; truthful: what the attackers' training gave, [f, p].

        Returns:
            The f attackers' new uploads.  # [f, p]
        """
        return self.scale * o.truthful

    def poison(self, arrays: Arrays, split: Split, attackers: np.ndarray, seed: int) -> Poisoned:
        """Return the data with triggered training samples of attackers, and triggered test samples of the others.

        Args:
            arrays: The data set.
            split: The samples of each client.
            attackers: The attackers.  # [f]
            seed: The run's seed, for the choice of the poisoned samples.

        Returns:
            The data; `triggered` has the test samples of honest clients with trigger and target label, except those
            that already are of the target class.

        Raises:
            ConfigError: The data are not images with classes, or an option does not fit them.
        """
        images = self._images(arrays)
        sizes = split.train.sizes_of(attackers)  # [f]
        # poisoned: fraction of an attacker's samples that get the trigger; rounded to the nearest integer
        counts = np.floor(self.poisoned * sizes + 0.5).astype(np.int64)
        # positions among each attacker's own samples  [count] each
        chosen = rng.subsets(rng.key(seed, "backdoor"), attackers, sizes, counts)
        begins = split.train.offsets[attackers]  # [f]
        # positions in split.train.indices of the poisoned samples
        training = np.concatenate([np.empty(0, np.int64), *(begin + c for begin, c in zip(begins, chosen))])
        honest = np.setdiff1d(np.arange(split.num_clients), attackers)
        # positions in split.test.indices of the honest clients' test samples of other classes than the target
        scored = entries_of(split.test, honest)
        scored = scored[arrays.targets[split.test.indices[scored]] != self.target]
        samples = np.concatenate([split.train.indices[training], split.test.indices[scored]])
        labels = np.full(len(samples), self.target)
        changed = append_copies(arrays.expanded(), samples, labels, self.with_trigger(images[samples], images))
        copies = len(arrays) + np.arange(len(samples))  # indices of the changed samples, after all others
        train = with_entries(split.train, training, copies[: len(training)])
        triggered = Ragged.from_owners(copies[len(training) :], split.test.owners()[scored], split.num_clients)
        return Poisoned(changed, replace(split, train=train), triggered)

    def _images(self, arrays: Arrays) -> np.ndarray:
        """Return the image of each sample.  # [n, channels, height, width]

        Raises:
            ConfigError: The data are not images with classes, or an option does not fit them.
        """
        require_classes(arrays, "backdoor")
        images = arrays.expanded().images  # expanded: with an image for each sample, if samples share images
        require(
            images is not None,
            "attack=backdoor puts its trigger into images, but this data set has no images: use a data set of "
            "images, or another attack such as attack=label_flip",
        )
        assert images is not None  # for type checkers
        require(
            self.target < arrays.num_classes,
            f"attack.target={self.target} must be a class of the data set: set 0 to {arrays.num_classes - 1}",
        )
        require(
            self.size <= min(images.shape[2:]),
            f"attack.size={self.size} is larger than the images, which have {images.shape[2]} x {images.shape[3]} "
            "pixels: lower it",
        )
        return images

    def with_trigger(self, images: np.ndarray, all_images: np.ndarray) -> np.ndarray:
        """Return a copy of images with the trigger, a white square in the lower right corner.

        Args:
            images: The images to change.  # [k, channels, height, width]
            all_images: All images of the data set.  White is their largest value, or 255 for bytes.

        Returns:
            The changed copies.  # [k, channels, height, width]
        """
        images = images.copy()
        images[:, :, -self.size :, -self.size :] = 255 if all_images.dtype == np.uint8 else all_images.max()
        return images
