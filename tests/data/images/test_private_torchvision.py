"""torchvision's private names are there: attributes that its data sets get in their constructors."""

import inspect
import re
from importlib.metadata import version

import pytest

from fedbench.data.images import clip_sets
from fedbench.data.images._private_torchvision import LABELS, PATHS, paths_and_labels


@pytest.mark.parametrize("kind", PATHS)
def test_torchvision_has_them(kind: str) -> None:
    """Read in the source: to make the data set takes its files."""
    datasets = pytest.importorskip("torchvision.datasets")
    source = inspect.getsource(getattr(datasets, kind))
    missing = [name for name in (PATHS[kind], LABELS) if not re.search(rf"self\.{name}(, .*|: .*)? = ", source)]
    said = f"torchvision {version('torchvision')}: {kind} has no {', '.join(missing)} any more"
    assert not missing, f"{said}: mend fedbench/data/images/_private_torchvision.py"


def test_every_set_that_reads_them_is_listed() -> None:
    readers = [c for c in vars(clip_sets).values() if inspect.isclass(c) and issubclass(c, clip_sets.PictureSet)]
    kinds = {c.kind for c in readers if c.pictures is clip_sets.PictureSet.pictures and c.kind}
    assert kinds == set(PATHS)


def test_paths_and_labels_are_those_of_the_set() -> None:
    class Pets:
        _images, _image_files, _labels = ["a"], ["b"], [3]

    assert paths_and_labels("OxfordIIITPet", Pets()) == (["a"], [3])
    assert paths_and_labels("DTD", Pets()) == (["b"], [3])
