"""Data sets of tables."""
