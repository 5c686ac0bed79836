"""The physical memory of the machine, and a folder for large temporary files."""

import os
import tempfile
from pathlib import Path


def physical_memory() -> int:
    """Return the size of the machine's memory in bytes; 16 GiB if the system does not report it."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 16 << 30


def size_text(num_bytes: float) -> str:
    """Return a number of bytes as text in GiB, such as "1.5 GiB", or if it is below 0.1 GiB in KiB: "12.0 KiB"."""
    gib = num_bytes / 2**30
    return f"{gib:,.1f} GiB" if gib >= 0.1 else f"{num_bytes / 2**10:,.1f} KiB"


def scratch_folder() -> Path:
    """Return the folder for large temporary files.

    It is the folder of `tempfile`, which TMPDIR sets, or /var/tmp if that folder is in memory.
    """
    folder = Path(tempfile.gettempdir())
    on_disk = Path("/var/tmp")
    return on_disk if is_in_memory(folder) and on_disk.is_dir() and not is_in_memory(on_disk) else folder


def is_in_memory(folder: Path) -> bool:
    """Return whether a folder is on a file system that is kept in memory (tmpfs, ramfs); False if it is unknown."""
    try:
        mounts = Path("/proc/mounts").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    # a line of /proc/mounts begins with the device, the folder and the type of the file system
    type_of = {fields[1]: fields[2] for fields in map(str.split, mounts) if len(fields) > 2}
    folder = folder.resolve()
    nearest = next((type_of[str(parent)] for parent in (folder, *folder.parents) if str(parent) in type_of), "")
    return nearest in ("tmpfs", "ramfs")
