"""``python -m fedbench.fid`` (fedbench/tools/fid.py)."""

from fedbench.tools.fid import main

__all__ = ["main"]

if __name__ == "__main__":
    raise SystemExit(main())
