"""What workers say of themselves is written for all of them together, and soon."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import Engine, event, select, update
from sqlalchemy.exc import OperationalError

from kvcustody.audit.store.database.engine import WRITE
from kvcustody.audit.store.schema.ledger import incarnations
from kvcustody.audit.store.schema.service import service_workers
from kvcustody.governance.service.fleet import workers
from kvcustody.governance.service.problem_details import ProblemError
from kvcustody.governance.service.service import Service
from standins.service.service_world import OFFSET_US
from standins.waiting import until


def lives_of(service: Service, number: int) -> dict[str, str]:
    """So many workers' processes, each with its worker."""
    lives = {uuid.uuid4().hex: f"reports-{uuid.uuid4().hex[:8]}" for _ in range(number)}
    for life, worker in lives.items():
        service.fleet.register(worker, life, OFFSET_US)
    return lives


def said(engine: Engine, lives: dict[str, str]) -> dict[str, int]:
    """The revision that each said last, as the database has it."""
    columns = service_workers.c.incarnation, service_workers.c.policy_revision
    with engine.connect() as connection:
        query = select(*columns).where(service_workers.c.incarnation.in_(lives))
        return {row[0]: row[1] for row in connection.execute(query)}


@pytest.fixture
def commits(service: Service) -> Iterator[list[Any]]:
    connections: list[Any] = []

    def note(connection: Any) -> None:
        connections.append(connection)

    event.listen(service.engine, "commit", note)
    yield connections
    event.remove(service.engine, "commit", note)


def test_reports_of_a_second_are_one_transaction(
    service: Service, commits: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: without the second each report is a transaction."""
    lives = lives_of(service, 12)
    service.fleet.flush(now=True)
    for revision, seconds in ((7, 3600.0), (8, 0.0)):
        monkeypatch.setattr(workers, "_FLUSH_SECONDS", seconds)
        commits.clear()
        for life, worker in lives.items():
            service.fleet.heard(worker, life, revision=revision)
        service.fleet.flush(now=True)
        written = [each for each in commits if each is not None]
        assert len(written) >= len(lives) if not seconds else len(written) <= 2, seconds
        assert said(service.engine, lives) == dict.fromkeys(lives, revision)


def test_a_lone_worker_is_heard_at_once(service: Service) -> None:
    """No batch comes and nobody lists workers: another control plane sees its report all the same."""
    ((life, worker),) = lives_of(service, 1).items()
    service.fleet.flush(now=True)
    time.sleep(workers._FLUSH_SECONDS)
    service.fleet.heard(worker, life, revision=9)
    until(lambda: said(service.engine, {life: worker}) == {life: 9})


def test_what_cannot_be_written_is_written_later(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a later report that came meanwhile is not replaced by it."""
    lives = lives_of(service, 2)
    first, second = lives
    monkeypatch.setattr(workers, "_FLUSH_SECONDS", 3600.0)
    service.fleet.heard(lives[first], first, revision=3)
    service.fleet.heard(lives[second], second, revision=3)
    with monkeypatch.context() as patch:
        patch.setattr(service.fleet, "_engine", Away())
        service.fleet.flush(now=True)
    service.fleet.heard(lives[second], second, revision=4)
    service.fleet.flush(now=True)
    assert said(service.engine, lives) == {first: 3, second: 4}


def test_what_is_written_later_undoes_nothing_that_another_control_plane_heard(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: the other worker told nobody else since."""
    lives = lives_of(service, 2)
    first, second = lives
    monkeypatch.setattr(workers, "_FLUSH_SECONDS", 3600.0)
    for life, worker in lives.items():
        service.fleet.heard(worker, life, revision=3)
    with monkeypatch.context() as patch:
        patch.setattr(service.fleet, "_engine", Away())
        service.fleet.flush(now=True)
    other = {"policy_revision": 4, "seen_us": service.clock.utc_us()}
    with service.engine.connect().execution_options(**WRITE) as connection, connection.begin():
        of_second = service_workers.c.incarnation == second
        connection.execute(update(service_workers).where(of_second).values(other))
    service.fleet.received(second, 1)
    service.fleet.flush(now=True)
    assert said(service.engine, lives) == {first: 3, second: 4}


class Away:
    """A database that cannot be reached."""

    def connect(self) -> Any:
        raise OperationalError("", {}, Exception("away"))


def test_a_process_that_the_database_has_no_more_is_told_so(service: Service) -> None:
    """As after a restore: the next report is refused, so its worker registers again. Control: before, it is taken."""
    ((life, worker),) = lives_of(service, 1).items()
    service.fleet.heard(worker, life, revision=1)
    service.fleet.flush(now=True)
    with service.engine.begin() as connection:
        for table, column in (
            (service_workers, service_workers.c.incarnation),
            (incarnations, incarnations.c.uuid),
        ):
            connection.execute(table.delete().where(column == life))
    service.fleet.heard(worker, life, revision=2)
    service.fleet.flush(now=True)
    with pytest.raises(ProblemError):
        service.fleet.heard(worker, life, revision=3)
