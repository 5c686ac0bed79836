"""Run experiments from Python and notebooks: `fedbench.run`, `fedbench.sweep`, `fedbench.load` (docs/notebooks.md)."""
