"""Large temporary files go to a disk, not to a folder that is kept in memory."""

from pathlib import Path

import pytest

from fedbench.core.memory import is_in_memory, scratch_folder
from fedbench.core.rows import disk_space


def test_a_temporary_folder_in_memory_is_no_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    mounts = "/dev/vda / ext4 rw 0 0\ntmpfs /tmp tmpfs rw 0 0\ntmpfs /dev/shm tmpfs rw 0 0\n"
    read = Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda p, **kw: mounts if str(p) == "/proc/mounts" else read(p, **kw))
    assert is_in_memory(Path("/tmp/a")) and is_in_memory(Path("/dev/shm")) and not is_in_memory(Path("/var/tmp"))
    monkeypatch.setattr("tempfile.tempdir", "/dev/shm")
    assert scratch_folder() == Path("/var/tmp")
    monkeypatch.setattr("tempfile.tempdir", "/srv")
    assert scratch_folder() == Path("/srv") and not is_in_memory(scratch_folder())
    mounts += "tmpfs /var/tmp tmpfs rw 0 0\n"
    monkeypatch.setattr("tempfile.tempdir", "/tmp")
    assert scratch_folder() == Path("/tmp") and disk_space() == 0
