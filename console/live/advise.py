"""`kvcustody advise`: seven questions about running workers' caches, answered from what they last said."""

from __future__ import annotations

from collections import Counter

from rich.text import Text
from sqlalchemy import Connection

from kvcustody.audit.counters.hourly_coverage import recent
from kvcustody.audit.counters.read_figures import orphans_by_class
from kvcustody.console.command import Json, make_table, print_json, stdout
from kvcustody.console.live.worker_status import worker_statuses
from kvcustody.console.opening import reading
from kvcustody.console.options import DEFAULT, Authority, KeyFile, Ledger, Server
from kvcustody.governance.observability import advise as questions

EPILOG = "Example: `kvcustody advise --server https://kv.example:8443 --api-key-file olive.key`"


def advise(
    *,
    ledger: Ledger = DEFAULT,
    server: Server = None,
    key_file: KeyFile = None,
    authority: Authority = None,
    as_json: Json = False,
) -> None:
    """Seven questions about the cache of running workers, answered from what they said, with the evidence.

    Bytes of a token, budgets, prefixes, what is in the key, offload, locations, cleanup. What a worker has not said
    is unknown, with the reason. docs/operate/advise.md says how each answer is made.
    """
    with worker_statuses(ledger, server, key_file, authority) as look:
        seen = look()
    custody = None
    if server is None:
        with reading(ledger) as engine, engine.connect() as connection:
            custody = _of_ledger(connection)
    found = questions.advise(seen, custody, prefixes=_prefixes_command())
    if as_json:
        answers = [one._asdict() | {"evidence": [row._asdict() for row in one.evidence]} for one in found]
        print_json({"workers": [one.worker for one in seen], "answers": answers})
        return
    console = stdout()
    for number, one in enumerate(found, 1):
        console.print(Text(f"{number}. {one.question}", "bold"))
        console.print(Text(one.answer))
        if one.evidence:
            table = make_table("", "evidence", "worker", "value", left=2)
            table.title = None
            for row in one.evidence:
                shown = row.value if isinstance(row.value, str) else f"{row.value:,.6g}"
                table.add_row(Text(row.metric), Text(row.worker), Text(shown))
            console.print(table)
        for missing in one.unknown:
            console.print(Text(f"unknown: {missing}", "yellow"))
        console.print()


def _of_ledger(connection: Connection) -> dict[str, float]:
    """What a ledger has of orphans, and of custody that was due in the last hours."""
    found: Counter[str] = Counter()
    for orphan, number in orphans_by_class(connection).items():
        found[f'orphan_findings{{orphan="{orphan}"}}'] += number
    for unit in recent(connection).rows:
        for name in ("due", "covered", "overdue", "unproven"):
            found[f"deletion_{name}_units"] += getattr(unit, name)
    return dict(found)


def _prefixes_command() -> str | None:
    from kvcustody.console.main import COMMANDS

    return "kvcustody prefixes top" if "prefixes" in COMMANDS else None
