"""What all commands share: how they parse their words, end after a mistake, and print."""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable
from typing import NoReturn

from fedbench.core.broken_pipe import survive_broken_pipe
from fedbench.core.files import typed_path
from fedbench.core.options import ConfigError, refused


def command(main: Callable[[list[str]], int]) -> Callable[..., int]:
    """Make a function an entry point: it takes the words of a command line and returns the exit status.

    The words default to the process's.  A mistake in them is one sentence on standard error and status 2; Ctrl-C is
    status 130.
    """

    @functools.wraps(main)
    def entry(argv: list[str] | None = None) -> int:
        with survive_broken_pipe():
            try:
                return main(list(sys.argv[1:] if argv is None else argv))
            except ConfigError as mistake:
                sentence = str(mistake)
            except OSError as error:
                sentence = refused(error)
            except KeyboardInterrupt:
                return 130
            print(f"fedbench: {sentence}", file=sys.stderr)
            return 2

    return entry


class Arguments(argparse.ArgumentParser):
    """An ArgumentParser that raises ConfigError for a mistake."""

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError, which `command` prints as one sentence."""
        raise ConfigError(f"{message} (see {self.prog} --help)")


def arguments(name: str, description: str, examples: str = "") -> Arguments:
    """Return the parser of ``python -m fedbench <name>``; examples follow the options in its help."""
    return Arguments(
        prog=f"python -m fedbench {name}",
        description=description,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def add_config_dir(parser: argparse.ArgumentParser) -> None:
    """Add ``--config-dir`` (None where it is not given)."""
    parser.add_argument("--config-dir", type=_folder, metavar="FOLDER", help="options of your own, as for a run")


def _folder(text: str) -> str:
    path = typed_path(text)
    if not text or not path.is_dir():
        raise argparse.ArgumentTypeError(f"no such folder: {text!r}")
    return str(path)
