"""`kvcustody audit tail`, `query`, `prove` and `status`: the ledger's content."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from kvcustody.audit.evidence.query.events import (
    EventFilter,
    EventRow,
    newest_events,
)
from kvcustody.audit.evidence.query.known_names import known_kind, known_tenant
from kvcustody.audit.kinds import log_of
from kvcustody.audit.leaf import LEAF_KEYS
from kvcustody.audit.siem.cursor_reader import describe_losses, newest_positions, pull
from kvcustody.audit.tlog.database_proofs import LedgerProofs
from kvcustody.audit.tlog.root_sealer import unsealed
from kvcustody.audit.tlog.witness.status import witness_status
from kvcustody.audit.verify.ledger.stated_times import LedgerTimes
from kvcustody.console.api.client import done
from kvcustody.console.command import (
    Json,
    following,
    make_table,
    print_json,
    print_more,
    printable,
    say,
    stdout,
)
from kvcustody.console.opening import reading
from kvcustody.console.options import DEFAULT, Ledger, OldestFirst, ServiceSource
from kvcustody.console.render.event_sentences import sentence_of
from kvcustody.errors import ConfigError
from kvcustody.files import evidence_mode, write_file
from kvcustody.governance.service.operations.parameter_groups import grouped
from kvcustody.governance.settings import load_settings
from kvcustody.plurals import several
from kvcustody.times import readable

_WITH_INDEX = 110  # columns of a terminal
_Tenant = Annotated[str | None, typer.Option(help="Only this tenant's log.")]
_Kind = Annotated[
    list[str] | None,
    typer.Option(help="Only this kind of event; may be given again.", autocompletion=lambda: sorted(LEAF_KEYS)),
]


def tail(
    ledger: Ledger = DEFAULT,
    tenant: _Tenant = None,
    kind: _Kind = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="How many.")] = 20,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Keep showing new leaves until Ctrl-C.")] = False,
    *,
    as_json: Json = False,
) -> None:
    """Show the newest leaves, the newest first; with --follow, new ones as they are committed, below each other.

    With --json it shows the leaves themselves, with --follow one document a line.

    After a restore of the ledger --follow says so, shows it again from its first leaf, and ends with status 1.
    """
    with reading(ledger) as engine:
        with engine.connect() as connection:
            tenant = known_tenant(connection, tenant)
            wanted = EventFilter(tenant=tenant, kinds=_kinds(kind))
            place = newest_positions(connection)
            rows = newest_events(connection, wanted, limit=limit)
        if not follow:
            _show(rows[::-1], as_json)
            return
        for row in rows:
            _line(row, as_json)
        with following(lambda: any(place.losses)):
            while True:
                time.sleep(0.5)
                with engine.connect() as connection:
                    batch = pull(connection, place)
                for line in describe_losses(batch.positions.losses.since(place.losses)):
                    say(line, file=sys.stderr)
                place = batch.positions
                for row in batch.rows:
                    if (not wanted.kinds or row.kind in wanted.kinds) and row.log in _names(tenant, row.log):
                        _line(row, as_json)


@grouped
def prove(
    log: Annotated[str, typer.Argument(help="The log: `system` or `tenant/NAME`.")],
    idx: Annotated[int, typer.Argument(help="The leaf's index in the log.", min=0)],
    as_of: Annotated[int | None, typer.Option(help="A signed checkpoint, by its root leaves.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write PREFIX.leaf and PREFIX.proof instead.")] = None,
    *,
    source: ServiceSource,
    as_json: Json = False,
) -> None:
    """Prove that a leaf is in the ledger: the leaf, its path, the sub-log's head and the signed checkpoint.

    `kvcustody audit verify PREFIX.proof --key …` checks what --out wrote, and so does the lone `verify_kvcustody.py`;
    docs/reference/formats/proofs.md has the format.
    """
    event = done("proveEvent", source, log=log, idx=idx, as_of=as_of)
    leaf, proof = event["canonical"], event["proof"]
    if out is not None:
        try:
            write_file(out.with_name(out.name + ".leaf"), leaf.encode(), mode=evidence_mode())
            write_file(out.with_name(out.name + ".proof"), proof.encode(), mode=evidence_mode())
        except OSError as error:
            raise ConfigError(f"proof `{out}` cannot be written: {error.strerror}", path=out) from None
    if as_json:
        print_json(event)
    elif out is not None:
        say(f"written: {out}.leaf, {out}.proof")
    else:
        sys.stdout.write(f"{leaf}\n\n{proof}")


def status(ledger: Ledger = DEFAULT, *, as_json: Json = False) -> None:
    """Show how far the ledger is committed, signed and witnessed, and the head of every log."""
    with reading(ledger) as engine, engine.connect() as connection:
        witnessed = witness_status(connection, time.time_ns() // 1000)
        waiting = unsealed(connection, time.time_ns() // 1000)
        logs = LedgerProofs(connection).logs()
    overdue = waiting.overdue(load_settings().root_interval_seconds)
    if as_json:
        heads = {log.name: {"size": log.head.size, "root": log.head.root.hex()} for log in logs}
        facts = witnessed._asdict() | {"witnesses": [seen._asdict() for seen in witnessed.witnesses]}
        print_json(facts | {"unsealed": waiting._asdict() | {"overdue": overdue}, "logs": heads})
        return
    table = make_table("logs", "log", "leaves", "root")
    for log in logs:
        table.add_row(log.name, str(log.head.size), log.head.root.hex()[:16] + "…")
    stdout().print(table)
    say(
        f"root log: {several(witnessed.size, 'leaf')}, {witnessed.signed_size} signed, "
        f"{witnessed.witnessed_size} witnessed"
    )
    age = f", the oldest for {waiting.age_us / 1e6:.0f} s" if waiting.leaves else ""
    say(f"under no checkpoint yet: {several(waiting.leaves, 'leaf')} of {several(waiting.logs, 'log')}{age}")
    if overdue:
        say("warning: no process signs this ledger; run `kvcustody audit sign`")
    for seen in witnessed.witnesses:
        say(f"witness {seen.name}: {seen.size} at {readable(seen.at_us)} UTC, {seen.age_us / 1e6:.0f} s ago")
    if witnessed.warning:
        say(f"warning: {witnessed.warning}")


def times(
    ledger: Ledger = DEFAULT,
    *,
    tenant: _Tenant = None,
    limit: Annotated[int, typer.Option(min=1, help="The maximum number.")] = 1000,
    oldest_first: OldestFirst = False,
    as_json: Json = False,
) -> None:
    """Leaves whose stated time the signed checkpoints around them contradict, and those that came late from a spill.

    Newest first, by the time that they state. A purge goes by the signatures' times for the former, and by the stated
    one for the latter.
    """
    with reading(ledger) as engine, engine.connect() as connection:
        name = known_tenant(connection, tenant)
        logs = [log.name for log in LedgerProofs(connection).logs()]
        asked = [log for log in logs if name is None or log == log_of(name)]
        every = (odd for log in asked for odd in LedgerTimes(connection).odd(log))
        odd_times = sorted(every, key=lambda odd: odd.at_us, reverse=not oldest_first)[:limit]
    if as_json:
        print_json({"times": [odd._asdict() for odd in odd_times]})
        return
    table = make_table(
        f"{len(odd_times)} odd times (UTC)",
        "log",
        "leaf",
        "kind",
        "why",
        "states",
        "not before",
        "not after",
        left=7,
    )
    for odd in odd_times:
        between = (readable(odd.not_before_us) if odd.not_before_us else "", readable(odd.not_after_us))
        table.add_row(odd.log, str(odd.idx), odd.kind, odd.why, readable(odd.at_us), *between)
    stdout().print(table, markup=False)


def _kinds(given: list[str] | None) -> tuple[str, ...]:
    return tuple(map(known_kind, given or ()))


def _names(tenant: str | None, name: str) -> tuple[str, ...]:
    return (name,) if tenant is None else (f"tenant/{tenant}",)


def _facts(row: EventRow) -> dict[str, Any]:
    return {"log": row.log, "idx": row.idx, "event": row.body}


def _show(rows: tuple[EventRow, ...], as_json: bool) -> None:
    if as_json:
        print_json({"events": [_facts(row) for row in rows]})
        return
    _print_leaves([_facts(row) | {"at_us": row.at_us} for row in rows])


def print_events(answer: dict[str, Any]) -> None:
    """Print leaves, each as a sentence."""
    _print_leaves([one | {"event": one["leaf"]} for one in answer["items"]])
    print_more(answer)


def _print_leaves(listed: list[dict[str, Any]]) -> None:
    """Print one line per leaf: only its sentence is cut, at the terminal's width; `--json` has the whole leaf.

    A narrow terminal has no room for its log and index.
    """
    console = stdout()
    is_wide = console.width >= _WITH_INDEX
    more = "" if is_wide else f"; in a terminal of {_WITH_INDEX} columns with log and index"
    names = ("time (UTC)", "log", "idx", "what happened") if is_wide else ("time (UTC)", "what happened")
    table = make_table(several(len(listed), "leaf") + more, *names, left=4)
    for column in table.columns:
        column.no_wrap, column.overflow = True, "ellipsis"
    table.expand, table.columns[-1].ratio = console.is_terminal, 1
    for one in listed:
        place = (one["log"], str(one["idx"])) if is_wide else ()
        table.add_row(readable(one["at_us"]), *place, sentence_of(one["event"]))
    console.print(table, markup=False)


def _line(row: EventRow, as_json: bool) -> None:
    if as_json:
        import orjson

        say(orjson.dumps(_facts(row)).decode(), flush=True)
    else:
        say(readable(row.at_us), row.log, row.idx, printable(sentence_of(row.body)), flush=True)
