"""Which workers owe an answer to an erasure, and which gave it; from signed leaves only.

1. A worker owes an answer where a process of its was at work when the erasure was requested, as that leaf says.
2. An answer is an `erasure-completed` leaf of any process of the worker; the start of that process ties it to the name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kvcustody.audit.evidence.processes.work_periods import Body, WorkPeriod, work_periods


def owing(periods: Mapping[str, WorkPeriod], requested_us: int) -> list[str]:
    """Return the workers that owe an answer to a request of this moment, by name (rule 1)."""
    return sorted({period.worker for period in periods.values() if period.at_work(requested_us)})


def without_answer(bodies: Iterable[Body], erasure: str) -> list[str]:
    """Return the workers that owe an answer without a leaf that says `complete` (rules 1 and 2)."""
    every = list(bodies)
    request_leaves = [one for one in every if one["kind"] == "erasure-requested" and one["erasure"] == erasure]
    periods = work_periods(every)
    last = {
        one["incarnation"]: one["outcome"]
        for one in sorted(every, key=lambda one: int(one["sequence"]))
        if one["kind"] == "erasure-completed" and one["erasure"] == erasure
    }
    said = {life for life, outcome in last.items() if outcome == "complete"}
    answered = {periods[life].worker for life in said if life in periods}
    return [name for one in request_leaves for name in owing(periods, int(one["at_us"])) if name not in answered]
