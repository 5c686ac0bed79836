"""``python -m fedbench.export``, and the functions that notebooks import from here (fedbench/tools/export.py)."""

from fedbench.tools.export import client_state, main, open_run

__all__ = ["client_state", "main", "open_run"]

if __name__ == "__main__":
    raise SystemExit(main())
