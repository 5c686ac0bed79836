"""Data sources: one file per source, each a class with ``load() -> Arrays`` named by a dataset's ``_target_``."""
