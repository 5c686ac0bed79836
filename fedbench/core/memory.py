"""The memory of this machine."""

import os


def physical_memory() -> int:
    """Return the bytes of memory of this machine, and 16 GB where the system does not say."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 16 << 30
