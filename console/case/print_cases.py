"""Prints the list of cases, and one case in full."""

from __future__ import annotations

from typing import Any

from rich.text import Text

from kvcustody.audit.evidence.cases.case_record import CaseState
from kvcustody.console.command import make_table, print_more, say, stdout
from kvcustody.times import readable


def print_cases(answer: dict[str, Any]) -> None:
    """Print every case on record with its state: `open`, `near`, `missed`, `answered` or `late`."""
    cases = answer["items"]
    if not cases:
        say("no case is on record; `kvcustody case open` records a subject request")
        return
    table = make_table("", "case", "asks for", "tenant", "received", "due", "state", "decided", left=7)
    for one in cases:
        days = (one["received_day"], one["due_day"])
        table.add_row(
            one["case_id"],
            one["subject_right"],
            one["tenant"],
            *days,
            _marked(one["state"]),
            one["outcome"] or "no",
        )
    stdout().print(table)
    for one in cases:
        if one["unread"]:
            say(f"case {one['case_id'][:12]}: {unread_text(one['unread'])}")
    print_more(answer)


def print_case(case: dict[str, Any]) -> None:
    """Print one case: its clock, its steps, erasures, legal holds and recipients, and its open tasks.

    Steps that count for nothing are shown with the reason, and so is what the ledger says against a decision.
    """
    extended = f", extended from {case['first_due_day']}" if case["extended"] else ""
    say(f"{case['state']}: {case['subject_right']} for {case['tenant']}, due {case['due_day']}{extended}")
    if case["unread"]:
        say(unread_text(case["unread"]))
    say(f"received {case['received_day']} ({case['channel']}, {case['zone']}), decided: {case['outcome'] or 'no'}")
    table = make_table("", "when (UTC)", "step", "outcome", "ground", "about", "by", "why", left=7)
    for one in case["steps"]:
        why = f"void: {one['void']}" if one["void"] else one["reason"]
        cells = (one["step"], one["outcome"], one["ground"], one["about"], one["actor"], why)
        table.add_row(readable(one["at_us"]), *cells)
    stdout().print(table, markup=False)
    for one in case["erasures"]:
        standing = f"not followed: {one['why']}" if one["why"] else one["state"]
        say(f"erasure {one['erasure']}: {standing}")
    for one in case["holds"]:
        on = "everything" if one["tenant"] is None else "this person" if one["subject"] else one["tenant"]
        say(f"legal hold {one['hold']} on {on}: {one['reason']}")
    for one in case["recipients"]:
        say(f"recipient {one['reader']} by {one['by']}, up to {one['at_most']}: {one['told'] or 'not told'}")
    for worker in case["followed_by"]:
        say(f"restriction followed by {worker}")
    for label, name in (("to do", "duties"), ("against it", "contradictions"), ("no principal", "strangers")):
        for text in case[name]:
            say(f"{label}: {text}")


def unread_text(unread: str) -> str:
    """Return the text for a case whose leaf could not be read completely."""
    return f"not read: {unread}; the days shown are the earliest that may count"


def _marked(state: str) -> Text:
    """Return the state, highlighted where the deadline was missed or is near."""
    if state in (CaseState.MISSED, CaseState.LATE):
        return Text(state, "bold red")
    return Text(state, "yellow" if state == CaseState.NEAR else "")
