"""The memory of this machine, and a folder for what does not fit in it."""

import os
import tempfile
from pathlib import Path


def physical_memory() -> int:
    """Return the bytes of memory of this machine, and 16 GB where the system does not say."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 16 << 30


def scratch_folder() -> Path:
    """Return the folder for large temporary files.

    It is that of `tempfile`, which TMPDIR sets.  Where that folder is kept in memory, it is /var/tmp.
    """
    folder = Path(tempfile.gettempdir())
    on_disk = Path("/var/tmp")
    return on_disk if is_in_memory(folder) and on_disk.is_dir() and not is_in_memory(on_disk) else folder


def is_in_memory(folder: Path) -> bool:
    """Return whether a folder is on a file system that Linux keeps in memory; False where that is unknown."""
    try:
        mounts = Path("/proc/mounts").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    kinds = {fields[1]: fields[2] for fields in map(str.split, mounts) if len(fields) > 2}
    folder = folder.resolve()
    nearest = next((kinds[str(parent)] for parent in (folder, *folder.parents) if str(parent) in kinds), "")
    return nearest in ("tmpfs", "ramfs")
