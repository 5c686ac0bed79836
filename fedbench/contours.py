"""``python -m fedbench.contours`` (fedbench/tools/contours.py)."""

from fedbench.tools.contours import main

__all__ = ["main"]

if __name__ == "__main__":
    raise SystemExit(main())
