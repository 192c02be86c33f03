"""Requests of people a second time: docs/concepts/cases.md case by case, in plain Python.

Steps count in the order of their leaves; one that may not follow what was before it is void, and changes nothing.
"""

from __future__ import annotations

import re
from calendar import monthrange
from collections.abc import Iterable
from datetime import UTC, date, datetime, time, timedelta
from typing import Any
from zoneinfo import ZoneInfo

Body = dict[str, Any]
NEAR_US = 7 * 86_400_000_000
WEEKEND = 5
OUTCOMES = {
    "identity": ("confirmed", "asked", "not-confirmed"),
    "third-party": ("concerned", "consulted", "told"),
    "recipient": ("told", "impossible", "disproportionate"),
    "decide": ("erased", "partly", "refused", "not-found", "given", "restricted"),
    **dict.fromkeys(("extend", "exempt", "restrict", "lift-restriction", "erasure", "export", "answer"), ("",)),
}
GROUNDS = {
    "extend": ("complexity", "number"),
    "exempt": tuple(f"17(3)({letter})" for letter in "abcde"),
    "restrict": tuple(f"18(1)({letter})" for letter in "abcd"),
    "decide": ("", "11(2)", "12(2)", "12(5)", "15(4)", "17(3)"),
}
DECIDED_AS = {
    "erasure": ("erased", "partly", "refused", "not-found"),
    "access": ("given", "partly", "refused", "not-found"),
    "restriction": ("restricted", "refused", "not-found"),
}
WITH_REASON = ("extend", "exempt", "lift-restriction", "third-party")
WITH_ABOUT = ("third-party", "recipient", "erasure", "answer")
WITH_DIGEST = ("export", "answer")
AFTER_THE_ANSWER = ("lift-restriction", "third-party", "recipient", "erasure")


def deadline_us(opened: Body, months: int) -> int:
    """The first moment that is too late: the end of the last day, moved past weekends and listed holidays."""
    zone = UTC if opened["zone"] == "UTC" else ZoneInfo(opened["zone"])
    day = (
        (datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=int(opened["received_utc"]))).astimezone(zone).date()
    )
    year, month = divmod(day.year * 12 + day.month - 1 + months, 12)
    day = date(year, month + 1, min(day.day, monthrange(year, month + 1)[1]))
    while day.weekday() >= WEEKEND or day.isoformat() in opened["holidays"]:
        day += timedelta(days=1)
    end = datetime.combine(day + timedelta(days=1), time(), zone)
    return (end.astimezone(UTC) - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)


class Case:
    """One case, and the steps of it that count."""

    def __init__(self, opened: Body, steps: Iterable[Body]) -> None:
        self.opened, self.void, self.counted = opened, 0, list[Body]()
        for step in steps:
            if self._counts(step):
                self.counted.append(step)
            else:
                self.void += 1

    def of(self, kind: str) -> list[Body]:
        """The steps of one kind that count."""
        return [step for step in self.counted if step["step"] == kind]

    def last(self, kind: str, name: str) -> Any:
        """What the last step of a kind says; empty where there is none."""
        return self.of(kind)[-1][name] if self.of(kind) else ""

    @property
    def is_restricted(self) -> bool:
        """A restriction applies."""
        both = [step["step"] for step in self.counted if step["step"] in ("restrict", "lift-restriction")]
        return both[-1:] == ["restrict"]

    @property
    def due_us(self) -> int:
        """When the answer is due."""
        return deadline_us(self.opened, 3 if self.of("extend") else 1)

    def state(self, now_us: int) -> str:
        """How it stands at a moment."""
        answered, due_us = self.last("answer", "at_us"), self.due_us
        if answered != "":
            return "answered" if int(answered) < due_us else "late"
        if now_us >= due_us:
            return "missed"
        return "near" if due_us - now_us < NEAR_US else "open"

    def _counts(self, step: Body) -> bool:
        return self._is_formed(step) and self._may_follow(step) and self._may_decide(step)

    def _is_formed(self, step: Body) -> bool:
        kind, reason = step["step"], step["reason"]
        if kind not in OUTCOMES or step["outcome"] not in OUTCOMES[kind]:
            return False
        digest = step["digest"]
        return (
            step["ground"] in GROUNDS.get(kind, ("",))
            and (kind not in WITH_REASON or bool(reason.strip()))
            and (kind in WITH_ABOUT) == bool(step["about"])
            and (kind in WITH_DIGEST) == bool(digest)
            and (not digest or re.fullmatch("[0-9a-f]{64}", digest) is not None)
            and len(reason) <= 500
            and len(step["about"]) <= 200
        )

    def _may_follow(self, step: Body) -> bool:
        kind = step["step"]
        gives = kind in ("export", "erasure") or step["outcome"] in (
            "erased",
            "partly",
            "given",
            "restricted",
        )
        first_us = deadline_us(self.opened, 1)
        return (
            (not self.of("answer") or kind in AFTER_THE_ANSWER)
            and not (kind == "lift-restriction" and not self.is_restricted)
            and not (kind == "restrict" and self.is_restricted)
            and not (kind == "answer" and not self.last("decide", "outcome"))
            and not (gives and self.last("identity", "outcome") != "confirmed")
            and not (kind == "extend" and (self.of("extend") or int(step["at_us"]) >= first_us))
        )

    def _may_decide(self, step: Body) -> bool:
        if step["step"] != "decide":
            return True
        right, outcome, ground = self.opened["subject_right"], step["outcome"], step["ground"]
        reason, exempt = step["reason"].strip(), bool(self.of("exempt"))
        gives = outcome == "given" or (right == "access" and outcome == "partly")
        return (
            outcome in DECIDED_AS[right]
            and not (outcome == "refused" and not (ground and reason))
            and not (ground == "17(3)" and not exempt)
            and not (ground in ("11(2)", "12(2)") and self.last("identity", "outcome") == "confirmed")
            and not (outcome == "partly" and not reason)
            and not (right == "erasure" and outcome in ("erased", "partly") and not self.of("erasure"))
            and not (outcome == "erased" and (exempt or self.is_restricted))
            and not (gives and not self.of("export"))
            and not (outcome == "restricted" and not self.is_restricted)
        )


def cases(bodies: list[Body], since_us: int, until_us: int, last_us: int) -> list[Body]:
    """The cases of a period, as they stood when it ended, or at the last leaf."""
    rows = []
    for opened in bodies:
        if opened["kind"] != "case-opened" or int(opened["at_us"]) >= until_us:
            continue
        steps = [
            body
            for body in bodies
            if body["kind"] == "case-step" and body["case_id"] == opened["case_id"] and int(body["at_us"]) < until_us
        ]
        steps.sort(key=lambda body: int(body["at_us"]))
        case, received_us = Case(opened, steps), int(opened["received_utc"])
        answered_us = int(case.last("answer", "at_us") or 0)
        if received_us >= until_us or (answered_us and answered_us < since_us):
            continue
        rows.append(
            {
                **{name: opened[name] for name in ("case_id", "tenant", "subject_right")},
                "pseudonym": opened["subject"],
                "state": case.state(min(until_us, last_us)),
                "outcome": case.last("decide", "outcome"),
                "received_us": received_us,
                "due_us": case.due_us,
                "extended": case.due_us != deadline_us(opened, 1),
                "answered_us": answered_us,
                "void": case.void,
                "restricted": case.is_restricted,
            }
        )
    return sorted(rows, key=lambda one: (one["received_us"], one["case_id"]))
