"""Data sources: one file each, a class with ``load() -> Arrays`` named by a dataset's ``_target_``."""
