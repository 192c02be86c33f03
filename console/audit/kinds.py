"""`kvcustody audit kinds`: every kind of leaf, each with an example. It opens no ledger."""

from __future__ import annotations

import inspect
import json
from typing import Annotated, Any

import typer

from kvcustody.audit.evidence.query.known_names import known_kind
from kvcustody.audit.kinds import KINDS, Event
from kvcustody.audit.kinds.examples import example_of
from kvcustody.audit.leaf import Context, leaves
from kvcustody.console.command import Json, make_table, print_json, say, stdout

_CONTEXT = Context(
    "0f8fad5bd9cb469fa16570867728950e",
    1_780_000_000_000_000,  # when the machine of the examples started
    lambda tenant, subject, session="": "5c1d9e0f7a3b2468" if session else "9b8a7c6d5e4f3021",
)


def kinds(
    kind: Annotated[str, typer.Argument(help="A kind's name; none: all of them.")] = "",
    *,
    as_json: Json = False,
) -> None:
    """Show which kinds of leaves there are; of one kind, the leaf that an example of it becomes, in each of its logs.

    Example: `kvcustody audit kinds receipt`
    """
    if kind:
        of = next(each for each in KINDS if KINDS[each].name == known_kind(kind))
        made = [json.loads(leaf.data) for leaf in leaves(example_of(of), _CONTEXT, 17)]
        if as_json:
            print_json(facts(of) | {"leaves": made})
            return
        say(inspect.getdoc(of))
        for leaf in made:
            say(json.dumps(leaf, indent=2, sort_keys=True))
        return
    every = [facts(each) for each in sorted(KINDS, key=lambda each: KINDS[each].name)]
    if as_json:
        print_json({"items": every})
        return
    table = make_table("kinds of leaves", "kind", "class", "by", "what it says", left=4)
    for row in every:
        table.add_row(row["kind"], row["outage"], row["by"], _in_short(row))
    stdout().print(table)


def facts(kind: type[Event]) -> dict[str, Any]:
    """Return the facts about a kind besides its fields."""
    return {
        "kind": KINDS[kind].name,
        "outage": KINDS[kind].outage,
        "by": "worker" if kind.by_worker else "door" if kind.by_door else "control plane",
        "is_order": kind.is_order,
        "fields": list(kind.__struct_fields__),
        "says": inspect.getdoc(kind),
    }


def kinds_table() -> str:
    """Return the table of every kind of leaf for docs/reference/formats/leaves.md."""
    rows = ["| kind | class | recorded by | what it says |", "|---|---|---|---|"]
    for kind in sorted(KINDS, key=lambda each: KINDS[each].name):
        told = facts(kind)
        rows.append(f"| `{told['kind']}` | {told['outage']} | {told['by']} | {_in_short(told)} |")
    return "\n".join(rows) + "\n"


def _in_short(told: dict[str, Any]) -> str:
    """Return the first paragraph, without the outage class, which has its own column."""
    first = " ".join(told["says"].partition("\n\n")[0].split())
    return first.replace(f" (class {told['outage']})", "")
