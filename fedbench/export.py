"""``python -m fedbench.export``, and the functions that notebooks import from here (fedbench/tools/export.py)."""

from fedbench.tools.export import client_state, main, open_run, save_peft

__all__ = ["client_state", "main", "open_run", "save_peft"]

if __name__ == "__main__":
    raise SystemExit(main())
