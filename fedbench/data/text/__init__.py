"""Data sets of text."""
