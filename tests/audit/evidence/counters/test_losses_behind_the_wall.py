"""A tenant's holdings are unknown to the tenant too while a running process has lost leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sqlalchemy import Engine
from sqlalchemy.exc import ProgrammingError

from kvcustody.audit.evidence.counters.read_figures import tenant_totals
from kvcustody.audit.kinds import GapRecorded, WorkerStopped
from kvcustody.audit.leaf.batch import read_leaves
from kvcustody.audit.store.database.engine import WRITE, open_store
from kvcustody.audit.store.database.postgres_roles import WORKER
from kvcustody.audit.store.schema.recorded_losses import LOSING_FUNCTION
from kvcustody.audit.write.append_leaves import Appender
from kvcustody.governance.service.row_level_security import restrict_to_tenant
from standins.audit.falsified import leaf_bytes
from standins.postgres import walled_ledger

UUID = "ab" * 16


@pytest.fixture(scope="module")
def walled() -> Iterator[Engine]:
    with walled_ledger() as url:
        engine = open_store(url)
        yield engine
        engine.dispose()


def held(engine: Engine, tenant: str, *, behind_the_wall: bool) -> int | None:
    with engine.connect() as connection, connection.begin():
        if behind_the_wall:
            restrict_to_tenant(connection, tenant)
        return next(row.held_blocks for row in tenant_totals(connection) if row.tenant == tenant)


def append(engine: Engine, events: list[Any], first: int) -> None:
    with engine.connect().execution_options(**WRITE) as connection, connection.begin():
        Appender().append(connection, read_leaves(leaf_bytes(events, UUID, first)))


def test_both_sides_of_the_wall_say_the_same(walled: Engine, world: Callable[..., Any]) -> None:
    """Control: before the loss both say the same number, and the wall hides the record of the loss."""
    running = world(1).run(30)
    append(walled, running.events, 1)
    both = {held(walled, "tenant-0", behind_the_wall=wall) for wall in (False, True)}
    assert len(both) == 1 and None not in both
    append(walled, [GapRecorded(running.now, "disk", 1000, 1009)], 1010)
    assert [held(walled, "tenant-0", behind_the_wall=wall) for wall in (False, True)] == [None, None]
    with walled.connect() as connection, connection.begin():
        restrict_to_tenant(connection, "tenant-0")
        assert connection.exec_driver_sql("SELECT count(*) FROM outages").scalar() == 0
    with walled.connect() as connection, connection.begin():
        connection.exec_driver_sql(f"SET LOCAL ROLE {WORKER}")
        with pytest.raises(ProgrammingError, match="permission denied"):
            connection.exec_driver_sql(f"SELECT {LOSING_FUNCTION}()")
    append(walled, [WorkerStopped(running.now, "worker-1", "closed", 0, ())], 1011)
    assert [held(walled, "tenant-0", behind_the_wall=wall) for wall in (False, True)] == [0, 0]
