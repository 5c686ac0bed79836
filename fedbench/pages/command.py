"""``python -m fedbench pages``: collect runs into pages of results, and generate README.md and figures."""

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
    """Return the parser of the arguments of ``fedbench pages``."""
    p = arguments(
        "pages",
        "Write pages of results: their data from run folders; text, tables and figures from the data.",
        EXAMPLES,
    )
    commands = p.add_subparsers(dest="command", required=True)
    write_parser = commands.add_parser("write", help="collect run folders into the data files of a page")
    write_parser.add_argument(
        "page", type=typed_path, help="the folder of the page; its title, tables and texts are kept"
    )
    write_parser.add_argument(
        "folders",
        nargs="+",
        help="folders with runs in or below them, or PART=FOLDER to replace the rows of a part; other parts are kept",
    )
    write_parser.add_argument("--title", help="the title of the page (default: the name of its folder)")
    write_parser.add_argument(
        "--metric", help="a column of metrics.csv (default: the page's, or the primary metric of the runs)"
    )
    write_parser.add_argument(
        "--select",
        choices=scores.SELECTIONS,
        help="the round whose score sorts the rows, and at which worst tenth and global are taken (default: last)",
    )
    write_parser.add_argument(
        "--target", type=float, help="value of the metric for rounds and time to reach it (default: 0.7)"
    )
    write_parser.add_argument(
        "--group", help="config keys to group by, separated by commas (default: all but the seed)"
    )
    write_parser.add_argument(
        "--paper", action="append", metavar="TABLE", help="a printed table whose cells the runs reproduce"
    )
    add_config_dir(write_parser)
    build_parser = commands.add_parser("build", help="write README.md and the figures of pages, or compare them")
    build_parser.add_argument(
        "pages", nargs="*", type=typed_path, help="folders of pages (default: those in results, and its README.md)"
    )
    build_parser.add_argument(
        "--check", action="store_true", help="write nothing; print differences, and exit with 1 if any"
    )
    return p


@command
def main(argv: list[str]) -> int:
    """Run ``fedbench pages`` with the words typed after it, and return the exit status.

    It is 0, but 1 if ``--check`` finds a difference, and 2 after a mistake of the user.
    """
    args = parser().parse_args(argv)
    if args.command == "write":
        return write(args)
    root = Path("results")
    folders = args.pages or build.find_pages(root)
    require(bool(folders), "there is no page in results: name a folder, or run the command in the repository's root")
    if not args.pages and (root / "page.md").is_file():  # the index of all pages
        folders.append(root)
    built = [build.build_page(folder) for folder in folders]
    if args.check:
        lines = [line for page in built for line in build.differences(page)]
    else:
        lines = [f"written: {path}" for page in built for path in build.write(page)]
    for line in lines:
        print(line)
    return 1 if args.check and lines else 0


def write(args: argparse.Namespace) -> int:
    """Run ``fedbench pages write``: write the data files of a page, then its README.md and figures.

    Args:
        args: The parsed arguments.

    Returns:
        The exit status, 0.
    """
    about = {key: getattr(args, key) for key in ("title", "metric", "select", "target", "group", "paper")}
    about = {key: value for key, value in about.items() if value is not None}
    written = collect.write(args.page, args.folders, about, args.config_dir)
    for path in [*written, *build.write(build.build_page(args.page))]:
        print(path)
    return 0
