"""The collector is paused until a run begins, and works again afterwards, whatever happens."""

import gc

import pytest

from fedbench import commands
from fedbench.core import gc_pause


@pytest.fixture(autouse=True)
def working():
    gc.enable()
    yield
    gc.enable()


def test_it_rests_until_it_is_woken() -> None:
    with gc_pause.paused():
        assert not gc.isenabled()
        gc_pause.resume()
        assert gc.isenabled()
        gc.disable()  # somebody else's doing is left alone
        gc_pause.resume()
        assert not gc.isenabled()


def test_it_works_again_after_a_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ZeroDivisionError), gc_pause.paused():
        raise ZeroDivisionError
    assert gc.isenabled()
    assert commands.main(["no_such_key=1"]) == 2
    assert gc.isenabled()


def test_what_did_not_work_before_does_not_work_after() -> None:
    gc.disable()
    with gc_pause.paused():
        gc_pause.resume()
    assert not gc.isenabled()


def test_a_run_begins_with_it(tmp_path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from fedbench.simulation import simulator

    found = []
    monkeypatch.setattr("fedbench.app.launch.ending", lambda *_: None)
    monkeypatch.setattr(simulator, "run", lambda *_: found.append(gc.isenabled()) or {})
    with gc_pause.paused():
        commands.main(["rounds=1", "tracking=disabled", "hardware=cpu", f"hydra.run.dir={tmp_path}/run"])
    assert found == [True]


def test_what_is_there_at_first_is_left_out_once() -> None:
    gc.unfreeze()
    with gc_pause.paused():
        gc_pause.resume()
    frozen = gc.get_freeze_count()
    kept = [[] for _ in range(1000)]
    with gc_pause.paused():
        gc_pause.resume()
    assert frozen > 1000 and gc.get_freeze_count() <= frozen and kept
    gc.unfreeze()
