"""``python -m fedbench.export``: the former name of ``python -m fedbench export``, accepted for one release."""

import sys

from fedbench.tools.export_command import main

if __name__ == "__main__":
    print("python -m fedbench.export is now called python -m fedbench export", file=sys.stderr)
    raise SystemExit(main())
