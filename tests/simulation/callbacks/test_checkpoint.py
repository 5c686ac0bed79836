"""A run saves as often as it is asked to, and with the states of its callbacks."""

from types import SimpleNamespace

import pytest

from fedbench.simulation.callbacks.checkpoint import Checkpoint


def test_when_to_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every n rounds; only at the end; or so that writing takes less than a twentieth of the time."""
    assert [d for d in range(1, 8) if Checkpoint(3).is_due(d, d == 7)] == [3, 6, 7]
    assert [d for d in range(1, 8) if Checkpoint(0).is_due(d, d == 7)] == [7]
    now, written = [0.0], []
    monkeypatch.setattr("fedbench.simulation.callbacks.checkpoint.time.monotonic", lambda: now[0])

    def save(run: SimpleNamespace) -> None:
        now[0] += 0.5
        written.append(run.done)

    callback = Checkpoint(None)
    monkeypatch.setattr(callback, "save", save)
    engine = SimpleNamespace(rows=SimpleNamespace(is_sharded=False))
    for done in range(1, 31):
        now[0] += 1.0  # a round
        callback.on_round_end(SimpleNamespace(done=done, is_last_round=done == 30, engine=engine), {})
    assert written == [1, 12, 23, 30]  # more than 20 x 0.5 s apart
