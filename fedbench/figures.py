"""``python -m fedbench.figures`` (fedbench/report/method_command.py)."""

from fedbench.report.method_command import main

__all__ = ["main"]

if __name__ == "__main__":
    raise SystemExit(main())
