"""Partitions: one file per way to split a data set over clients, named by a partition's ``_target_``."""
