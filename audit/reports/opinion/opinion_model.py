"""What an opinion is made of; `opinion.py` says how it follows from a report."""

from __future__ import annotations

from typing import NamedTuple

UNQUALIFIED, QUALIFIED, ADVERSE = "unqualified", "qualified", "adverse"
NOT_GIVEN = "not given"


class Response(NamedTuple):
    """What people answered to one exception, by its id; `date` is when it will be, or was, put right."""

    id: str
    owner: str
    date: str
    response: str
    compensating_control: str


class QualifyingException(NamedTuple):
    """Something that qualifies the opinion, and what is done about it, as far as anybody said.

    `amount` counts what the cause is about; `is_adverse`: alone it makes the opinion adverse.
    """

    id: str
    is_adverse: bool
    amount: int
    cause: str
    risk: str
    owner: str
    date: str
    response: str
    compensating_control: str


class Opinion(NamedTuple):
    """The kind, and the share of units that are covered: at least, and at most where all that is unknown were covered.

    Shares are millionths of what was due, `unknown` units are in neither.
    """

    kind: str
    low_ppm: int
    high_ppm: int
    unknown: int
    exceptions: tuple[QualifyingException, ...]
