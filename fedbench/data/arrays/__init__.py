"""Data sets from files of arrays."""
