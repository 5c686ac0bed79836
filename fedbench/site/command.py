"""``python -m fedbench site``: documentation and results as static HTML, which needs no network."""

from __future__ import annotations

import sys
from pathlib import Path

from fedbench.core.command import arguments, command
from fedbench.core.files import typed_path
from fedbench.site.build import build, faults


@command
def main(argv: list[str]) -> int:
    """Run the command line and return the exit status: 1 after a broken link."""
    parser = arguments("site", "Write documentation and results as static HTML, which needs no network.")
    parser.add_argument("--out", type=typed_path, default=Path("site"), help="folder to write into (default: site)")
    args = parser.parse_args(argv)
    count = build(args.out)
    broken = faults(args.out)
    for fault in broken:
        print(f"broken link: {fault}", file=sys.stderr)
    print(f"{count} pages: {args.out / 'index.html'}")
    return 1 if broken else 0
