"""Small generated data sets, one for each kind of task and input, for tests and first runs.

Each data set depends only on its options.

Letters: n samples, F features, C classes, D domains.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from fedbench.core.options import AtLeast2, Count, NonNegativeInt, require
from fedbench.data._images import half_per_channel
from fedbench.data.base import TRAIN, Arrays

QUESTION_LENGTH = 6  # tokens
WORDS = 16  # vocabulary
QUESTIONS = 9  # about each image of kind=questions
NOISE = 0.3  # standard deviation of the noise in the teacher's scores and in images
BLOCK = 1024  # pictures with masks that are generated at a time
PICTURES = ("images", "segmentation", "dict", "questions")  # kinds whose inputs are pictures


@dataclass
class Synthetic:
    """A generated data set of n samples and num_classes C.  kind: of inputs and targets, such as linear or images.

    Args:
        kind: linear (features, and the class with the largest score of a noisy linear function, the teacher), images
            (uint8, a coarse pattern for each class), multilabel (features, C binary labels), regression (features, C
            targets), segmentation (images of rectangles and their masks), dict (an image and a question of 6 tokens;
            the answer needs both), questions (as dict, but 9 questions are about one image, which is stored once) or
            classmask (as linear, but each domain has its own valid classes).
        n: Number of samples.
        num_classes: C.
        shape: Shape of one input ([F], or [channels, height, width]).  None: [20], or [1, 8, 8].
        num_domains: Number of natural clients, 0 for none; linear features and images differ between them.
        seed: Seed of the generator.
    """

    kind: Literal["linear", "images", "multilabel", "regression", "segmentation", "dict", "questions", "classmask"] = (
        "linear"
    )
    n: Count = 600
    num_classes: AtLeast2 = 4
    shape: list[int] | None = None
    num_domains: NonNegativeInt = 0
    seed: NonNegativeInt = 0

    def __post_init__(self) -> None:
        require(
            self.kind != "classmask" or self.num_domains >= 2,
            f"dataset.num_domains={self.num_domains} is too small for dataset.kind=classmask: set it to at least 2",
        )
        default = (1, 8, 8) if self.kind in PICTURES else (20,)
        self._shape: tuple[int, ...] = tuple(self.shape or default)
        require(
            len(self._shape) == 3 or self.kind not in PICTURES,
            f"dataset.shape={list(self._shape)} does not fit dataset.kind={self.kind}: set it to three numbers "
            "[channels, height, width], or to null for [1, 8, 8]",
        )

    def load(self) -> Arrays:
        """Return the generated samples, all in the training part.  Equal options give equal samples."""
        rng = np.random.default_rng(self.seed)
        domain = np.arange(self.n) % self.num_domains if self.num_domains else None
        generate = getattr(self, f"_{self.kind}")  # the method of the kind, such as _linear
        arrays: Arrays = generate(rng, domain)
        arrays.domain = domain
        return arrays.check()

    def _arrays(self, inputs: np.ndarray | dict[str, np.ndarray], targets: np.ndarray, task: str) -> Arrays:
        """Return inputs and targets as Arrays without a published split.

        Args:
            inputs: Inputs [n, ...], or a dict of them by name.  A single array of uint8 is normalized to [-1, 1].
            targets: Targets [n, ...].
            task: The kind of targets, such as "classification".
        """
        split = np.full(self.n, TRAIN, np.int8)
        # a mean and deviation of 0.5 per channel, which give pixels in [-1, 1]
        scale = half_per_channel(inputs) if isinstance(inputs, np.ndarray) and inputs.dtype == np.uint8 else None
        return Arrays(inputs, targets, split, self.num_classes, task, mean=scale, std=scale)

    def _scores(self, rng: np.random.Generator, domain: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        """Draw Gaussian features and the noisy scores of a random linear function (the teacher).

        Args:
            rng: Random numbers.
            domain: The natural client (hospital, user) of each sample, [n], whose features have a mean of their own,
                drawn with standard deviation 0.5.  None: no shift.

        Returns:
            Features [n, *shape] float32, and scores [n, C].
        """
        features = int(np.prod(self._shape))  # F, numbers of a sample
        teacher = rng.standard_normal((features, self.num_classes)) / np.sqrt(features)  # [F, C]
        x = rng.standard_normal((self.n, features))  # [n, F]
        if domain is not None:
            x += rng.standard_normal((self.num_domains, features))[domain] / 2
        # NOISE: standard deviation of the noise
        scores = x @ teacher + NOISE * rng.standard_normal((self.n, self.num_classes))
        return x.astype(np.float32).reshape(self.n, *self._shape), scores

    def _linear(self, rng: np.random.Generator, domain: np.ndarray | None) -> Arrays:
        x, scores = self._scores(rng, domain)
        return self._arrays(x, scores.argmax(1), "classification")

    def _multilabel(self, rng: np.random.Generator, domain: np.ndarray | None) -> Arrays:
        x, scores = self._scores(rng, domain)
        return self._arrays(x, (scores > 0).astype(np.float32), "multilabel")

    def _regression(self, rng: np.random.Generator, domain: np.ndarray | None) -> Arrays:
        x, scores = self._scores(rng, domain)
        return self._arrays(x, scores.astype(np.float32), "regression")

    def _classmask(self, rng: np.random.Generator, domain: np.ndarray) -> Arrays:
        """Return the data of kind=classmask, where each domain has its own classes.

        Domain d does not have the classes c with (c + d) % 3 == 0, unless fewer than two classes would remain.

        Args:
            rng: Random numbers.
            domain: The natural client (hospital, user) of each sample, [n].
        """
        x, scores = self._scores(rng, domain)
        c, d = np.arange(self.num_classes), np.arange(self.num_domains)[:, None]
        mask = (c + d) % 3 != 0  # [D, C]
        mask[mask.sum(1) < 2] = True  # all classes
        # The class of a sample is the one with the largest score among the classes of its domain.
        arrays = self._arrays(x, np.where(mask[domain], scores, -np.inf).argmax(1), "classification")
        arrays.class_mask = mask
        return arrays

    def _patterns(self, rng: np.random.Generator, labels: np.ndarray) -> np.ndarray:
        """Return an image for each label: the random 4 x 4 pattern of its class, enlarged, plus noise.

        Args:
            rng: Random numbers.
            labels: Classes, [n].

        Returns:
            Images [n, channels, height, width] with values in [0, 1].
        """
        coarse = rng.random((self.num_classes, self._shape[0], 4, 4))  # a pattern for each class and channel
        rows, cols = (np.arange(side) * 4 // side for side in self._shape[1:])  # pattern cell of each pixel
        pattern = coarse[:, :, rows[:, None], cols]  # [C, channels, height, width]
        images = pattern[labels] + NOISE * rng.standard_normal((len(labels), *self._shape))
        return np.clip(images, 0, 1)

    def _images(self, rng: np.random.Generator, domain: np.ndarray | None) -> Arrays:
        """Return Arrays of n uint8 images [n, channels, height, width] with the pattern of their class.

        Their brightness depends on their domain [n]; None: all have full brightness.
        """
        labels = rng.integers(self.num_classes, size=self.n)
        images = self._patterns(rng, labels)
        if domain is not None:
            brightness = np.linspace(0.5, 1, self.num_domains)[domain]  # [n], differs between domains
            images = images * brightness[:, None, None, None]
        return self._arrays((images * 255).astype(np.uint8), labels, "classification")

    def _segmentation(self, rng: np.random.Generator, domain: np.ndarray | None) -> Arrays:
        """Return images of one rectangle each, on background 0, and their masks.

        The rectangle has a class from 1 to C - 1, the grey value of that class, and half the image's height and width.

        Args:
            rng: Random numbers.
            domain: Not used: all images have the same distribution.
        """
        height, width = self._shape[-2:]
        label = rng.integers(1, self.num_classes, self.n)
        top, left = rng.integers(0, height // 2, self.n), rng.integers(0, width // 2, self.n)
        rows, cols = np.arange(height)[:, None], np.arange(width)
        masks = np.empty((self.n, height, width), np.uint8 if self.num_classes < 256 else np.int64)
        images = np.empty((self.n, *self._shape), np.uint8)
        for start in range(0, self.n, BLOCK):  # float64 arrays of all images would be large
            block = slice(start, start + BLOCK)
            # distances of the pixels from the top left corner of the rectangle
            down, right = rows - top[block, None, None], cols - left[block, None, None]
            # b: images of the block
            inside = (down >= 0) & (down < height // 2) & (right >= 0) & (right < width // 2)  # [b, H, W]
            mask = inside * label[block, None, None]
            grey = mask / self.num_classes + NOISE / 4 * rng.standard_normal(mask.shape)
            masks[block], images[block] = mask, (np.clip(grey, 0, 1) * 255).astype(np.uint8)[:, None]
        return self._arrays(images, masks, "segmentation")

    def _dict(self, rng: np.random.Generator, domain: np.ndarray | None) -> Arrays:
        return self._with_questions(rng, np.arange(self.n))

    def _questions(self, rng: np.random.Generator, domain: np.ndarray | None) -> Arrays:
        image_of = np.arange(self.n) // QUESTIONS  # [n]
        arrays = self._with_questions(rng, image_of)
        arrays.shared = {"image": image_of}
        return arrays

    def _with_questions(self, rng: np.random.Generator, image_of: np.ndarray) -> Arrays:
        """Return images and questions of QUESTION_LENGTH (6) tokens, of a vocabulary of WORDS.

        The answer is the class of the image plus the first token, modulo C.

        Args:
            rng: Random numbers.
            image_of: The image of each question, ascending from 0, [n].

        Returns:
            Inputs "image" (one entry for each image) and "question" [n, 6], and answers [n] as targets.
        """
        labels = rng.integers(self.num_classes, size=int(image_of[-1]) + 1)  # class of each image
        question = rng.integers(1, WORDS, (self.n, QUESTION_LENGTH))  # [n, 6]; 0 is padding
        image = self._patterns(rng, labels).astype(np.float32)
        answer = (labels[image_of] + question[:, 0]) % self.num_classes
        return self._arrays({"image": image, "question": question}, answer, "classification")
