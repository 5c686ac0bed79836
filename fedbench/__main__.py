"""``python -m fedbench``, which calls fedbench/commands.py."""

from fedbench.commands import main

if __name__ == "__main__":
    raise SystemExit(main())
