"""A worker's role on PostgreSQL writes a worker's leaves, and no order: the database refuses it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from sqlalchemy import Engine, select, text, update
from sqlalchemy.exc import DBAPIError

from kvcustody.audit.kinds import (
    BARE,
    EnforcementOrdered,
    ErasureRequested,
    IssuerAssigned,
    KeysOrdered,
    PolicyActivated,
    WorkerStarted,
)
from kvcustody.audit.leaf import Context, leaves
from kvcustody.audit.leaf.batch import read_leaves
from kvcustody.audit.leaf.leaf_schema import ORDERS
from kvcustody.audit.store.database.engine import open_store
from kvcustody.audit.store.database.postgres_roles import AUDITOR, WORKER, WRITER, order_tables
from kvcustody.audit.store.schema.leaf_tables import outages
from kvcustody.audit.store.schema.ledger import events, incarnations, workers
from kvcustody.audit.write.append_leaves import Appender
from kvcustody.audit.write.event_writer import EventWriter
from kvcustody.errors import LedgerUnavailable
from standins.postgres import set_up_roles_in_turn

ORDER = EnforcementOrdered(5, "monitor", (), 0, "ab" * 16, 1 << 32, "olga", "forged")
ERASURE = ErasureRequested(5, "e-1", "acme", "tenant", None, None, 10, "dora")
ISSUER = IssuerAssigned(5, "https://evil.example", BARE, "governor")
HONEST = PolicyActivated(5, 1, "released", "shared", "d", "one")


@pytest.fixture
def as_role(postgres_store: Engine) -> Iterator[Callable[[str], Engine]]:
    set_up_roles_in_turn(postgres_store)
    url, engines = postgres_store.url.render_as_string(False), list[Engine]()

    def open_as(role: str) -> Engine:
        engines.append(open_store(url + ("&" if "?" in url else "?") + f"options=-c%20role%3D{role}"))
        return engines[-1]

    yield open_as
    for engine in engines:
        engine.dispose()


def kinds(store: Engine) -> list[str]:
    with store.connect() as connection:
        return list(connection.scalars(select(events.c.kind)))


def test_a_worker_writes_its_leaves_and_no_order(
    postgres_store: Engine, as_role: Callable[[str], Engine], make_writer: Callable[..., EventWriter]
) -> None:
    writer = make_writer(as_role(WORKER))
    writer.submit_durable(HONEST)
    for order in (ORDER, KeysOrdered(5, "acme", "destroy", "olga", "forged"), ISSUER):
        with pytest.raises(LedgerUnavailable):
            writer.submit_durable(order)
    writer.submit([ERASURE])
    assert writer.flush()
    assert "policy-activated" in kinds(postgres_store) and not ORDERS & set(kinds(postgres_store))
    with postgres_store.connect() as connection:
        assert "gap" in connection.scalars(select(outages.c.kind)).all(), "what was refused is named"


@pytest.mark.parametrize("role", [WORKER, WRITER])
def test_a_role_that_writes_gives_a_process_its_name_late(
    postgres_store: Engine, as_role: Callable[[str], Engine], role: str
) -> None:
    """Control: a role that reads may not."""
    context = Context("a" * 32, 1 << 50, lambda *_: "")
    late = WorkerStarted(2, "gpu-0", 1000, 1, 4096, "cpu", "test")
    name = select(workers.c.name).join(incarnations, incarnations.c.worker == workers.c.id)
    for number, event in enumerate((HONEST._replace(at_us=1), late), 1):
        with as_role(role).begin() as connection:
            Appender().append(connection, read_leaves([leaf.data for leaf in leaves(event, context, number)]))
    with postgres_store.connect() as connection:
        assert connection.scalars(name).all() == ["gpu-0"]
    with pytest.raises(DBAPIError), as_role(AUDITOR).begin() as connection:
        connection.execute(update(incarnations).values(worker=incarnations.c.worker))


def test_a_leaf_of_a_kind_that_nobody_knows_is_refused(
    postgres_store: Engine, as_role: Callable[[str], Engine], make_writer: Callable[..., EventWriter]
) -> None:
    """With its control: the writer's role inserts the same row."""
    writer = make_writer(as_role(WRITER))
    writer.submit_durable(HONEST)
    columns = [column.name for column in events.columns]
    values = {"idx": "(SELECT size FROM logs WHERE logs.id = log)", "sequence": "sequence + 1000"}
    values |= {"kind": "'order-of-a-later-version'"}
    chosen = ", ".join(values.get(name, name) for name in columns)
    statement = f"INSERT INTO events ({', '.join(columns)}) SELECT {chosen} FROM events LIMIT 1"
    with (
        as_role(WORKER).connect() as connection,
        pytest.raises(DBAPIError, match="a worker writes no orders"),
    ):
        connection.exec_driver_sql(statement)
    with as_role(WRITER).connect() as connection:
        connection.exec_driver_sql(statement)


@pytest.mark.parametrize("by", ["the table", "its partition"])
def test_a_login_that_does_not_take_its_role_writes_no_order(
    postgres_store: Engine, as_role: Callable[[str], Engine], make_writer: Callable[..., EventWriter], by: str
) -> None:
    """A login inherits what its role may, and not the role's name. Control: the writer's role inserts the same row."""
    make_writer(as_role(WRITER)).submit_durable(ORDER)
    with postgres_store.begin() as connection:
        login = f"login_{connection.scalar(text('SELECT oid FROM pg_database WHERE datname = current_database()'))}"
        connection.exec_driver_sql(f"CREATE ROLE {login} LOGIN IN ROLE {WORKER}")
        place = connection.scalar(text("SELECT tableoid::regclass::text FROM events LIMIT 1"))
    table = "events" if by == "the table" else place
    columns = [column.name for column in events.columns]
    values = {"idx": "(SELECT size FROM logs WHERE name = 'system')", "sequence": "1000"}
    with postgres_store.connect() as connection:
        row = connection.execute(select(events).where(events.c.kind == "enforcement-ordered")).one()._asdict()
    values = {name: f"%({name})s" for name in columns} | values
    statement = f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({', '.join(values[name] for name in columns)})"
    try:
        with (
            as_role(login).connect() as connection,
            pytest.raises(DBAPIError, match=r"security policy|denied"),
        ):
            connection.exec_driver_sql(statement, row)
        with as_role(WRITER).connect() as connection:
            connection.exec_driver_sql(statement.replace(f"INTO {table}", "INTO events"), row)
    finally:
        with postgres_store.begin() as connection:
            connection.exec_driver_sql(f"DROP ROLE {login}")


def test_the_role_that_may_write_orders_does(
    postgres_store: Engine, as_role: Callable[[str], Engine], make_writer: Callable[..., EventWriter]
) -> None:
    """Control."""
    writer = make_writer(as_role(WRITER))
    writer.submit_durable(ORDER)
    writer.submit([ERASURE])
    assert writer.flush()
    assert {"enforcement-ordered", "erasure-requested"} <= set(kinds(postgres_store))


@pytest.mark.parametrize("table", sorted(order_tables()))
def test_a_row_of_an_order_without_its_leaf_is_refused(
    postgres_store: Engine, as_role: Callable[[str], Engine], table: str
) -> None:
    statement = f"INSERT INTO {table} SELECT * FROM {table}"
    with as_role(WORKER).connect() as connection, pytest.raises(DBAPIError, match="permission denied"):
        connection.exec_driver_sql(statement)
    with as_role(WRITER).connect() as connection:
        connection.exec_driver_sql(statement)  # control: nothing is there to be inserted


def test_every_table_of_orders_says_so() -> None:
    assert order_tables() == {"cases", "case_steps", "erasures", "legal_holds", "retention_purges"}
