"""`kvcustody audit tail`, `query`, `prove` and `status`: what the ledger holds."""

from __future__ import annotations

import re
import sys
import time
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any

import typer

from kvcustody.audit.evidence.explore.by_time import find_by_time
from kvcustody.audit.evidence.query.events import (
    BlockRef,
    Cursor,
    EventFilter,
    EventRow,
    newest_events,
)
from kvcustody.audit.evidence.query.known_names import check_said, known_tenant
from kvcustody.audit.kinds import log_of
from kvcustody.audit.leaf import LEAF_KEYS
from kvcustody.audit.siem.cursor_reader import describe_losses, newest_positions, pull
from kvcustody.audit.tlog.database_proofs import LedgerProofs
from kvcustody.audit.tlog.root_sealer import unsealed
from kvcustody.audit.tlog.witness.status import witness_status
from kvcustody.audit.verify.ledger.stated_times import LedgerTimes
from kvcustody.console.command import Json, following, make_table, print_json, printable, say, stdout
from kvcustody.console.opening import reading
from kvcustody.console.options import DEFAULT, Ledger, OldestFirst, PageCursor, moment_us
from kvcustody.errors import ConfigError
from kvcustody.files import evidence_mode, write_file
from kvcustody.governance.identity.w3c_trace import check_trace
from kvcustody.governance.service.operations.parameter_groups import ParameterGroup, grouped
from kvcustody.governance.settings import load_settings
from kvcustody.plurals import several
from kvcustody.times import readable

_HEAD = frozenset(
    {
        "schema",
        "kind",
        "outage",
        "log",
        "incarnation",
        "sequence",
        "at_us",
        "boot_us",
        "part",
        "parts",
        "runs",
        "written",
    }
)
_Tenant = Annotated[str | None, typer.Option(help="Only this tenant's log.")]
_Kind = Annotated[
    list[str] | None,
    typer.Option(
        help="Only this kind of event; may be given again.", autocompletion=lambda: sorted(LEAF_KEYS)
    ),
]


def tail(
    ledger: Ledger = DEFAULT,
    tenant: _Tenant = None,
    kind: _Kind = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="How many.")] = 20,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on showing new leaves until Ctrl-C.")
    ] = False,
    *,
    as_json: Json = False,
) -> None:
    """Show the newest leaves; with --follow, new ones as they are committed (with --json, one document a line).

    After a restore of the ledger --follow says so, shows it again from its first leaf, and ends with status 1.
    """
    with reading(ledger) as engine:
        with engine.connect() as connection:
            tenant = known_tenant(connection, tenant)
            wanted = EventFilter(tenant=tenant, kinds=_kinds(kind))
            place = newest_positions(connection)
            rows = newest_events(connection, wanted, limit=limit)
        if not follow:
            _show(rows, as_json)
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


@dataclass(frozen=True, kw_only=True)
class SoughtEvents(ParameterGroup):
    """What leaves say that are looked for."""

    tenant: _Tenant = None
    since: Annotated[str | None, typer.Option(help="From this time on (ISO 8601, UTC).")] = None
    until: Annotated[str | None, typer.Option(help="Before this time.")] = None
    kind: _Kind = None
    outcome: Annotated[str | None, typer.Option(help="An outcome, effect or result, as `deny`.")] = None
    actor: Annotated[str | None, typer.Option(help="Who did it.")] = None
    rule: Annotated[str | None, typer.Option(help="A rule that determined it.")] = None
    grant: Annotated[str | None, typer.Option(help="A grant or segment that determined it.")] = None
    revision: Annotated[int | None, typer.Option(help="A policy revision.")] = None
    residency: Annotated[int | None, typer.Option(help="A residency.")] = None
    block: Annotated[str | None, typer.Option(help="A block, as `INCARNATION:BLOCK:GENERATION[:POOL]`.")] = (
        None
    )
    trace: Annotated[
        str | None, typer.Option(help="A W3C trace id, 32 hexadecimal digits: what belongs to its requests.")
    ] = None
    reader: Annotated[str | None, typer.Option(help="The tenant that asked for blocks.")] = None
    owner: Annotated[str | None, typer.Option(help="The tenant whose blocks they are.")] = None
    generation: Annotated[
        int | None, typer.Option(help="The number of a hand-out: what happened to that block.")
    ] = None

    def filter(self) -> EventFilter:
        """The filter, but for the tenant, whose name the ledger knows; raises `ConfigError`."""
        return EventFilter(
            since_us=moment_us(self.since, "--since"),
            until_us=moment_us(self.until, "--until"),
            kinds=_kinds(self.kind),
            outcome=self.outcome,
            actor=self.actor,
            rule=self.rule,
            grant=self.grant,
            revision=self.revision,
            residency=self.residency,
            block=_block(self.block),
            trace=None if self.trace is None else check_trace(self.trace),
            reader=self.reader,
            owner=self.owner,
            generation=self.generation,
        )


@dataclass(frozen=True, kw_only=True)
class PageOptions(ParameterGroup):
    """Which page of the leaves that were found."""

    limit: Annotated[int, typer.Option(min=1, max=100_000, help="At most so many leaves.")] = 100
    cursor: PageCursor = None
    oldest_first: OldestFirst = False


@grouped
def query(
    *,
    ledger: Ledger = DEFAULT,
    sought: SoughtEvents,
    as_of: Annotated[int | None, typer.Option(help="The ledger as of this checkpoint (root leaves).")] = None,
    page: PageOptions,
    as_json: Json = False,
) -> None:
    """Find leaves by what they say, newest first, page by page.

    With --as-of the same question gives the same answer for ever.
    """
    wanted = sought.filter()
    place = None if page.cursor is None else Cursor.from_text(page.cursor)
    with reading(ledger) as engine, engine.connect() as connection:
        wanted = wanted._replace(tenant=known_tenant(connection, sought.tenant))
        newest = not page.oldest_first
        found = find_by_time(connection, wanted, newest=newest, after=place, limit=page.limit, as_of=as_of)
        if not found.rows and found.next is None and page.cursor is None:
            check_said(connection, wanted)
    following = found.next.to_text() if found.next else None
    if as_json:
        print_json({"events": [_facts(row) for row in found.rows], "next": following})
        return
    _show(found.rows, as_json=False)
    if following:
        say(f"more: --cursor {following}")


def prove(
    log: Annotated[str, typer.Argument(help="The log: `system` or `tenant/NAME`.")],
    idx: Annotated[int, typer.Argument(help="The leaf's place in it.")],
    ledger: Ledger = DEFAULT,
    as_of: Annotated[int | None, typer.Option(help="A signed checkpoint, by its root leaves.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write PREFIX.leaf and PREFIX.proof instead.")] = None,
    *,
    as_json: Json = False,
) -> None:
    """Prove that a leaf is in the ledger: the leaf, its path, the sub-log's head and the signed checkpoint.

    `kvcustody audit verify PREFIX.proof --key …` checks what --out wrote, and so does the lone `verify_kvcustody.py`;
    docs/audit/ledger.md#proofs-of-the-ledger has the format.
    """
    with reading(ledger) as engine, engine.connect() as connection:
        proofs = LedgerProofs(connection)
        leaf, proof = proofs.proven(log, idx, as_of=as_of)
    if out is not None:
        try:
            write_file(out.with_name(out.name + ".leaf"), leaf, mode=evidence_mode())
            write_file(out.with_name(out.name + ".proof"), proof.to_bytes(), mode=evidence_mode())
        except OSError as error:
            raise ConfigError(f"proof `{out}` cannot be written: {error.strerror}", path=out) from None
    if as_json:
        print_json({"log": log, "idx": idx, "leaf": leaf.decode(), "proof": proof.to_bytes().decode()})
    elif out is not None:
        say(f"written: {out}.leaf, {out}.proof")
    else:
        sys.stdout.write(leaf.decode() + "\n\n" + proof.to_bytes().decode())


def status(ledger: Ledger = DEFAULT, *, as_json: Json = False) -> None:
    """Show how far the ledger is committed, signed and witnessed, and the head of every log."""
    with reading(ledger) as engine, engine.connect() as connection:
        found = witness_status(connection, time.time_ns() // 1000)
        waiting = unsealed(connection, time.time_ns() // 1000)
        logs = LedgerProofs(connection).logs()
    overdue = waiting.overdue(load_settings().root_interval_seconds)
    if as_json:
        heads = {log.name: {"size": log.head.size, "root": log.head.root.hex()} for log in logs}
        facts = found._asdict() | {"witnesses": [seen._asdict() for seen in found.witnesses]}
        print_json(facts | {"unsealed": waiting._asdict() | {"overdue": overdue}, "logs": heads})
        return
    table = make_table("logs", "log", "leaves", "root")
    for log in logs:
        table.add_row(log.name, str(log.head.size), log.head.root.hex()[:16] + "…")
    stdout().print(table)
    say(
        f"root log: {several(found.size, 'leaf')}, {found.signed_size} signed, {found.witnessed_size} witnessed"
    )
    age = f", the oldest for {waiting.age_us / 1e6:.0f} s" if waiting.leaves else ""
    say(f"under no checkpoint yet: {several(waiting.leaves, 'leaf')} of {several(waiting.logs, 'log')}{age}")
    if overdue:
        say("warning: nobody seals this ledger; `kvcustody audit sign` does")
    for seen in found.witnesses:
        say(f"witness {seen.name}: {seen.size} at {readable(seen.at_us)} UTC, {seen.age_us / 1e6:.0f} s ago")
    if found.warning:
        say(f"warning: {found.warning}")


def times(
    ledger: Ledger = DEFAULT,
    *,
    tenant: _Tenant = None,
    limit: Annotated[int, typer.Option(min=1, help="At most so many.")] = 1000,
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
        found = sorted(every, key=lambda odd: odd.at_us, reverse=not oldest_first)[:limit]
    if as_json:
        print_json({"times": [odd._asdict() for odd in found]})
        return
    table = make_table(
        f"{len(found)} odd times (UTC)",
        "log",
        "leaf",
        "kind",
        "why",
        "states",
        "not before",
        "not after",
        left=7,
    )
    for odd in found:
        between = (readable(odd.not_before_us) if odd.not_before_us else "", readable(odd.not_after_us))
        table.add_row(odd.log, str(odd.idx), odd.kind, odd.why, readable(odd.at_us), *between)
    stdout().print(table, markup=False)


def _kinds(given: list[str] | None) -> tuple[str, ...]:
    for kind in given or ():
        if kind not in LEAF_KEYS:
            names = sorted(LEAF_KEYS)
            close = get_close_matches(kind, names, n=1)
            hint = f"; did you mean `{close[0]}`?" if close else ""
            raise ConfigError(f"no event is called `{kind}`; there are: {', '.join(names)}{hint}")
    return tuple(given or ())


def _names(tenant: str | None, name: str) -> tuple[str, ...]:
    return (name,) if tenant is None else (f"tenant/{tenant}",)


_NUMBER = re.compile("[0-9]{1,18}")  # as the ledger holds it, and no other digit of Unicode


def _block(text: str | None) -> BlockRef | None:
    if text is None:
        return None
    incarnation, *numbers = text.split(":")
    if len(numbers) not in (2, 3) or not all(_NUMBER.fullmatch(number) for number in numbers):
        raise ConfigError(f"--block `{text}` is not `INCARNATION:BLOCK:GENERATION[:POOL]`")
    return BlockRef(incarnation, *map(int, numbers))


def _facts(row: EventRow) -> dict[str, Any]:
    return {"log": row.log, "idx": row.idx, "event": row.body}


def _show(rows: tuple[EventRow, ...], as_json: bool) -> None:
    if as_json:
        print_json({"events": [_facts(row) for row in rows]})
        return
    table = make_table(f"{several(len(rows), 'leaf')}", "time (UTC)", "log", "idx", "event", "says", left=5)
    for row in rows:
        table.add_row(readable(row.at_us), row.log, str(row.idx), row.kind, _says(row.body))
    stdout().print(table, markup=False)


def _line(row: EventRow, as_json: bool) -> None:
    if as_json:
        import orjson

        say(orjson.dumps(_facts(row)).decode(), flush=True)
    else:
        say(readable(row.at_us), row.log, row.idx, row.kind, _says(row.body), flush=True)


def _says(body: dict[str, Any]) -> str:
    """What a leaf says, without its head and its runs, on one line that no value can break or colour."""
    values = {key: value for key, value in body.items() if key not in _HEAD and value not in (None, "", [])}
    text = " ".join(f"{key}={value}" for key, value in values.items())
    return printable(text)[:300]
