"""``python -m fedbench.synthesize`` (fedbench/tools/synthesize.py)."""

from fedbench.tools.synthesize import main

__all__ = ["main"]

if __name__ == "__main__":
    raise SystemExit(main())
