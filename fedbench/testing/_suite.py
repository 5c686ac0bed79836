"""Suites of checks, and their reports.

A check is a function of a case, written like a pytest test: it fails by ``assert`` and is skipped by
``unittest.SkipTest``.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Generic, Literal, TypeVar
from unittest import SkipTest

from fedbench.core.error_text import describe_error, is_raised_here
from fedbench.core.json_output import json_text
from fedbench.core.options import ConfigError, require

Status = Literal["passed", "failed", "skipped"]
Case = TypeVar("Case")
WIDTH = 100


@dataclass(frozen=True)
class Outcome:
    """The result of one check.

    Args:
        name: The name of the check.
        status: "passed", "failed" or "skipped".
        description: What the check tests.
        message: The cause and the remedy of a failure, or the reason for skipping.
    """

    name: str
    status: Status
    description: str
    message: str = ""


@dataclass(frozen=True)
class Report:
    """The results of all checks of a class.

    Args:
        kind: The kind of the class, such as "algorithm".
        target: Its dotted path, or its option.
        setting: The data and the models of the checks.
        outcomes: One result per check.
    """

    kind: str
    target: str
    setting: str
    outcomes: list[Outcome] = field(default_factory=list)

    def messages(self, status: Status) -> dict[str, str]:
        """Return a dict from the name of each check with this status, such as "failed", to its message."""
        return {outcome.name: outcome.message for outcome in self.outcomes if outcome.status == status}

    @property
    def passed(self) -> list[str]:
        """The names of the checks that passed."""
        return list(self.messages("passed"))

    @property
    def failed(self) -> dict[str, str]:
        """A dict from the name of each check that failed to its message."""
        return self.messages("failed")

    @property
    def skipped(self) -> dict[str, str]:
        """A dict from the name of each check that was skipped to the reason."""
        return self.messages("skipped")

    @property
    def ok(self) -> bool:
        """True if no check failed; skipped checks do not count."""
        return not self.failed

    def raise_if_failed(self) -> None:
        """Raise an AssertionError, whose message is the report, if at least one check failed."""
        if not self.ok:
            raise AssertionError(f"\n{self}")

    def as_json(self) -> str:
        """Return the text that ``fedbench check --json`` prints: counts, and the outcome of each check."""
        head = {"kind": self.kind, "target": self.target, "setting": self.setting, "ok": self.ok}
        counts = {"passed": len(self.passed), "failed": len(self.failed), "skipped": len(self.skipped)}
        return json_text("check", {**head, **counts, "checks": [asdict(o) for o in self.outcomes]})

    def __str__(self) -> str:
        """Return the report as text: one line per check, with its message below it if it failed or was skipped."""
        lines = [f"{self.kind} {self.target}, {self.setting}", ""]
        width = max((len(o.name) for o in self.outcomes), default=0)
        for o in self.outcomes:
            status = "FAILED" if o.status == "failed" else o.status
            lines.append(f"  {status:<8}{o.name:<{width}}  {o.description}")
            lines += textwrap.wrap(o.message, WIDTH, initial_indent=" " * 10, subsequent_indent=" " * 10)
        counts = f"{len(self.passed)} passed, {len(self.failed)} failed, {len(self.skipped)} skipped"
        return "\n".join([*lines, "", f"{len(self.outcomes)} checks: {counts}"])


class Suite(Generic[Case]):
    """The checks of one kind of class: functions of a case (the class to check, with its data) that assert.

    The name of the function is the name of the check.  The first paragraph of its docstring states what must hold.  A
    second one, "Remedy: ...", states what the author of the class should do.  It ends the message of a failed check.

    Args:
        kind: The name of the kind, for reports.
    """

    def __init__(self, kind: str):
        self.kind = kind
        self.checks: dict[str, Callable[[Case], None]] = {}

    def check(self, function: Callable[[Case], None]) -> Callable[[Case], None]:
        """Add a function to the checks under its own name, and return it, so that this is a decorator."""
        self.checks[function.__name__] = function
        return function

    def description(self, name: str) -> str:
        """Return the first paragraph of a check's docstring, what it tests, as one line without the final period."""
        return self._paragraphs(name)[0].rstrip(".")

    def _paragraphs(self, name: str) -> list[str]:
        """Return the paragraphs of a check's docstring, each as one line; [""] if it has none."""
        return [" ".join(text.split()) for text in (self.checks[name].__doc__ or "").split("\n\n")]

    def outcome(self, name: str, case: Case) -> Outcome:
        """Run one check and return its result; exceptions of the class make it fail.

        Args:
            name: The name of the check.
            case: The class to check, with its data.
        """
        description = self.description(name)
        try:
            self.checks[name](case)
        except SkipTest as skipped:
            return Outcome(name, "skipped", description, str(skipped))
        except ConfigError as refused:
            return Outcome(name, "failed", description, str(refused))
        except Exception as error:  # users' classes may raise anything
            # An assertion of the checks has a message for the user; one of the user's class is an error like others.
            if not (isinstance(error, AssertionError) and is_raised_here(error, str(Path(__file__).parent))):
                return Outcome(name, "failed", description, f"it raises {describe_error(error)}")
            remedy = self._paragraphs(name)[1:2]  # the second paragraph of the docstring, if there is one
            return Outcome(name, "failed", description, ". ".join([str(error), *remedy]))
        return Outcome(name, "passed", description)

    def run(self, target: str, setting: str, case: Case, only: Iterable[str] | None = None) -> Report:
        """Run checks and return their results.

        Args:
            target: The class, for the report.
            setting: Data and model in words, for the report.
            case: The class to check, with its data.
            only: The names of the checks to run; None runs all.

        Raises:
            ConfigError: There is no check of such a name.
        """
        require(__debug__, "python -O removes the assertions on which the checks rely: run python without -O")
        names = list(self.checks if only is None else only)
        for name in names:
            require(
                name in self.checks,
                f"there is no check {name} for the kind {self.kind}: choose from {', '.join(self.checks)}",
            )
        return Report(self.kind, target, setting, [self.outcome(name, case) for name in names])
