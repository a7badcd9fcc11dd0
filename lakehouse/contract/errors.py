"""The base of every error that Millrace raises on purpose; remedies for unknown names; crash points of tests.

::

    MillraceError
    ├── ConfigError          a setting or pipeline file is wrong: file, key, remedy
    ├── ProblemWithRemedy
    │   ├── EnvironmentProblem   something the machine lacks or refuses
    │   └── StatementError       SQL that is not taken: send another
    │       ├── QueryRefused         a query or alert of the run time
    │       └── FilterError          a subscriber's condition, columns or aggregate
    ├── lakehouse.errors.LakehouseError
    ├── ingest.errors.IngestError
    └── serve.errors.ServeError

The data of an error is in its attributes; ``__str__`` renders it for a person.

``MILLRACE_CRASH_AT=NAME[:COUNT]`` kills the process with SIGKILL when it comes to :func:`crash_point` of this name for
the COUNT-th time (the first, by default). Unset, as always outside tests, a point is one look at a module variable.
"""

from __future__ import annotations

import difflib
import os
import signal
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lakehouse.contract.storage import StorePath


DISTRIBUTION = "millrace-lakehouse"  # our name on PyPI, where `millrace` is another project's


class MillraceError(Exception):
    """Base of all errors raised on purpose; the CLI prints it without a traceback.

    Attributes:
        is_configuration: whether a restart ends in the same way until a person changes something.
    """

    is_configuration = False


class ConfigError(MillraceError):
    """Configuration that cannot be used.

    Attributes:
        file: the file that is wrong, or None for the environment or the command line.
        key: dotted key, e.g. ``products.top_topics.n``.
        line: line number in ``file``, 1-based, where known.
    """

    is_configuration = True

    def __init__(
        self,
        problem: str,
        *,
        key: str = "",
        remedy: str = "",
        file: Path | StorePath | str | None = None,
        line: int | None = None,
    ) -> None:
        super().__init__(problem)
        self.problem = problem
        self.key = key
        self.remedy = remedy
        self.file = Path(file) if isinstance(file, str) else file
        self.line = line

    def __str__(self) -> str:
        place = str(self.file) if self.file else "configuration"
        if self.line:
            place += f":{self.line}"
        text = f"{place}: {self.key + ': ' if self.key else ''}{self.problem}"
        return f"{text}. {self.remedy}" if self.remedy else text


class ProblemWithRemedy(MillraceError):
    """Something that a person can mend."""

    def __init__(self, problem: str, remedy: str = "") -> None:
        super().__init__(problem)
        self.problem = problem
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.problem}. {self.remedy}" if self.remedy else self.problem


class EnvironmentProblem(ProblemWithRemedy):
    """The machine lacks something, or another process holds it; the remedy is a command or a setting."""


def port_taken(host: str, port: int, setting: str, error: OSError) -> EnvironmentProblem:
    return EnvironmentProblem(
        f"cannot listen on {host}:{port}: {error.strerror}",
        f"Stop what holds the port, or set {setting} to another (0: any free one)",
    )


def install_extra(extra: str) -> str:
    """The command that installs the packages of an extra."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"


class StatementError(ProblemWithRemedy):
    """SQL that is not taken."""


class QueryRefused(StatementError):
    """A query or an alert that is not taken.

    Attributes:
        code: for programs: ``name``, ``taken``, ``sql``, ``relation``, ``function``, ``column``, ``key``, ``quota``,
            ``option`` or ``unknown``.
        line: of the SQL, 1-based; 0: not known.
    """

    def __init__(self, code: str, problem: str, remedy: str = "", line: int = 0) -> None:
        super().__init__(problem, remedy)
        self.code = code
        self.line = line


class FilterError(StatementError):
    """A subscriber's condition, list of columns or aggregate that is not taken."""


def nearest(word: str, known: Iterable[str], *, cutoff: float = 0.6) -> str:
    """The known word that was probably meant; empty if none is near."""
    return next(iter(difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)), "")


def did_you_mean(word: str, known: Iterable[str], others: str = "There are") -> str:
    """The remedy for an unknown name: the nearest known one, or all of them after ``others``."""
    known = list(known)
    near = nearest(word, known)
    return f"Did you mean {near!r}?" if near else f"{others}: {', '.join(known) or 'none'}"


_armed, _, _count = os.environ.get("MILLRACE_CRASH_AT", "").partition(":")
_passed: Counter[str] = Counter()


def crash_point(name: str) -> None:
    """Die between two steps of a write, if the environment says so."""
    if _armed != name:
        return
    _passed[name] += 1
    if _passed[name] >= int(_count or 1):
        os.kill(os.getpid(), signal.SIGKILL)
