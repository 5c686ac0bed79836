"""Small generated data sets, one for every kind of task and input; for tests and for trying a method out.

Every set is a function of its options (``seed`` included) alone.  Letters: n samples, F features, C classes,
D domains.
"""

from typing import Literal

import numpy as np

from fedbench.core.options import AtLeast2, Count, NonNegativeInt, require
from fedbench.data._images import half
from fedbench.data.base import TRAIN, Arrays

QUESTION = 6  # tokens per question
WORDS = 16  # vocabulary
QUESTIONS = 9  # about an image, of kind questions
NOISE = 0.3  # standard deviation of what is added to the teacher's scores or to an image
BLOCK = 1024  # pictures with masks that are generated at a time
PICTURES = ("images", "segmentation", "dict", "questions")  # kinds whose inputs are pictures


class Synthetic:
    """kind: linear (features, labels of a noisy linear teacher), images (uint8, a coarse pattern per class),
    multilabel (features, C yes-or-no labels), regression (features, C numbers), segmentation (images of
    rectangles and their masks), dict (an image and a question of 6 tokens; the answer needs both), questions (as
    dict, but 9 questions show one image, which is stored once) or classmask (as linear, but every domain has its own
    valid classes).

    n: samples.  shape: of one input ([F], or [channels, height, width]); None: [20], or [1, 8, 8].
    num_domains: natural silos (0: none); linear features and images differ between them.
    """

    def __init__(
        self,
        kind: Literal[
            "linear", "images", "multilabel", "regression", "segmentation", "dict", "questions", "classmask"
        ] = "linear",
        n: Count = 600,
        num_classes: AtLeast2 = 4,
        shape: list[int] | None = None,
        num_domains: NonNegativeInt = 0,
        seed: NonNegativeInt = 0,
    ):
        require(
            kind != "classmask" or num_domains >= 2,
            f"dataset.kind=classmask needs dataset.num_domains >= 2, got {num_domains}",
        )
        self.kind, self.n, self.num_classes, self.num_domains = kind, n, num_classes, num_domains
        self.seed = seed
        self.shape: tuple[int, ...] = tuple(shape) if shape else ((1, 8, 8) if kind in PICTURES else (20,))
        require(
            len(self.shape) == 3 or kind not in PICTURES,
            f"dataset.shape={list(self.shape)} must be [channels, height, width] for dataset.kind={kind}",
        )

    def load(self) -> Arrays:
        """Generate the set."""
        rng = np.random.default_rng(self.seed)
        domain = np.arange(self.n) % self.num_domains if self.num_domains else None
        arrays: Arrays = getattr(self, f"_{self.kind}")(rng, domain)
        arrays.domain = domain
        return arrays.check()

    def _arrays(self, inputs: np.ndarray | dict[str, np.ndarray], targets: np.ndarray, task: str) -> Arrays:
        split = np.full(self.n, TRAIN, np.int8)
        scale = half(inputs) if isinstance(inputs, np.ndarray) and inputs.dtype == np.uint8 else None
        return Arrays(inputs, targets, split, self.num_classes, task, mean=scale, std=scale)

    def _scores(self, rng: np.random.Generator, domain: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        """Gaussian features [n, *shape], shifted by domain, and a linear teacher's noisy scores [n, C]."""
        features = int(np.prod(self.shape))
        teacher = rng.standard_normal((features, self.num_classes)) / np.sqrt(features)  # [F, C]
        x = rng.standard_normal((self.n, features))  # [n, F]
        if domain is not None:
            x += rng.standard_normal((self.num_domains, features))[domain] / 2
        scores = x @ teacher + NOISE * rng.standard_normal((self.n, self.num_classes))
        return x.astype(np.float32).reshape(self.n, *self.shape), scores

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
        """Domain d lacks the classes c with (c + d) % 3 == 0, but keeps at least two."""
        x, scores = self._scores(rng, domain)
        c, d = np.arange(self.num_classes), np.arange(self.num_domains)[:, None]
        mask = (c + d) % 3 != 0  # [D, C]
        mask[mask.sum(1) < 2] = True
        arrays = self._arrays(x, np.where(mask[domain], scores, -np.inf).argmax(1), "classification")
        arrays.class_mask = mask
        return arrays

    def _patterns(self, rng: np.random.Generator, labels: np.ndarray) -> np.ndarray:
        """Images [n, channels, height, width] in [0, 1]: the pattern of the class, plus noise."""
        coarse = rng.random((self.num_classes, self.shape[0], 4, 4))
        rows, cols = (np.arange(side) * 4 // side for side in self.shape[1:])
        pattern = coarse[:, :, rows[:, None], cols]  # [C, channels, height, width]
        images = pattern[labels] + NOISE * rng.standard_normal((len(labels), *self.shape))
        return np.clip(images, 0, 1)

    def _images(self, rng: np.random.Generator, domain: np.ndarray | None) -> Arrays:
        labels = rng.integers(self.num_classes, size=self.n)
        images = self._patterns(rng, labels)
        if domain is not None:
            images = images * np.linspace(0.5, 1, self.num_domains)[domain, None, None, None]  # darker silos
        return self._arrays((images * 255).astype(np.uint8), labels, "classification")

    def _segmentation(self, rng: np.random.Generator, domain: np.ndarray | None) -> Arrays:
        """One rectangle per image, of class 1 to C - 1 and a grey of that class, on background 0."""
        height, width = self.shape[-2:]
        label = rng.integers(1, self.num_classes, self.n)
        top, left = rng.integers(0, height // 2, self.n), rng.integers(0, width // 2, self.n)
        rows, cols = np.arange(height)[:, None], np.arange(width)
        masks = np.empty((self.n, height, width), np.uint8 if self.num_classes < 256 else np.int64)
        images = np.empty((self.n, *self.shape), np.uint8)
        for start in range(0, self.n, BLOCK):  # the whole as float64 would be many times what is kept
            block = slice(start, start + BLOCK)
            down, right = rows - top[block, None, None], cols - left[block, None, None]
            inside = (down >= 0) & (down < height // 2) & (right >= 0) & (right < width // 2)  # [b, H, W]
            mask = inside * label[block, None, None]
            grey = mask / self.num_classes + NOISE / 4 * rng.standard_normal(mask.shape)
            masks[block], images[block] = mask, (np.clip(grey, 0, 1) * 255).astype(np.uint8)[:, None]
        return self._arrays(images, masks, "segmentation")

    def _dict(self, rng: np.random.Generator, domain: np.ndarray | None) -> Arrays:
        """The answer is the picture's class moved on by the number that the question's first token names."""
        return self._asked(rng, np.arange(self.n))

    def _questions(self, rng: np.random.Generator, domain: np.ndarray | None) -> Arrays:
        entry = np.arange(self.n) // QUESTIONS  # [n]
        arrays = self._asked(rng, entry)
        arrays.shared = {"image": entry}
        return arrays

    def _asked(self, rng: np.random.Generator, entry: np.ndarray) -> Arrays:
        """Each sample's question is about the image whose number entry [n] says."""
        shown = rng.integers(self.num_classes, size=int(entry[-1]) + 1)
        question = rng.integers(1, WORDS, (self.n, QUESTION))  # [n, 6]; 0 is padding
        image = self._patterns(rng, shown).astype(np.float32)
        answer = (shown[entry] + question[:, 0]) % self.num_classes
        return self._arrays({"image": image, "question": question}, answer, "classification")
