"""Data sets of medical scans."""
