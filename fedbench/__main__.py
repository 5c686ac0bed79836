"""``python -m fedbench`` (fedbench/commands.py)."""

from fedbench.commands import main

if __name__ == "__main__":
    raise SystemExit(main())
