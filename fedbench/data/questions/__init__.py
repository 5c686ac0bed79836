"""Data sets of questions about pictures."""
