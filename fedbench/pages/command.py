"""``python -m fedbench pages``: pages of results from run folders, and README.md and figures from a page's files."""

from __future__ import annotations

import argparse
from pathlib import Path

from fedbench.core.command import Arguments, add_config_dir, arguments, command
from fedbench.core.files import typed_path
from fedbench.core.options import ConfigError, require
from fedbench.report import scores

try:
    from fedbench.pages import build, collect
except ModuleNotFoundError as error:
    if error.name != "pandas":
        raise
    raise ConfigError("pages need pandas: pip install 'fedbench-pfl[report]'") from error

EXAMPLES = """examples:
  python -m fedbench pages write results/default sweeps/default
  python -m fedbench pages write results/ablations shots=sweeps/shots lambda=sweeps/lambda
  python -m fedbench pages write results/cifar sweeps/cifar --paper pgfed_table1_cifar
  python -m fedbench pages build
  python -m fedbench pages build results/default --check
"""


def parser() -> Arguments:
    """Return the parser of the command line."""
    p = arguments(
        "pages",
        "Write pages of results: their data from run folders; text, tables and figures from the data.",
        EXAMPLES,
    )
    commands = p.add_subparsers(dest="command", required=True)
    w = commands.add_parser("write", help="collect run folders into the data files of a page")
    w.add_argument(
        "page", type=typed_path, help="the page's folder; what it says already (title, tables, texts) is kept"
    )
    w.add_argument("folders", nargs="+", help="folders with runs in or below them, or PART=FOLDER: the rows of the "
                                              "parts that are given are replaced, all others stay")  # fmt: skip
    w.add_argument("--title", help="of the page (default: its folder's name)")
    w.add_argument("--metric", help="a column of metrics.csv (default: the page's, or the score that the runs went by)")
    w.add_argument("--select", choices=scores.SELECTIONS, help="the round of worst tenth and global (default: last)")
    w.add_argument("--target", type=float, help="value to reach (default: 0.7)")
    w.add_argument("--group", help="config keys to group by, with commas (default: everything but the seed)")
    w.add_argument("--paper", action="append", metavar="TABLE", help="a printed table that the runs answer")
    add_config_dir(w)
    b = commands.add_parser("build", help="write README.md and the figures of pages, or check that they are so")
    b.add_argument(
        "pages", nargs="*", type=typed_path, help="folders of pages (default: all of results, and its README.md)"
    )
    b.add_argument("--check", action="store_true", help="write nothing; status 1 and the differences, if there are any")
    return p


@command
def main(argv: list[str]) -> int:
    """Run the command line and return the exit status: 1 after a difference."""
    args = parser().parse_args(argv)
    return write(args) if args.command == "write" else check(args) if args.check else make(args)


def write(args: argparse.Namespace) -> int:
    """Write a page's data files from run folders, and then its README.md."""
    asked = {key: getattr(args, key) for key in ("title", "metric", "select", "target", "group", "paper")}
    asked = {key: value for key, value in asked.items() if value is not None}
    for path in [*collect.write(args.page, args.folders, asked, args.config_dir), *build.write(build.make(args.page))]:
        print(path)
    return 0


def wanted(args: argparse.Namespace) -> list[build.Built]:
    """Return the pages that are named, or all of results and its index."""
    if args.pages:
        return [build.make(path) for path in args.pages]
    root = Path("results")
    found = build.find_pages(root)
    require(bool(found), "there is no page in results: name a folder, or go to the repository's root")
    return [build.make(path) for path in [*found, *([root] if (root / "page.md").is_file() else [])]]


def make(args: argparse.Namespace) -> int:
    """Write README.md and figures."""
    for built in wanted(args):
        for path in build.write(built):
            print(f"written: {path}")
    return 0


def check(args: argparse.Namespace) -> int:
    """Print the differences between pages and their files."""
    found = [line for built in wanted(args) for line in build.differences(built)]
    for line in found:
        print(line)
    return 1 if found else 0
