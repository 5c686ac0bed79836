"""``python -m fedbench.report``: the former name of ``python -m fedbench report``, for one release."""

import sys

from fedbench.report.command import main

if __name__ == "__main__":
    print("python -m fedbench.report is now called python -m fedbench report", file=sys.stderr)
    raise SystemExit(main())
