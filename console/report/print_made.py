"""Prints a control plane's reports, and the schedules that make them."""

from __future__ import annotations

from typing import Any

from rich.text import Text

from kvcustody.console.command import make_table, print_more, printable, say, stdout
from kvcustody.plurals import several
from kvcustody.times import TO_THE_MINUTE, readable

_MARKS = {"adverse": "bold red", "qualified": "yellow", "failed": "bold red", "given-up": "bold red"}


def print_frameworks(answer: dict[str, Any]) -> None:
    """Print the frameworks, and the controls for which there is evidence."""
    table = make_table("frameworks", "name", "title", "edition", "controls", left=4)
    for item in answer["items"]:
        controls = ", ".join(control["id"] for control in item["controls"])
        table.add_row(item["id"], item["title"], item["edition"], controls)
    stdout().print(table)


def print_schedules(answer: dict[str, Any]) -> None:
    """Print the schedules of reports, and when each is due next."""
    items = answer["items"]
    if not items:
        say("there is no schedule; `kvcustody report schedules add` creates one")
        return
    columns = ("schedule", "framework", "of", "every", "to", "state", "next (UTC)", "made by")
    table = make_table("schedules", *columns, left=len(columns))
    for item in items:
        due = readable(item["next_us"], TO_THE_MINUTE)
        whose, to = item["tenant"] or "all tenants", ", ".join(item["destinations"]) or "nobody"
        every = f"{item['every']}, {item['zone']}"
        table.add_row(item["schedule"], item["framework"], whose, every, to, item["state"], due, item["principal"])
    stdout().print(table)
    for item in items:
        if item["unread"]:
            say(f"schedule {item['schedule']} makes no report: {item['unread']}")


def print_reports(answer: dict[str, Any]) -> None:
    """Print a control plane's reports: opinion, digest, signature, and delivery of each."""
    items = answer["items"]
    if not items:
        say("no report was made; `kvcustody report schedules add` schedules reports")
        return
    columns = ("period (UTC)", "framework", "of", "verdict", "why", "handed over", "digest", "report")
    table = make_table(f"{several(len(items), 'report')}", *columns, left=len(columns))
    for item in items:
        period = f"{readable(item['since_us'], '%Y-%m-%d')} to {readable(item['until_us'], '%Y-%m-%d')}"
        why = item["error"] or "; ".join(each["cause"] for each in item["reasons"])
        handed = Text(", ").join(
            Text(printable(f"{each['destination']}: ")) + _marked(each["state"]) for each in item["deliveries"]
        )
        verdict = (item["opinion"] or "not shown") if item["state"] == "made" else item["state"]
        digest = (item["digest"] or "")[:12]
        table.add_row(
            period, item["framework"], item["tenant"] or "all tenants", _marked(verdict), why, handed,
            digest, item["report"],
        )  # fmt: skip
    stdout().print(table)
    for one in (*items, *(each for item in items for each in item["deliveries"])):
        if one["unread"]:
            say(f"not read: {one['unread']}")
    print_more(answer)


def _marked(word: str) -> Text:
    return Text(printable(word), _MARKS.get(word, ""))
