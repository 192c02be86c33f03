"""Prints the list of erasures, and one erasure's state in every worker."""

from __future__ import annotations

from typing import Any

from rich.text import Text

from kvcustody.console.command import make_table, print_more, printable, say, stdout
from kvcustody.times import readable

_GOOD = ("open", "complete")


def print_erasures(answer: dict[str, Any]) -> None:
    """Print every erasure on record with its state.

    Workers do not follow an order that no trusted key signed, where the settings name `policy_trust`.
    """
    if not answer["items"]:
        say("no erasure was requested; `kvcustody erasure request --tenant TENANT --subject NAME` requests one")
        return
    table = make_table("", "erasure", "kind", "tenant", "asked by", "deadline (UTC)", "state", left=6)
    for one in answer["items"]:
        named = (one["erasure"], one["selector"], one["tenant"] or "any", one["actor"])
        table.add_row(*named, readable(one["deadline_us"]), _standing(one))
    stdout().print(table)
    print_more(answer)


def print_status(state: dict[str, Any]) -> None:
    """Print which workers have answered with what, the data that remains and why, and which workers have not
    answered.
    """
    say(f"{_words(state)}: {state['erasure']} ({state['selector']})")
    table = make_table("", "worker", "answer", "reason", "residencies", "blocks", "remaining", left=3)
    for one in state["answers"]:
        answer = one["outcome"] or ("unreachable" if one["worker"] in state["unreachable"] else "none yet")
        counts = (str(one[name]) for name in ("residencies", "blocks", "remaining"))
        table.add_row(one["worker"], answer, one["reason"], *counts)
    stdout().print(table)
    for hold in state["holds"]:
        whose = f"{'a subject of ' if hold['subject'] else ''}{hold['tenant']}"
        on = "everything" if hold["tenant"] is None else whose
        say(f"legal hold {hold['hold']} on {on} since {readable(hold['at_us'])}: {printable(hold['reason'])}")


def _words(one: dict[str, Any]) -> str:
    return f"{one['state']}: {one['why']}" if one["why"] else str(one["state"])


def _standing(one: dict[str, Any]) -> Text:
    """Return the state, highlighted where a deadline was missed or no worker follows the order."""
    return Text(printable(_words(one)), "" if one["state"] in _GOOD else "bold red")
