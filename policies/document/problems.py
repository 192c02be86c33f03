"""Problems of a policy document: the fault, its place, and the advice to the author.

1. Every problem has file, line, column (both from 1), a stable code of `codes.CODES`, and prints as one line.
2. A user's value is quoted in backticks, escaped to one printable line and cut at `QUOTE_MAX` characters.
3. At most `PROBLEMS_MAX` problems are kept; the count beyond is still known.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from itertools import islice
from typing import NamedTuple

from kvcustody.errors import PolicyError
from kvcustody.plurals import several
from kvcustody.policies.document.problem_codes import CODES

PROBLEMS_MAX = 100
QUOTE_MAX = 60
CANDIDATES_MAX = 1_000


class SourceMark(NamedTuple):
    """A place in a document; lines and columns count from 1."""

    line: int
    column: int


class Problem(NamedTuple):
    """One reason why a document was rejected."""

    file: str
    line: int
    column: int
    code: str
    message: str
    hint: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}: {self.code} {self.message}; {self.hint}"


class PolicyRejected(PolicyError):  # noqa: N818, a verdict, as in the tree's `LedgerUnavailable`
    """A policy document was rejected; `problems` holds every reason, `str()` prints one line for each."""

    def __init__(self, problems: tuple[Problem, ...], omitted: int = 0) -> None:
        self.problems = problems
        self.omitted = omitted
        lines = [str(problem) for problem in problems]
        if omitted:
            lines.append(f"{problems[-1].file}: not shown: {several(omitted, 'more problem')}")
        super().__init__("\n".join(lines), problems=problems, omitted=omitted)

    def __str__(self) -> str:
        return self.message


class Problems:
    """The problems of one document, collected while it is read."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.count = 0
        self._kept: list[Problem] = []

    def add(self, mark: SourceMark, code: str, message: str, hint: str | None = None) -> None:
        """Record a problem; without a hint, the code's own advice is given."""
        self.count += 1
        if len(self._kept) < PROBLEMS_MAX:
            self._kept.append(Problem(self.file, mark.line, mark.column, code, message, hint or CODES[code].advice))

    def near(self, value: str, known: Iterable[str]) -> str | None:
        """Return `did_you_mean`'s hint, or None once no more problems can be added: comparing words is the expensive
        part.
        """
        return did_you_mean(value, known) if len(self._kept) < PROBLEMS_MAX else None

    def raise_if_any(self) -> None:
        """Raise `PolicyRejected` with the problems in document order, if there are any."""
        if self._kept:
            ordered = tuple(sorted(self._kept, key=lambda p: (p.line, p.column, p.code)))
            raise PolicyRejected(ordered, self.count - len(ordered))


def quote(value: str) -> str:
    """Return a user's value in backticks: one line, printable, not longer than `QUOTE_MAX`.

    Backticks and whatever is not printable are escaped, so that a value can neither break the line nor
    reorder what a terminal shows.
    """
    shown = "".join("\\x60" if c == "`" else c if c.isprintable() else ascii(c)[1:-1] for c in value)
    return f"`{shown if len(shown) <= QUOTE_MAX else shown[: QUOTE_MAX - 1] + '…'}`"


def did_you_mean(value: str, known: Iterable[str]) -> str | None:
    """Return a hint naming the closest known word, or None when nothing is close."""
    alike = islice((word for word in known if abs(len(word) - len(value)) <= 3), CANDIDATES_MAX)
    close = get_close_matches(value[:QUOTE_MAX], alike, n=1, cutoff=0.6)
    return f"did you mean {quote(close[0])}?" if close else None
