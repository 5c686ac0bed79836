"""Helpers for subcommands: argument parsing, error messages and exit statuses."""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable
from typing import NoReturn

from fedbench.core.broken_pipe import survive_broken_pipe
from fedbench.core.files import typed_path
from fedbench.core.json_output import JSON_FLAG, print_error
from fedbench.core.options import ConfigError, refused


def command(main: Callable[[list[str]], int]) -> Callable[..., int]:
    """Turn a function into the entry point of a subcommand.

    The entry point takes the arguments of the command (default: sys.argv) and returns the exit status.  After a mistake
    of the user, it prints one sentence on standard error and returns 2.  After Ctrl-C, it returns 130.  With ``--json``
    it also prints the mistake as JSON.

    Args:
        main: A function from arguments to an exit status.
    """

    @functools.wraps(main)
    def entry(argv: list[str] | None = None) -> int:
        """Call `main`, the function of the subcommand, and report mistakes of the user.

        Args:
            argv: The arguments after the name of the program.  None: those of this process, sys.argv[1:].

        Returns:
            The exit status: that of `main`, 2 after a mistake of the user, 130 after Ctrl-C.
        """
        typed = list(sys.argv[1:] if argv is None else argv)
        with survive_broken_pipe():
            try:
                return main(typed)
            except (ConfigError, OSError) as mistake:
                # refused: the file and the system's message
                sentence = refused(mistake) if isinstance(mistake, OSError) else str(mistake)
                print(f"fedbench: {sentence}", file=sys.stderr)
                if JSON_FLAG in typed:
                    print_error(mistake, sentence, exit_code=2)
                return 2
            except KeyboardInterrupt as interrupt:
                if JSON_FLAG in typed:
                    print_error(interrupt, str(interrupt) or "interrupted", exit_code=130)
                return 130

    return entry


class Arguments(argparse.ArgumentParser):
    """An ArgumentParser that raises ConfigError for a mistake."""

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError with the parser's message about the arguments, instead of ending the process."""
        raise ConfigError(f"{message} (see {self.prog} --help)")


def arguments(name: str, description: str, examples: str = "") -> Arguments:
    """Return the argument parser of a subcommand, ``python -m fedbench <name>``.

    Args:
        name: The name of the subcommand.
        description: The first lines of its help.
        examples: The last lines of its help.
    """
    return Arguments(
        prog=f"python -m fedbench {name}",
        description=description,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add the flag ``--json``, with which a command prints one JSON object instead of text."""
    parser.add_argument(JSON_FLAG, action="store_true", help="print one JSON object, for programs (docs/json.md)")


def add_config_dir(parser: argparse.ArgumentParser) -> None:
    """Add the flag ``--config-dir FOLDER`` to a parser: the user's folder with YAML files of options.

    The parsed value ``config_dir`` is a path as str, None without the flag.
    """
    parser.add_argument("--config-dir", type=_folder, metavar="FOLDER", help="folder with your own options")


def _folder(text: str) -> str:
    """Return the path given to ``--config-dir`` with ``~`` expanded; raise ArgumentTypeError if it is not a folder."""
    path = typed_path(text)
    if not text or not path.is_dir():
        raise argparse.ArgumentTypeError(f"no such folder: {text!r}")
    return str(path)
