"""Files that unpack to far more than they are on disk are refused before they are unpacked."""

from __future__ import annotations

import gzip
import zipfile
from pathlib import Path

import numpy as np
import pytest

from fedbench.core.options import ConfigError
from fedbench.data._files import require_unpackable
from fedbench.data._pickled import read_object
from fedbench.data.images.mnist import read_idx
from fedbench.data.questions._question_files import Files

SIZE = 150_000_000


@pytest.fixture(scope="module")
def bomb(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """150 MB of blanks, in a zip of 150 kB, as text and as the member of an npz."""
    path = tmp_path_factory.mktemp("bomb") / "bomb.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in ("train.json", "data.npy"):
            with archive.open(name, "w") as file:
                for _ in range(150):
                    file.write(b" " * (SIZE // 150))
    return path


def test_a_bomb_is_refused(bomb: Path) -> None:
    assert bomb.stat().st_size < 1_000_000
    with pytest.raises(
        ConfigError, match=r"bomb\.zip: train\.json unpacks to 150 MB, .* looks like a decompression bo"
    ):
        Files(bomb, "SLAKE", "its site").text("train.json")
    with pytest.raises(ConfigError, match=r"data of .* unpacks to 150 MB"):
        read_object(bomb, "data", "dataset.path=x", "dataset.trust=x", trusted=False)


def test_what_shrinks_as_data_do_is_read(tmp_path: Path) -> None:
    info = zipfile.ZipInfo("images.npy")
    info.file_size, info.compress_size = SIZE, SIZE // 20
    require_unpackable(info, "images")


def test_an_idx_file_is_read_as_far_as_its_header_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "t10k-labels-idx1-ubyte.gz"
    header = b"\x00\x00\x08\x01" + np.array([3], ">u4").tobytes()
    path.write_bytes(gzip.compress(header + b"\x01\x02\x03"))
    assert read_idx(path).tolist() == [1, 2, 3]
    for content in (header + b"\x01\x02", header + bytes(50_000_000), b"\x00\x00\x08"):
        path.write_bytes(gzip.compress(content, 1))
        with pytest.raises(ConfigError, match="is damaged or not an idx file"):
            read_idx(path)
    path.write_bytes(gzip.compress(b"\x00\x00\x08\x03" + b"\xff" * 12))
    with pytest.raises(ConfigError, match=r"more than the .* GB of memory"):
        read_idx(path)
