"""`kvcustody db`: upgrades a ledger's schema, sets up its roles and partitions, moves it to PostgreSQL."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer
from sqlalchemy import Engine

from kvcustody.audit.keep.sqlite_to_postgres import Progress, move_ledger
from kvcustody.audit.store.database.engine import check_store, check_there, open_store
from kvcustody.audit.store.database.monthly_partitions import MONTHS_AHEAD, ensure_partitions, size_bytes
from kvcustody.audit.store.database.monthly_partitions import partitions as every_partition
from kvcustody.audit.store.database.postgres_roles import set_up_roles
from kvcustody.console.command import Json, print_json, progress_bar, say
from kvcustody.console.options import DEFAULT, Ledger
from kvcustody.governance.service.access.local_administration import local_name
from kvcustody.migrations.upgrade import undo as undo_upgrade
from kvcustody.migrations.upgrade import upgrade as upgrade_schema
from kvcustody.plurals import several

_URL = "an SQLite file or a PostgreSQL server, as a URL"

app = typer.Typer(
    no_args_is_help=True,
    help="The ledger's database: schema, roles, partitions by month, and moving it from SQLite to PostgreSQL.",
    epilog="docs/concepts/ledger/overview.md describes the tables and the roles' rights.",
)


@app.command(epilog="Example: `kvcustody db upgrade --ledger postgresql://ledger@db/kvcustody`")
def upgrade(
    ledger: Ledger = DEFAULT,
    undo: Annotated[
        bool, typer.Option("--undo", help="Drop the copy of an upgrade that is not finished, and go back.")
    ] = False,
    *,
    as_json: Json = False,
) -> None:
    """Bring the schema up to this program's revision. Nothing is lost; a failed upgrade changes nothing.

    A worker does the same at its start; do it here where workers may not change the schema, and for a large ledger:
    where rows have to be copied, others write and read meanwhile. Ended in between, it goes on when it is run again.
    """
    with _open(ledger) as engine, _progress() as told:
        if undo:
            reached = undo_upgrade(engine)
        else:
            reached = upgrade_schema(engine, progress=told, leaves_max=None, actor=local_name())
    if as_json:
        print_json({"revision": reached})
    else:
        say(f"the ledger is at revision {reached}")


@app.command(epilog="Example: `kvcustody db roles --ledger postgresql://postgres@db/kvcustody`")
def roles(ledger: Ledger = DEFAULT, *, as_json: Json = False) -> None:
    """Create the roles of a PostgreSQL ledger, their grants, and row-level security by tenant. May be repeated.

    The roles cannot log in: grant one to a login, and let it connect with `?options=-c%20role%3Dkvcustody_writer`.
    """
    with _open(ledger) as engine:
        made = set_up_roles(engine)
    if as_json:
        print_json(made._asdict())
    else:
        say(f"roles: {', '.join(made.roles)}")
        say(f"a reader sees one tenant's rows of {len(made.by_tenant)} tables")


@app.command(epilog="Example, once a month: `kvcustody db partitions --ledger postgresql://ledger@db/kvcustody`")
def partitions(
    ledger: Ledger = DEFAULT,
    months: Annotated[int, typer.Option(min=1, max=60, help="How many future months to prepare.")] = MONTHS_AHEAD,
    *,
    as_json: Json = False,
) -> None:
    """Make the months to come on PostgreSQL, of every table that grows with traffic, and show those that are there.

    Writers and readers go on. Starting a service or worker as the tables' owner does the same; a month that nobody made
    has its rows in `rest`, and takes them from there when it is made. A purge empties months; what it leaves of the
    oldest (the system log) lies together in `first`.
    """
    check_there(ledger)
    with _open(ledger) as engine:
        check_store(engine)
        new_partitions = ensure_partitions(engine, time.time_ns() // 1000, months)
        with engine.connect() as connection:
            sizes = [
                (part.name, size_bytes(connection, part), size_bytes(connection, part, ("events",)))
                for part in every_partition(connection)
            ]
    if as_json:
        shown = [{"name": name, "bytes": size, "leaves_bytes": leaves} for name, size, leaves in sizes]
        print_json({"made": list(new_partitions), "partitions": shown})
        return
    for name, size, leaves in sizes:
        new = " (new)" if name in new_partitions else ""
        say(f"{name}: {size / 2**20:.1f} MiB, {leaves / 2**20:.1f} of it leaves{new}")
    if not sizes:
        say("this ledger has no partitions: it is one file")


@app.command(
    epilog="Example: `kvcustody db move sqlite:///kvcustody.db postgresql://ledger@db/kvcustody`\n\n"
    "Stop the workers first, then give them the new URL in KVCUSTODY_DATABASE_URL."
)
def move(
    source: Annotated[str, typer.Argument(help=f"The ledger to copy: {_URL}. It is only read.")],
    target: Annotated[str, typer.Argument(help="An empty PostgreSQL database; its schema is created.")],
    *,
    as_json: Json = False,
) -> None:
    """Copy a whole ledger into PostgreSQL: same leaves, trees, root and signatures, checked before it counts.

    The copy is one transaction: a move that fails leaves the target empty and the source as it was.
    """
    with _open(source) as here, _open(target) as there, _progress() as told:
        upgrade_schema(here, progress=told, leaves_max=None, actor=local_name())
        upgrade_schema(there, progress=told)
        moved = move_ledger(here, there, progress=told)
    if as_json:
        print_json(moved._asdict() | {"head": {"size": moved.head.size, "root": moved.head.root.hex()}})
    else:
        rows = several(sum(moved.rows.values()), "row")
        say(f"moved {several(moved.leaves, 'leaf')}, {rows} of {several(len(moved.rows), 'table')}")
        say(f"the root is unchanged: {moved.head.root.hex()} over {moved.head.size} root leaves")


@contextmanager
def _open(url: str) -> Iterator[Engine]:
    engine = open_store(url, timeout_seconds=30.0)
    try:
        yield engine
    finally:
        engine.dispose()


@contextmanager
def _progress() -> Iterator[Progress]:
    """Yield a bar for each kind of work in turn."""
    with progress_bar() as bar:
        task = bar.add_task("ledger", total=None)

        def show(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total)

        yield show
