"""``python -m fedbench.partition`` (fedbench/tools/partitions.py)."""

from fedbench.tools.partitions import main

if __name__ == "__main__":
    raise SystemExit(main())
