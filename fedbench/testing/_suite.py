"""What a check is, how the checks of one kind of thing are run, and the report that they end in."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Generic, Literal, TypeVar

from fedbench.core.error_text import describe_error
from fedbench.core.options import ConfigError, require

Status = Literal["held", "broken", "skipped"]
Subject = TypeVar("Subject")
WIDTH = 100


class Broken(AssertionError):
    """A check does not hold: one sentence that says what is wrong and where to look."""


class Skipped(Exception):
    """A check does not apply: one sentence that says why."""


@dataclass(frozen=True)
class Outcome:
    """How one check ended.  says: what it holds a thing to; sentence: what is wrong, or why it was skipped."""

    name: str
    status: Status
    says: str
    sentence: str = ""


@dataclass(frozen=True)
class Report:
    """How all checks of a thing ended.  kind: algorithm, model, ...; setting: on what it was tried."""

    kind: str
    target: str
    setting: str
    outcomes: list[Outcome] = field(default_factory=list)

    def named(self, status: Status) -> dict[str, str]:
        """The checks that ended so, with their sentences."""
        return {o.name: o.sentence for o in self.outcomes if o.status == status}

    @property
    def held(self) -> list[str]:
        """The names of the checks that hold."""
        return list(self.named("held"))

    @property
    def broken(self) -> dict[str, str]:
        """By name, what is wrong."""
        return self.named("broken")

    @property
    def skipped(self) -> dict[str, str]:
        """By name, why a check does not apply."""
        return self.named("skipped")

    @property
    def ok(self) -> bool:
        """Whether nothing is broken."""
        return not self.broken

    def raise_if_broken(self) -> None:
        """Raise AssertionError with the table, for tests, if anything is broken."""
        if not self.ok:
            raise AssertionError(f"\n{self}")

    def as_json(self) -> str:
        """For programs: counts, and every check with its status and its sentence."""
        counts = {status: len(self.named(status)) for status in ("held", "broken", "skipped")}  # type: ignore[arg-type]
        head = {"kind": self.kind, "target": self.target, "setting": self.setting, "ok": self.ok}
        return json.dumps({**head, **counts, "checks": [asdict(o) for o in self.outcomes]}, indent=2)

    def __str__(self) -> str:
        """For people: a line for each check, and sentences under those that do not hold or were skipped."""
        lines = [f"{self.kind} {self.target}, {self.setting}", ""]
        width = max((len(o.name) for o in self.outcomes), default=0)
        for o in self.outcomes:
            status = "BROKEN" if o.status == "broken" else o.status
            lines.append(f"  {status:<8}{o.name:<{width}}  {o.says}")
            lines += textwrap.wrap(o.sentence, WIDTH, initial_indent=" " * 10, subsequent_indent=" " * 10)
        held, broken, skipped = len(self.held), len(self.broken), len(self.skipped)
        return "\n".join([*lines, "", f"{len(self.outcomes)} checks: {held} hold, {broken} broken, {skipped} skipped"])


class Suite(Generic[Subject]):
    """The checks of one kind of thing, in the order in which they were defined.

    A check is a function of the subject.  Its name is the check's name, the first sentence of its docstring is what
    the report says of it.  It raises Broken or Skipped; any other error is reported as broken, with the place.
    """

    def __init__(self, kind: str):
        self.kind = kind
        self.checks: dict[str, Callable[[Subject], None]] = {}

    def check(self, function: Callable[[Subject], None]) -> Callable[[Subject], None]:
        """Add a check; a decorator."""
        self.checks[function.__name__] = function
        return function

    def add(self, name: str, says: str, function: Callable[[Subject], None]) -> None:
        """Add a check that is one of a family, under a name of its own."""
        function.__doc__ = says
        self.checks[name] = function

    def says(self, name: str) -> str:
        """What a check holds a thing to: the first sentence of its docstring."""
        return " ".join((self.checks[name].__doc__ or "").split()).split(". ")[0].rstrip(".")

    def outcome(self, name: str, subject: Subject) -> Outcome:
        """Run one check."""
        function, says = self.checks[name], self.says(name)
        try:
            function(subject)
        except Broken as broken:
            return Outcome(name, "broken", says, str(broken))
        except Skipped as skipped:
            return Outcome(name, "skipped", says, str(skipped))
        except ConfigError as refused:
            return Outcome(name, "broken", says, str(refused))
        except Exception as error:  # the code of the thing that is checked raises what it likes
            return Outcome(name, "broken", says, f"it raises {describe_error(error)}")
        return Outcome(name, "held", says)

    def run(self, target: str, setting: str, subject: Subject, only: Iterable[str] | None = None) -> Report:
        """Run all checks, or `only` those of these names."""
        names = list(self.checks if only is None else only)
        for name in names:
            require(name in self.checks, f"no check of an {self.kind} is called {name}: {', '.join(self.checks)}")
        return Report(self.kind, target, setting, [self.outcome(name, subject) for name in names])
