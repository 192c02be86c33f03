"""Several worker processes on one ledger and the same tenants' logs, one of them killed on the way.

Each log has one order without hole or double, each worker's events are in it in their own order, and what was
acknowledged is there.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path

from sqlalchemy import Engine, select

from kvcustody.audit.evidence.processes.sequence_gaps import gaps
from kvcustody.audit.store.schema.leaf_tables import releases
from kvcustody.audit.store.schema.ledger import events, incarnations, logs
from kvcustody.audit.verify.ledger.fsck_ledger import fsck
from kvcustody.audit.write.append_leaves import register
from standins import builders

WORKERS, EVENTS = 2, 200
WORKER = """
import sys
from pathlib import Path
import structlog
from kvcustody.audit.kinds import ResidencyReleased
from kvcustody.audit.store.database.engine import open_store
from kvcustody.audit.write.event_writer import EventWriter, WriterSettings
from kvcustody.clock import SystemClock
url, spill, name, count = sys.argv[1], Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))  # stdout is what is told
settings = WriterSettings(batch=20, interval_seconds=0.0)
engine = open_store(url, timeout_seconds=30)
writer = EventWriter(engine, worker=name, clock=SystemClock(), spill_directory=spill, settings=settings,
                     clear_names=True)
print(writer.incarnation, flush=True)
assert sys.stdin.readline() == "go\\n"  # all at once
number = 0
while number < count or count < 0:
    number += 10
    writer.submit([ResidencyReleased(1, number + each, f"tenant-{each % 3}", "finish", (), 0) for each in range(10)])
    if number % 100 == 0:
        assert writer.flush(60)
        print(number, flush=True)
writer.close(60)
"""


def test_workers_share_logs_without_hole_or_double(any_store: Engine, tmp_path: Path) -> None:
    url = builders.address_of(any_store)
    workers = [_start(url, tmp_path, f"w-{number}", EVENTS) for number in range(WORKERS)]
    victim = _start(url, tmp_path, "victim", -1)
    everybody = [*workers, victim]
    lives = [_line(worker) for worker in everybody]
    for worker in everybody:
        assert worker.stdin
        worker.stdin.write("go\n")
        worker.stdin.flush()
    killed_at = [int(_line(victim)) for _ in range(2)][-1]
    os.kill(victim.pid, signal.SIGKILL)
    victim.wait()
    for worker in workers:
        assert worker.wait(120) == 0
    for worker in everybody:
        for pipe in (worker.stdin, worker.stdout):
            assert pipe
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
    with any_store.connect() as connection:
        if any_store.dialect.name == "postgresql":  # the victim's last transaction may end after it
            connection.exec_driver_sql("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        assert fsck(connection).problems == [] and gaps(connection) == ()
        ids = dict(connection.execute(select(incarnations.c.uuid, incarnations.c.id)).all())
        for log, size in connection.execute(select(logs.c.id, logs.c.size)).all():
            query = select(events.c.idx, events.c.incarnation, events.c.sequence).where(events.c.log == log)
            rows = connection.execute(query.order_by(events.c.idx)).all()
            assert [row.idx for row in rows] == [*range(size)]
            for life in ids.values():
                own = [row.sequence for row in rows if row.incarnation == life]
                assert all(one < two for one, two in pairwise(own))
        for life, wanted in zip(lives, [*[EVENTS] * WORKERS, killed_at], strict=False):
            ended = set(connection.scalars(select(releases.c.residency).where(releases.c.incarnation == ids[life])))
            assert ended >= {*range(10, wanted + 10)}
        log = select(logs.c.id).where(logs.c.name == "tenant/tenant-1").scalar_subquery()  # ids may have holes
        orders = select(events.c.incarnation).where(events.c.log == log)
        assert {*connection.scalars(orders)} == {*ids.values()}, "the control: they wrote into one log"


def _start(url: str, folder: Path, name: str, count: int) -> subprocess.Popen[str]:
    spill = folder / name
    command = [sys.executable, "-c", WORKER, url, str(spill), name, str(count)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _line(worker: subprocess.Popen[str]) -> str:
    assert worker.stdout
    return worker.stdout.readline().strip()


def test_two_processes_of_a_worker_that_nobody_knows_register_at_once(postgres_store: Engine) -> None:
    """The second waits for the first to commit its name, and goes on with it; control: each is there."""
    registered: list[int] = []

    def second() -> None:
        with postgres_store.connect() as connection, connection.begin():
            connection.exec_driver_sql("SET LOCAL lock_timeout = '20s'; SET LOCAL statement_timeout = '20s'")
            registered.append(register(connection, "b" * 32, "herd", 0, 1).id)

    with postgres_store.connect() as connection, connection.begin():
        registered.append(register(connection, "a" * 32, "herd", 0, 1).id)
        other = threading.Thread(target=second)
        other.start()
        waits = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
        until = time.monotonic() + 15
        while True:
            with postgres_store.connect() as looking:  # one transaction sees who waits as of its first look
                if looking.exec_driver_sql(waits).scalar():
                    break
            assert other.is_alive() and time.monotonic() < until
            time.sleep(0.01)
    other.join(20)
    assert len(set(registered)) == 2
