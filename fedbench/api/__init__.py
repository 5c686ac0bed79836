"""Runs from Python and from notebooks: `fedbench.run`, `fedbench.sweep`, `fedbench.load` (docs/notebooks.md)."""
