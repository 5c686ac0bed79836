"""``python -m fedbench.site``: the site as static HTML, which needs no network."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from fedbench.core.files import typed_path
from fedbench.core.options import ConfigError, refused
from fedbench.core.streams import lasting
from fedbench.site.build import build, faults


@lasting()
def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit status, 1 after a broken link or a mistake told in one sentence."""
    parser = argparse.ArgumentParser(prog="python -m fedbench.site", description=__doc__)
    parser.add_argument("--out", type=typed_path, default=Path("site"), help="folder to write into (default: site)")
    args = parser.parse_args(argv)
    try:
        count = build(args.out)
        broken = faults(args.out)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"error: {refused(error)}", file=sys.stderr)
        return 1
    for fault in broken:
        print(f"broken link: {fault}", file=sys.stderr)
    print(f"{count} pages: {args.out / 'index.html'}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
