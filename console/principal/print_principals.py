"""Prints principals, and one principal's keys."""

from __future__ import annotations

from typing import Any

from kvcustody.console.command import make_table, print_more, say, stdout
from kvcustody.times import TO_THE_MINUTE, readable


def print_principals(answer: dict[str, Any]) -> None:
    """Print everyone who was ever enrolled, in the order of names."""
    table = make_table("", "principal", "kind", "roles", "tenant", "state", left=5)
    for row in answer["items"]:
        state = "enrolled" if row["disabled_us"] is None else "disabled"
        table.add_row(row["name"], row["kind"], ", ".join(row["roles"]), row["tenant"] or "", state)
    stdout().print(table)
    _say_unread(answer["items"])
    print_more(answer)


def print_keys(answer: dict[str, Any]) -> None:
    """Print a principal's keys: when each was issued, last used, ends or was revoked. The keys are never shown."""
    keys = answer["items"]
    table = make_table("", "prefix", "issued", "ends", "last used", "revoked", "bound to", "ends with", left=7)
    for key in keys:
        days = [
            readable(key[at], TO_THE_MINUTE, none="") for at in ("issued_us", "expires_us", "used_us", "revoked_us")
        ]
        ends_with = ", ".join(filter(None, (key["made_with"], "a session" if key["in_session"] else "")))
        table.add_row(key["prefix"], *days, key["certificate"] or "", ends_with)
    stdout().print(table)
    _say_unread(keys)


def _say_unread(keys: list[dict[str, Any]]) -> None:
    """Print which rows cannot be read."""
    for row in keys:
        if row["unread"]:
            say(f"not read: {row['unread']}")
