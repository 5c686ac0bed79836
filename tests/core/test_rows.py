"""Per-client state: lazy, the same wherever it lives, saved whole."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import CPU, equal

from fedbench.core.options import ConfigError
from fedbench.core.rows import Rows, RowStore

LOCATIONS = ("device", "host", "disk")
DEFAULT = torch.tensor([1.0, 2.0, 3.0])


def ids(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64)


def rows(location: str = "device", num_clients: int = 50) -> Rows:
    return Rows("x", num_clients, DEFAULT, CPU, location)


@pytest.mark.parametrize("location", LOCATIONS)
def test_untouched_rows_are_the_default_and_written_ones_stay(location: str) -> None:
    r = rows(location)
    equal(r[ids(3, 49)], DEFAULT.expand(2, -1))
    r[ids(7, 2)] = torch.tensor([[7.0, 0, 0], [2.0, 0, 0]])
    equal(r[ids(2, 3, 7)], torch.stack([torch.tensor([2.0, 0, 0]), DEFAULT, torch.tensor([7.0, 0, 0])]))
    equal(r[ids(7, 2)][:, 0], torch.tensor([7.0, 2.0]))
    assert r.has(ids(2, 3, 7)).tolist() == [True, False, True] and r.touched().tolist() == [2, 7]
    r[ids(2)] = torch.zeros(1, 3)
    assert r.used == 2
    equal(r[ids(2)], torch.zeros(1, 3))


@pytest.mark.parametrize("location", LOCATIONS)
def test_growing_keeps_what_was_written(location: str) -> None:
    r, expected = rows(location), torch.full((50, 3), float("nan"))
    expected[:] = DEFAULT
    random = np.random.default_rng(0)
    for step in range(20):
        some = random.choice(50, 4, replace=False)
        values = torch.full((4, 3), float(step))
        r[some], expected[torch.from_numpy(some)] = values, values
        equal(r[np.arange(50)], expected)
    assert r.used <= len(r.store) <= 50


def test_what_is_read_is_a_copy() -> None:
    r = rows()
    r[ids(1)] = torch.ones(1, 3)
    r[ids(1)].zero_()
    r[ids(1, 2)].zero_()
    r[ids(2)].zero_()
    equal(r[ids(1, 2)], torch.stack([torch.ones(3), DEFAULT]))
    start = torch.ones(1, 3)
    r[ids(4)] = start
    start.zero_()
    equal(r[ids(4)], torch.ones(1, 3))


def test_the_default_is_a_copy_too() -> None:
    default = torch.ones(3)
    r = Rows("x", 5, default, CPU)
    default.zero_()
    equal(r[ids(0)], torch.ones(1, 3))


def test_one_value_for_many_clients() -> None:
    r = rows()
    r[ids(4, 5)] = torch.zeros(3)
    equal(r[ids(4, 5)], torch.zeros(2, 3))


@pytest.mark.parametrize("default", [torch.tensor(0.0), torch.zeros(2, 3), torch.zeros(4, dtype=torch.int64)])
@pytest.mark.parametrize("location", LOCATIONS)
def test_any_shape_and_type(default: torch.Tensor, location: str) -> None:
    r = Rows("x", 6, default, CPU, location)
    assert r[ids(0, 1)].shape == (2, *default.shape) and r[ids(0)].dtype == default.dtype
    r[ids(1)] = torch.ones_like(default)[None]
    equal(r[ids(1, 0)], torch.stack([torch.ones_like(default), default]))


@pytest.mark.parametrize("location", LOCATIONS)
def test_rows_without_numbers_live_anywhere(location: str) -> None:
    r = Rows("x", 9, torch.empty(0), CPU, location)
    r[ids(4, 2)] = torch.empty(2, 0)
    assert r[ids(2, 3)].shape == (2, 0) and r.touched().tolist() == [2, 4]


def test_no_ids() -> None:
    r = rows()
    assert r[ids()].shape == (0, 3)
    r[ids()] = torch.zeros(0, 3)
    assert r.used == 0


@pytest.mark.parametrize("before", LOCATIONS)
@pytest.mark.parametrize("after", LOCATIONS)
def test_state_survives_a_change_of_place(before: str, after: str) -> None:
    old, new = rows(before), rows(after)
    old[ids(9, 3, 30)] = torch.arange(9.0).view(3, 3)
    new[ids(0, 1)] = torch.zeros(2, 3)  # forgotten by the load
    new.load_state_dict(old.state_dict())
    equal(new[np.arange(50)], old[np.arange(50)])
    assert new.touched().tolist() == [3, 9, 30]
    new[ids(3)] = torch.zeros(1, 3)
    assert old[ids(3)].sum() > 0


@pytest.mark.parametrize("location", LOCATIONS)
@pytest.mark.parametrize("default", [DEFAULT, torch.tensor(2.0), torch.zeros(2, 2, dtype=torch.int64)])
def test_saving_takes_neither_memory_nor_what_was_not_written(
    location: str, default: torch.Tensor, tmp_path: Path
) -> None:
    """The state shows the store itself, and a file of it has no more than the rows that were written."""
    r = Rows("x", 5000, default, CPU, location)
    r[ids(30, 3)] = torch.stack([default, default + 1])
    state = r.state_dict()
    assert state["rows"].data_ptr() == r.store.data_ptr() and state["ids"].tolist() == [30, 3]
    torch.save(state, tmp_path / "state")
    assert (tmp_path / "state").stat().st_size < 4000
    new = Rows("x", 5000, default, CPU, location)
    new.load_state_dict(torch.load(tmp_path / "state", mmap=True))
    new[ids(30)] = default[None] + 5
    equal(r[ids(30, 3, 4)], torch.stack([default, default + 1, default]))
    equal(new[ids(30, 3, 4)], torch.stack([default + 5, default + 1, default]))


def test_a_checkpoint_is_read_a_piece_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedbench.core.rows.BLOCK", 2 * 12)  # two rows
    old, new = rows(), rows()
    old[ids(*range(7))] = torch.arange(21.0).view(7, 3)
    new.load_state_dict(old.state_dict())
    equal(new.whole(), old.whole())
    assert new.used == 7


def test_an_untouched_store_is_saved_and_loaded() -> None:
    new = rows()
    new.load_state_dict(rows().state_dict())
    equal(new[ids(0)], DEFAULT[None])


def test_a_million_clients_cost_what_is_written() -> None:
    r = Rows("x", 1_000_000, torch.zeros(1000), CPU)
    r[ids(5, 999_999)] = torch.ones(2, 1000)
    assert r.store.numel() <= 8 * 1000
    assert r[ids(999_999, 17)].sum() == 1000


def test_disk_files_are_gone_when_the_store_is(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mapping keeps a file alive whose name is already removed: a crash leaves nothing behind."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    r = rows("disk")
    r[ids(1)] = torch.ones(1, 3)
    assert os.listdir(tmp_path) == []
    equal(r[ids(1)], torch.ones(1, 3))


def test_the_place_follows_the_full_size() -> None:
    """50 clients x 3 float32 = 600 bytes."""
    for device, host, location in [(600, 0, "device"), (599, 600, "host"), (599, 599, "disk")]:
        store = RowStore(50, CPU, device, host)
        assert store("x", DEFAULT).location == location
        assert location in store.plan()[0] and "50 x 3 numbers" in store.plan()[0]


def test_stores_share_the_limits() -> None:
    store = RowStore(50, CPU, 1300, 700)
    assert [store(name, DEFAULT).location for name in "abcd"] == ["device", "device", "host", "disk"]


def test_rows_that_are_no_clients() -> None:
    """3 clusters among 50 clients of whom 5 are ever drawn: all 3 rows count, and can be written."""
    store = RowStore(50, CPU, 36, 0, most=5)
    r = store("clusters", DEFAULT, count=3)
    assert r.location == "device" and store.plan() == ["clusters: 3 x 3 numbers, 0.0 MiB at most, device"]
    r[ids(2)] = torch.ones(1, 3)
    assert r.whole().shape == (3, 3)
    with pytest.raises(ConfigError, match="9 x 3 numbers"):
        RowStore(50, CPU, 0, 0, disk_limit=9)("clusters", DEFAULT, count=9)


def test_what_a_round_made_is_there_again_after_a_resume() -> None:
    """Whatever it is called, once it is asked for; until then it is kept, and saved again."""
    first = RowStore(50, CPU, 1 << 20, 0)
    first("theta", DEFAULT)
    first.setting_up = False
    first("memory/up", DEFAULT)[ids(7)] = torch.ones(1, 3)
    assert first.late == {"memory/up"}
    second = RowStore(50, CPU, 1 << 20, 0)
    second("theta", DEFAULT)
    second.setting_up = False
    second.load_state_dict(first.state_dict(), first.late)
    equal(second.state_dict()["memory/up"]["rows"], torch.ones(1, 3))
    equal(second("memory/up", DEFAULT)[ids(6, 7)], torch.stack([DEFAULT, torch.ones(3)]))
    assert second.late == {"memory/up"} and second.state_dict().keys() == {"theta", "memory/up"}
    third = RowStore(50, CPU, 1 << 20, 0)
    third("theta", DEFAULT)
    with pytest.raises(ValueError, match="the checkpoint has the state memory/up, which the method does not create"):
        third.load_state_dict(first.state_dict())


def test_a_count_that_was_kept_once_a_row_stands_for_all_parameters() -> None:
    old, new = Rows("count", 5, torch.zeros(1), CPU), Rows("count", 5, torch.zeros(4), CPU)
    old[ids(3)] = torch.tensor([[7.0]])
    new.load_state_dict(old.state_dict())
    equal(new[ids(3, 0)], torch.tensor([[7.0] * 4, [0.0] * 4]))


def test_no_more_rows_count_than_the_rounds_can_write() -> None:
    """5 of 50 clients: 60 bytes.  A method that writes everybody's rows nevertheless can."""
    store = RowStore(50, CPU, 60, 0, most=5)
    r = store("x", DEFAULT)
    assert r.location == "device" and store.plan() == ["x: 5 of 50 x 3 numbers, 0.0 MiB at most, device"]
    for location in LOCATIONS:
        r = Rows("x", 50, DEFAULT, CPU, location, most=5)
        for i in range(50):
            r[ids(i)] = torch.full((1, 3), float(i))
        equal(r.whole(), torch.arange(50.0)[:, None].expand(-1, 3))


@pytest.mark.parametrize("location", ["disk", "host"])
def test_a_big_store_has_room_for_what_the_rounds_can_write_and_no_more(
    location: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All the rows that are expected at once, where the first write is of all of them, too."""
    monkeypatch.setattr("fedbench.core.rows.BIG", 0)
    for first in (1, 4, 5):
        r = Rows("x", 50, DEFAULT, CPU, location, most=5)
        r[ids(*range(first))] = torch.zeros(first, 3)
        assert len(r.store) == 5
    r[ids(40)] = torch.ones(1, 3)  # one more than expected
    assert 6 <= len(r.store) <= 50
    equal(r[ids(0, 40, 41)], torch.stack([torch.zeros(3), torch.ones(3), DEFAULT]))


def test_a_store_that_grows_big_has_room_for_what_the_rounds_can_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """Doubling 12 rows would leave 4 of 24 unused."""
    monkeypatch.setattr("fedbench.core.rows.BIG", 20 * 12)
    r = Rows("x", 50, DEFAULT, CPU, most=20)
    r[ids(*range(12))] = torch.zeros(12, 3)
    r[ids(*range(20))] = torch.ones(20, 3)
    assert len(r.store) == 20


def test_what_fits_nowhere_is_refused_in_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """An N x N method of a million clients: before round 1, not when the disk is full."""
    monkeypatch.setattr("fedbench.core.rows.disk_space", lambda: 100 << 30)
    store = RowStore(1_000_000, CPU, 10 << 30, 0, most=50_000)
    with pytest.raises(
        ConfigError,
        match=r"'A' may need 186.3 GiB \(50,000 of 1,000,000 x 1,000,000 numbers\).*"
        r"has 100.0 GiB left; lower partition.num_clients",
    ):
        store("A", torch.zeros(1_000_000))
    assert store("theta", torch.zeros(1000)).location == "device"


@pytest.mark.gpu
@pytest.mark.parametrize("location", LOCATIONS)
def test_rows_of_a_gpu_wherever_they_live(location: str) -> None:
    """Host memory is reached through page-locked memory, kept from one call to the next."""
    cuda = torch.device("cuda")
    r = Rows("x", 50, DEFAULT.to(cuda), cuda, location)
    for some in (ids(3, 40), ids(7), ids(3, 8, 40, 9), ids()):
        r[some] = torch.full((len(some), 3), float(len(some)), device=cuda)
    four = torch.full((3,), 4.0)
    equal(r[ids(40, 7, 5, 9)].cpu(), torch.stack([four, torch.ones(3), DEFAULT, four]))
    assert r[ids()].shape == (0, 3) and r[ids(1)].device.type == "cuda"
    new = Rows("x", 50, DEFAULT.to(cuda), cuda, location)
    new.load_state_dict(r.state_dict())
    equal(new.whole(), r.whole())


@pytest.mark.parametrize("location", LOCATIONS)
def test_big_stores_get_their_room_at_once(location: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Growing would copy them; room that nobody writes to costs nothing."""
    monkeypatch.setattr("fedbench.core.rows.BIG", 12 * 16)
    r = Rows("x", 1000, DEFAULT, CPU, location, most=400)
    sizes = []
    for i in range(40):
        r[ids(i)] = torch.full((1, 3), float(i))
        sizes.append(len(r.store))
    assert sorted(set(sizes)) == ([400] if location == "disk" else [8, 16, 400])
    equal(r[np.arange(40)], torch.arange(40.0)[:, None].expand(-1, 3))


def test_the_store_saves_every_row() -> None:
    def make() -> RowStore:
        store = RowStore(50, CPU, 1 << 20, 1 << 20)
        store("x", DEFAULT), store("y", torch.zeros(2))
        return store

    old, new = make(), make()
    old.all["x"][ids(3)] = torch.zeros(1, 3)
    old.all["y"][ids(4)] = torch.ones(1, 2)
    new.load_state_dict(old.state_dict())
    for name in ("x", "y"):
        equal(new.all[name][np.arange(50)], old.all[name][np.arange(50)])


def test_a_name_is_given_once() -> None:
    """Two states of one name would share an entry in checkpoints."""
    store = RowStore(5, CPU, 1 << 20, 1 << 20)
    store("theta", DEFAULT)
    with pytest.raises(ValueError, match=r"rows\('theta'\) is called twice"):
        store("theta", DEFAULT)
