"""open_clip's private names are there."""

import pytest
from private_names import sentence

from fedbench.models import _private_open_clip


def test_open_clip_has_them() -> None:
    pytest.importorskip("open_clip")
    assert sentence("open_clip_torch", _private_open_clip.NAMES, "fedbench/models/_private_open_clip.py") == ""
