"""Picture files as they lie on people's disks: deeper than 8 bits, turned, of several pages, beside hidden files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tiny import split_of

from fedbench.core.options import ConfigError
from fedbench.data._depth import check_window
from fedbench.data._images import centre_squares, decode, open_picture, window_of
from fedbench.data.arrays.npz import Npz
from fedbench.data.base import Arrays
from fedbench.data.images.image_folder import ImageFolder
from fedbench.data.images.image_table import ImageTable
from fedbench.data.questions._question_files import Files, PictureTextOptions
from fedbench.data.tables._scales import warn_of_scales

RNG = np.random.default_rng(0)
SIDE = 8
# values of two classes, their noise, dtype, ending, and the window that is right
DEEP = {
    "twelve bits in sixteen": (800, 1000, 15, np.uint16, "png", (0, 2048)),
    "sixteen bits": (20_000, 40_000, 500, np.uint16, "png", (0, 65_536)),
    "fractions": (0.3, 0.6, 0.03, np.float32, "tif", (0, 1)),
    "Hounsfield units": (-800, -100, 30, np.int32, "tif", None),
    "float Hounsfield units": (-800, 900, 30, np.float32, "tif", None),
    "counts as floats": (300, 3000, 30, np.float32, "tif", None),
}


def read_all(paths: list[Path], side: int, color: str, window: tuple[float, float] | None = None) -> np.ndarray:
    return np.stack(list(decode(paths, side, color, window_of(paths, window, "the data set"))))


def deep_folder(root: Path, kind: str, n: int = 6) -> np.ndarray:
    """A folder of two classes that differ by their mean alone; the values [2 n, SIDE, SIDE] in reading order."""
    *means, noise, dtype, end, _ = DEEP[kind]
    pictures = []
    for name, mean in zip(("healthy", "ill"), means):
        (root / name).mkdir(parents=True)
        for i in range(n):
            pictures.append((mean + noise * RNG.standard_normal((SIDE, SIDE))).astype(dtype))
            Image.fromarray(pictures[-1]).save(root / name / f"{i}.{end}")
    return np.stack(pictures)


def eight(values: np.ndarray, low: float, high: float) -> np.ndarray:
    """By hand: 256 steps of equal width from low to high."""
    return np.clip(np.floor((values.astype(float) - low) * 256 / (high - low)), 0, 255).astype(np.uint8)


@pytest.mark.parametrize("kind", DEEP)
def test_deep_pictures_are_scaled_by_the_range_of_the_whole_set(tmp_path: Path, kind: str) -> None:
    values = deep_folder(tmp_path / "set", kind)
    low, high = DEEP[kind][-1] or (float(values.min()), float(values.max()))
    folder = ImageFolder(str(tmp_path), str(tmp_path / "set"), SIDE, color="grey").load()
    assert (folder.inputs[:, 0] == eight(values, low, high)).all()
    listing = tmp_path / "set" / "list.csv"
    names = [f"{c}/{i}.{DEEP[kind][-2]}" for c in ("healthy", "ill") for i in range(6)]
    listing.write_text("image,label\n" + "".join(f"{name},{name.split('/')[0]}\n" for name in names))
    table = ImageTable(str(tmp_path), str(listing), columns={"patient": None, "silo": None}, resize=SIDE).load()
    assert (table.inputs == folder.inputs).all()
    squares = centre_squares(str(tmp_path), "squares", tmp_path / "set", names, SIDE)
    assert (squares == folder.inputs).all()
    options = PictureTextOptions(side=SIDE, color="grey", tokens=4, data_dir=str(tmp_path))
    asked = options.pictures([(Files(tmp_path / "set", "x", "y"), names)], "x")
    assert (asked == folder.inputs).all()


def test_pixels_of_an_npz_are_scaled_as_those_of_files(tmp_path: Path) -> None:
    values, labels = deep_folder(tmp_path / "set", "twelve bits in sixteen"), np.repeat([0, 1], 6)
    path = tmp_path / "a.npz"
    for stored in (values, values.astype(np.int32), values[..., None], values[:, None].astype(np.int64)):
        np.savez(path, X=stored, y=labels)
        assert (Npz(str(tmp_path), str(path)).load().inputs[:, 0] == eight(values, 0, 2048)).all()
    np.savez(path, X=values.astype(np.int16) - 1000, y=labels)
    low, high = int(values.min()) - 1000, int(values.max()) - 1000
    assert (Npz(str(tmp_path), str(path)).load().inputs[:, 0] == eight(values - 1000.0, low, high)).all()
    np.savez(path, X=values.astype(np.float32), y=labels)
    assert (Npz(str(tmp_path), str(path)).load().inputs == values).all()  # features: as they are
    windowed = Npz(str(tmp_path), str(path), window=[700, 1100]).load()
    assert windowed.mean == (0.5,) and (windowed.inputs[:, 0] == eight(values, 700, 1100)).all()


def test_large_floats_of_pictures_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    for values, said in ((RNG.standard_normal((9, 1, 4, 4)), False), (RNG.uniform(-1000, 3000, (9, 1, 4, 4)), True)):
        labels, split = np.arange(9) % 3, np.zeros(9, np.int8)
        arrays = Arrays(values.astype(np.float32), labels, split, 3)
        warn_of_scales(arrays, split_of([3], [3], [3]))
        assert ("scale the pictures by dataset.window=[low, high]" in caplog.text) is said


def test_a_window_is_asked_for_or_checked(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    values = deep_folder(tmp_path / "set", "Hounsfield units")
    root = str(tmp_path / "set")
    arrays = ImageFolder(str(tmp_path), root, SIDE, color="grey", window=[-1000, 400]).load()
    assert (arrays.inputs[:, 0] == eight(values, -1000, 400)).all()
    for odd in ([1], [2, 1], [0, 0], [0, float("inf")], ["0", 1], [True, 2], [0, 1, 2]):
        with pytest.raises(ConfigError, match=r"dataset\.window=.* set it to two finite numbers \[low, high\]"):
            check_window(odd)
    plain = tmp_path / "plain.png"
    Image.fromarray(np.arange(64, dtype=np.uint8).reshape(8, 8)).save(plain)
    assert (read_all([plain], 8, "grey", (0, 64))[0, 0] == np.arange(64).reshape(8, 8)).all()
    assert "dataset.window=[0, 64] has no effect" in caplog.text
    with pytest.raises(ConfigError, match=r"dataset\.window=\[.*\] is for images of more than 8 bits"):
        np.savez(tmp_path / "u8.npz", X=np.zeros((4, 8, 8), np.uint8), y=np.arange(4))
        Npz(str(tmp_path), str(tmp_path / "u8.npz"), window=[0, 9]).load()
    with pytest.raises(ConfigError, match=r"more than 8 bits per pixel: set dataset\.window"):
        open_picture(next((tmp_path / "set" / "ill").iterdir()), 8, "grey")


def test_deep_extra_pictures_need_a_window(tmp_path: Path) -> None:
    """Their range is another one than that of the data set, which would make them darker or brighter."""
    for silo, kind in (("set/north", "twelve bits in sixteen"), ("more/north", "twelve bits in sixteen")):
        deep_folder(tmp_path / silo, kind)
    root, more = str(tmp_path / "set"), str(tmp_path / "more")
    listing = tmp_path / "set" / "list.csv"
    names = [f"north/{c}/{i}.png" for c in ("healthy", "ill") for i in range(6)]
    listing.write_text("image,label,silo\n" + "".join(f"{name},{name.split('/')[1]},north\n" for name in names))
    for window, fits in ((None, False), ([0, 4096], True)):
        sources = (
            ImageFolder(str(tmp_path), root, SIDE, extra=more, window=window),
            ImageTable(str(tmp_path), str(listing), columns={"patient": None}, resize=SIDE, extra=more, window=window),
        )
        for source in sources:
            if fits:
                assert len(source.load()) == 24
            else:
                with pytest.raises(ConfigError, match=r"more have more than 8 bits: set dataset\.window="):
                    source.load()


def test_a_range_that_most_pictures_do_not_use_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One burned-in pixel of 65,535 among counts of 12 bits would leave 4 grey levels."""
    deep_folder(tmp_path / "set", "twelve bits in sixteen")
    hot = np.full((SIDE, SIDE), 900, np.uint16)
    hot[0, 0] = 65_535
    Image.fromarray(hot).save(tmp_path / "set" / "ill" / "hot.png")
    with pytest.raises(
        ConfigError, match=r"13 of 13 pictures .* at most 16 of 256 grey levels.*Set dataset\.window=\["
    ):
        ImageFolder(str(tmp_path), str(tmp_path / "set"), SIDE).load()
    assert len(ImageFolder(str(tmp_path), str(tmp_path / "set"), SIDE, window=[0, 65_536]).load()) == 13
    files = [tmp_path / f"{i}.png" for i in range(3)]
    for file, level in zip(files, (100, 60_000, 50_000)):
        Image.fromarray(np.full((SIDE, SIDE), level, np.uint16)).save(file)
    assert window_of(files, None, "three") == (0, 65_536) and "1 of 3 pictures" in caplog.text
    with pytest.raises(ConfigError, match=r"all pixels of the pictures with more than 8 bits in .* have the value 100"):
        window_of(files[:1], None, "one")
    Image.fromarray(np.full((SIDE, SIDE), np.nan, np.float32)).save(tmp_path / "nan.tif")
    with pytest.raises(ConfigError, match=r"nan\.tif has NaN or infinite values"):
        window_of([tmp_path / "nan.tif"], None, "nan")


def sixteen_bit_color(path: Path, most: int) -> None:
    """A PNG with 16 bits per color, which Pillow reads and does not write."""
    import struct
    import zlib

    pixels = np.linspace(0, most, SIDE * SIDE * 3).astype(">u2").reshape(SIDE, SIDE * 3)
    rows = b"".join(b"\0" + row.tobytes() for row in pixels)

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", SIDE, SIDE, 16, 2, 0, 0, 0))
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b""))


def test_sixteen_bits_of_color_are_read_where_they_fill_their_range(tmp_path: Path) -> None:
    for most, fits in ((65_535, True), (4095, False)):
        sixteen_bit_color(path := tmp_path / f"{most}.png", most)
        if fits:
            wanted = (np.linspace(0, most, SIDE * SIDE * 3).astype(int) >> 8).reshape(SIDE, SIDE, 3)
            assert (read_all([path], SIDE, "rgb")[0] == wanted.transpose(2, 0, 1)).all()
        else:
            with pytest.raises(ConfigError, match="16 bits per color, of which only the upper 8 can be read"):
                read_all([path], SIDE, "rgb")


@pytest.mark.parametrize("end", ["jpg", "png", "tif", "webp"])
def test_pictures_stand_as_viewers_show_them(tmp_path: Path, end: str) -> None:
    """All eight orientations that EXIF knows."""
    upright = np.zeros((16, 16), np.uint8)
    upright[:8, :8], upright[:8, 8:], upright[8:, :8] = 240, 160, 80
    stored = {  # what a camera that writes this orientation stores of it
        1: upright, 2: upright[:, ::-1], 3: upright[::-1, ::-1], 4: upright[::-1],
        5: upright.T, 6: np.rot90(upright), 7: upright[::-1, ::-1].T, 8: np.rot90(upright, -1),
    }  # fmt: skip
    for orientation, pixels in stored.items():
        exif = Image.Exif()
        exif[0x0112] = orientation
        path = tmp_path / f"{orientation}.{end}"
        lossless = {"lossless": True} if end == "webp" else {}
        Image.fromarray(np.ascontiguousarray(pixels)).save(path, exif=exif, **lossless)
        found = open_picture(path, 16, "grey")[0].astype(int)
        assert np.abs(found - upright).max() < 12, (end, orientation)


def test_damaged_exif_data_do_not_hide_a_picture(tmp_path: Path) -> None:
    Image.fromarray(np.full((8, 8), 99, np.uint8)).save(tmp_path / "a.png", exif=b"Exif\0\0nonsense")
    assert (open_picture(tmp_path / "a.png", 8, "grey") == 99).all()


@pytest.mark.parametrize("end", ["tif", "gif", "png", "webp"])
def test_pictures_of_several_pages_are_refused(tmp_path: Path, end: str) -> None:
    pages = [Image.fromarray(np.full((8, 8), level, np.uint8)) for level in (10, 200)]
    pages[0].save(tmp_path / f"a.{end}", save_all=True, append_images=pages[1:])
    with pytest.raises(ConfigError, match="has 2 pages, but must have one: save each page as a picture"):
        read_all([tmp_path / f"a.{end}"], 8, "grey")


def colored(path: Path, level: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((4, 4, 3), level, np.uint8)).save(path)


def test_hidden_folders_and_files_are_no_classes(tmp_path: Path) -> None:
    for layout, tops in (("class", [""]), ("domain", ["north/", "south/"])):
        root = tmp_path / layout
        for top in tops:
            for name, level in (("benign", 10), ("malign", 200)):
                colored(root / f"{top}{name}" / "0.png", level)
        wanted = ImageFolder(str(tmp_path), str(root)).load().digest
        for junk in (
            ".ipynb_checkpoints",
            f"{tops[0]}.ipynb_checkpoints",
            f"{tops[0]}benign/.ipynb_checkpoints",
            "__MACOSX/benign",
        ):
            colored(root / junk / "0-checkpoint.png", 50)
        (root / f"{tops[0]}benign" / "._0.png").write_bytes(b"\0\5\x16\7" + bytes(78))
        assert ImageFolder(str(tmp_path), str(root)).load().digest == wanted


def test_folders_without_pictures_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("benign", "malign"):
        colored(tmp_path / "set" / name / "0.png", 10)
    (tmp_path / "set" / "normal").mkdir()
    assert ImageFolder(str(tmp_path), str(tmp_path / "set")).load().class_names == ["benign", "malign"]
    assert "folders without pictures, which are not classes: normal" in caplog.text


def test_files_of_questions_leave_out_what_is_hidden(tmp_path: Path) -> None:
    for name in (".ipynb_checkpoints/test.json", "test.json", "__MACOSX/._test.json", "a/._b.png", "a/b.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("[]")
    assert Files(tmp_path, "x", "y").names == ["a/b.png", "test.json"]


def test_a_name_in_dataset_classes_twice_is_refused(tmp_path: Path) -> None:
    for key in ("classes", "silos"):
        with pytest.raises(ConfigError, match=f"dataset.{key} must be distinct, but a occurs twice in a, b, a: rename"):
            ImageTable(str(tmp_path), "x.csv", **{key: ["a", "b", "a"]})
    np.savez(tmp_path / "a.npz", X=np.zeros((4, 2)), y=np.arange(4) % 2, classes=np.array(["a", "a"]))
    with pytest.raises(ConfigError, match="the class names must be distinct, but a occurs twice"):
        Npz(str(tmp_path), str(tmp_path / "a.npz")).load()
