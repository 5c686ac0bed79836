"""The reader of pickles: it builds arrays and plain values, refuses everything else, and never crashes."""

from __future__ import annotations

import pickle
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedbench.core.options import ConfigError
from fedbench.data._pickled import NotPlainError, read_object, read_plain

X = np.arange(12, dtype=np.float32).reshape(3, 4)


class Calls:
    """Pickles as a call of a function with arguments, and a state for its result."""

    def __init__(self, *call: Any):
        self.call = call

    def __reduce__(self) -> Any:
        return self.call


FROM_BUFFER = X.__reduce_ex__(5)[0]  # type: ignore[misc]
EMPTY = X.__reduce__()[0]  # type: ignore[misc]


def objects(*values: object) -> np.ndarray:
    array = np.empty(len(values), object)
    array[:] = values
    return array


@pytest.mark.parametrize("protocol", range(6))
def test_arrays_and_plain_values_are_read(protocol: int) -> None:
    value = {
        "x": X,
        "turned": np.asfortranarray(X),
        "big_endian": X.astype(">f8"),
        "text": np.array(["a", "bc"]),
        "bytes": np.array([b"a", b"bc"]),
        "none": np.empty((0, 3)),
        "flags": np.array([True, False]),
        "numbers": [1, 2.5, np.int64(3), np.float32(4)],
        "nested": ({"a": [X[:1]]}, None, b"raw"),
    }
    found = read_plain(pickle.dumps(value, protocol))
    for key in ("x", "turned", "big_endian", "text", "bytes", "none", "flags"):
        np.testing.assert_array_equal(found[key], value[key])
        assert found[key].dtype == value[key].dtype, key
    assert found["numbers"] == [1, 2.5, 3, 4] and found["nested"][1:] == (None, b"raw")
    np.testing.assert_array_equal(found["nested"][0]["a"][0], X[:1])


def test_arrays_of_objects_become_lists() -> None:
    assert read_plain(pickle.dumps(objects("a", 1, None))) == ["a", 1, None]
    assert read_plain(pickle.dumps(np.array([["a", 1], ["b", 2]], dtype=object))) == [["a", 1], ["b", 2]]
    single = np.empty((), object)
    single[()] = {"y": X}
    np.testing.assert_array_equal(read_plain(pickle.dumps(single))["y"], X)


def test_strings_of_python_2_are_read() -> None:
    """Opcodes U and T, of protocol 2: {'data': b'\\xff\\x00' as uint8, 'labels': [3]}."""
    reconstruct = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(I0\ntU\x01btR"
    dtype = b"cnumpy\ndtype\n(U\x02u1I0\nI1\ntR(I3\nU\x01|NNNI-1\nI-1\nI0\ntb"
    content = (
        b"\x80\x02}(U\x04data" + reconstruct + b"(I1\n(I2\nt" + dtype + b"I00\nU\x02\xff\x00tbU\x06labels](I3\neu."
    )
    found = read_plain(content)
    assert found["data"].tolist() == [255, 0] and found["data"].dtype == np.uint8 and found["labels"] == [3]


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (Calls(eval, ("1/0",)), r"builtin(s|__)\.eval"),
        (Calls(FROM_BUFFER, (X, np.dtype("u1"), (48,), "C")), "arrays from a ndarray"),
        (Calls(FROM_BUFFER, (objects("a"), np.dtype("u8"), (1,), "C")), "arrays from a list"),
        (Calls(FROM_BUFFER, (bytes(8), np.dtype("O"), (1,), "C")), "a dtype O8"),
        (Calls(FROM_BUFFER, (bytes(8), np.dtype([("a", "f8")]), (1,), "C")), "a dtype V8"),
        (Calls(EMPTY, (np.ndarray, (0,), b"b"), (1, (1,), np.dtype("O"), False, bytes(8))), "a dtype O8"),
        (Calls(EMPTY, (np.ndarray, (0,), b"b"), (1, (-1,), np.dtype("f8"), False, b"")), r"arrays of shape \(-1,\)"),
        (Calls(np.ndarray, ((2,), np.dtype("f8"))), "numpy.ndarray of 2 arguments"),
        (np.ndarray, "numpy.ndarray"),
    ],
)
def test_what_could_touch_memory_or_run_code_is_refused(value: Any, named: str) -> None:
    for protocol in (2, 5):
        with pytest.raises(NotPlainError, match=named):
            read_plain(pickle.dumps(value, protocol))


def test_items_cannot_be_written_into_arrays() -> None:
    """[array over the pointers of another][0] = 1 was a segmentation fault once the array was read."""
    array = pickle.dumps(X, 5)[:-1]
    for content in (array + b"I0\nI1\ns.", array + b"(I0\nI1\nu.", array + b"I1\na."):
        with pytest.raises((TypeError, AttributeError)):
            read_plain(content)


def test_a_state_changes_no_builder() -> None:
    content = b"cnumpy._core.multiarray\n_reconstruct\n}U\x01aI1\nsb."
    with pytest.raises(NotPlainError, match="a state of numpy"):
        read_plain(content)
    assert read_plain(pickle.dumps(X)).tolist() == X.tolist()


def test_a_short_pickle_makes_no_huge_value() -> None:
    nested: list[Any] = [0]
    for _ in range(60):
        nested = [nested, nested]
    cycle: list[Any] = []
    cycle.append(cycle)
    with pytest.raises(ValueError, match="repeats its lists"):
        read_plain(pickle.dumps(nested))
    with pytest.raises(RecursionError):
        read_plain(pickle.dumps(cycle))
    with pytest.raises(ValueError, match="memo index"):
        read_plain(b"\x80\x04]r\xff\xff\xff\x7f.")
    same = read_plain(pickle.dumps([np.zeros(10_000)] * 1_000))
    assert len(same) == 1_000 and same[0] is same[999]


def test_what_unpacks_to_more_than_the_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "0.npz"
    np.savez_compressed(path, data=np.array({"x": np.zeros(200_000)}, dtype=object))
    assert path.stat().st_size < 10_000
    monkeypatch.setattr("fedbench.data._files.physical_memory", lambda: 1_000_000)
    with pytest.raises(ConfigError, match=r"data of .*0\.npz unpacks to 0\.0 GB, more than the 0\.0 GB of memory"):
        read_object(path, "data", "dataset.path=a", "dataset.trust=a", trusted=False)


# --- damage -------------------------------------------------------------------------------------------------------


def seeds() -> list[bytes]:
    pfllib = np.empty((), object)
    pfllib[()] = {"x": X, "y": np.array([0, 1, 2])}
    lists = (objects("a.png", "b.png"), [np.str_("bike"), "mug"])
    values = (pfllib, lists, {"data_indices": [{"train": np.arange(3), "test": [3, 4]}]}, np.float64(1))
    return [pickle.dumps(value, protocol) for value in values for protocol in (0, 2, 4, 5)]


def mutated(content: bytes, rng: random.Random) -> bytes:
    """Change, remove, repeat or exchange a few bytes or stretches of a pickle."""
    data = bytearray(content)
    for _ in range(rng.randint(1, 4)):
        a, b = sorted(rng.randrange(len(data)) for _ in range(2))
        kind = rng.randrange(5)
        if kind == 0:
            data[a] = rng.randrange(256)
        elif kind == 1:
            data[a] = rng.choice(b"(.0123FGIJKLMNRSTUVXabcdeghijlopqrstu}])\x80\x81\x8a\x8c\x93\x94\x95\x96\x97\x98")
        elif kind == 2 and len(data) - (b - a) > 2:
            del data[a:b]
        elif kind == 3:
            data[a:a] = data[a:b][:64]
        else:
            data[a:b] = bytes(reversed(data[a:b])) if rng.random() < 0.2 else data[a:b]
            data[b : b + 1] = bytes([rng.randrange(256)])
    return bytes(data)


def read_mutations(count: int, seed: int) -> int:
    """Read mutated pickles and use what comes; return how many were refused."""
    rng, refused = random.Random(seed), 0
    for i in range(count):
        content = mutated(rng.choice(seeds()), rng)
        try:
            found = repr(read_plain(content))
        except MemoryError:
            raise AssertionError(f"mutation {i} of seed {seed} asked for too much memory: {content!r}") from None
        except Exception:
            refused += 1
        else:
            assert "Recorder" not in found and "_Call" not in found and "_Name" not in found, content
    return refused


def in_a_process(count: int, seed: int) -> None:
    """A crash would end this process, so that another one reads."""
    code = f"from test_pickled import read_mutations; print(read_mutations({count}, {seed}))"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-X", "faulthandler", "-c", code],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert 0.2 * count < int(done.stdout) < count  # neither all read nor all refused


def test_mutated_pickles_are_read_or_refused() -> None:
    in_a_process(500, 0)


@pytest.mark.slow
def test_ten_thousand_mutated_pickles_are_read_or_refused() -> None:
    in_a_process(10_000, 1)
