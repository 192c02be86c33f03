"""Writers that are started and killed, one after the other, on one ledger; what must be true then."""

from __future__ import annotations

import os
import random
import select as select_module
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from sqlalchemy import Engine, Select, and_, func, select

from kvcustody.audit.evidence.processes.sequence_gaps import gaps
from kvcustody.audit.store.schema.leaf_tables import outages, receipts, releases, residencies
from kvcustody.audit.store.schema.ledger import events, incarnations, workers
from kvcustody.audit.verify.ledger.fsck_ledger import fsck
from standins import builders
from standins.audit.crash.crash_content import check_content, unknown_operations

CALLS = "pwrite64,write,fsync,fdatasync,ftruncate,rename,unlink"


class Kill(NamedTuple):
    seed: int
    incarnation: str
    durable: int
    submitted: int
    refused: tuple[int, ...]  # the last that their caller was refused: what acts on them never happened


class Lives:
    """Starts writers on one ledger; `number` makes the seed of each."""

    def __init__(self, server: subprocess.Popen[str], store: Engine, folder: Path) -> None:
        self._server = server
        self._ledger = builders.ledger_file(store)
        self.spill = folder / "spill"
        self._folder = folder

    def start(self, seed: int, pace: str) -> tuple[int, Path]:
        """A writer's process id, and the file that it shows its progress in once it has started."""
        progress = self._folder / f"progress-{seed}"
        self._tell("go", self._ledger, self.spill, progress, seed, pace)
        return int(self._reply()), progress

    def reap(self, child: int, seconds: float | None = None) -> None:
        """Wait until it is dead; kill it when it lives longer than that."""
        self._tell("wait")
        assert self._server.stdout
        if seconds is not None and not select_module.select([self._server.stdout], [], [], seconds)[0]:
            os.kill(child, signal.SIGKILL)
        assert self._reply() == "dead\n"

    def _tell(self, *words: Any) -> None:
        print(*words, file=self._server.stdin, flush=True)

    def _reply(self) -> str:
        assert self._server.stdout
        return self._server.stdout.readline()


@contextmanager
def lives(store: Engine, folder: Path, fault: str | None = None) -> Iterator[Lives]:
    """A server of writers, each with a fault in its system calls (`strace -e inject=FAULT`) where one is given."""
    rule = ["-e", f"trace={CALLS}", "-e", f"inject={fault}"]
    tracer = ["strace", "-f", "-o", "/dev/null", *rule] if fault else []
    server = subprocess.Popen(
        [*tracer, sys.executable, str(Path(__file__).with_name("crash_server.py"))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL if fault else None,
        text=True,
    )
    assert server.stdin
    try:
        yield Lives(server, store, folder)
    finally:
        server.stdin.close()
        server.wait(20)


def kill_often(store: Engine, folder: Path, kills: int, seed: int = 0) -> list[Kill]:
    """Start a writer, kill it, and again; each start replays and closes what the one before it left."""
    chance = random.Random(kills + seed)
    killed: list[Kill] = []
    with lives(store, folder) as those:
        for number in range(kills):
            child, progress = those.start(number, "steady")
            in_start = chance.random() < 0.15  # while it replays, or closes the dead
            deadline = time.monotonic() + (0.05 if in_start else 30)
            while not progress.exists() and time.monotonic() < deadline:
                time.sleep(0.001)
            if (
                not in_start and chance.random() < 0.4
            ):  # often while the database is locked, however slow the machine is
                until = time.monotonic() + 2
                while not any(those.spill.glob("*.spill")) and time.monotonic() < until:
                    time.sleep(0.001)
            time.sleep(0.1 * chance.random())
            os.kill(child, signal.SIGKILL)
            those.reap(child)
            killed += progress_of(progress, number)
    return killed


def inject(
    store: Engine, folder: Path, fault: str, seeds: Sequence[int], *, pace: str = "steady", seconds: float
) -> list[Kill]:
    """Run writers one after the other, each with the fault; one that it does not kill is killed when its time is up."""
    killed: list[Kill] = []
    with lives(store, folder, fault) as those:
        for seed in seeds:
            child, progress = those.start(seed, pace)
            those.reap(child, seconds)
            killed += progress_of(progress, seed)
    return killed


def progress_of(path: Path, seed: int) -> list[Kill]:
    """What a dead writer had told; nothing where it died during its start."""
    words = path.read_text().strip("\0").split() if path.exists() else []
    if not words:
        return []
    return [Kill(seed, words[0], int(words[1]), int(words[2]), tuple(map(int, words[3:])))]


def check_exactly_once(store: Engine, make_writer: Any, folder: Path, kills: list[Kill]) -> int:
    """Replay what is left, then: nothing acknowledged is missing, nothing is there twice, each life's record is what it
    did, in its order, and the trees agree.

    Returns how many operations the ledger holds.
    """
    last = make_writer(store, worker="victim", spill_directory=folder / "spill")
    assert last.flush(60)
    last.close()
    assert not list((folder / "spill").glob("*.spill"))
    assert [kill for kill in kills if missing(store, kill, kill.durable)] == []
    with store.connect() as connection:
        assert {name: connection.execute(query).all() for name, query in _twice()} == {name: [] for name, _ in _twice()}
        assert [gap for gap in gaps(connection) if "continuation" in gap.cause] == []
        # a life ends blocks that nobody had, so that what tenants hold does not add up
        problems = [found for found in fsck(connection).problems if " holds " not in found.what]
        assert problems == [], problems
        for kill in kills:
            check_content(connection, kill.seed, kill.incarnation)
        assert unknown_operations(connection, [*(kill.incarnation for kill in kills), last.incarnation]) == 0
        query = select(incarnations.c.uuid, incarnations.c.end, workers.c.name == "victim")
        ends = connection.execute(query.join(workers, workers.c.id == incarnations.c.worker)).all()
        assert {end for uuid, end, victim in ends if victim and uuid != last.incarnation} <= {"died"}
        assert {end for _, end, victim in ends if not victim} <= {
            "stopped"
        }  # whoever closed one of them, killed or not
        return int(connection.scalar(select(func.count()).select_from(events)) or 0)


def _twice() -> Iterator[tuple[str, Select[Any]]]:
    """One operation under two sequences: what the key of `events` cannot refuse."""
    for name, table, columns in (
        ("receipt", receipts, ("incarnation", "launch")),
        ("opening", residencies, ("incarnation", "residency")),
        ("release", releases, ("incarnation", "residency")),
    ):
        found = [table.c[column] for column in columns]
        yield name, select(*found).group_by(*found).having(func.count() > 1)


def missing(store: Engine, kill: Kill, upto: int) -> int:
    """How many sequences up to this one neither have a leaf nor were refused, on record or to their caller."""
    with store.connect() as connection:
        life = connection.scalar(select(incarnations.c.id).where(incarnations.c.uuid == kill.incarnation))
        found = set(connection.scalars(select(events.c.sequence).where(events.c.incarnation == life)))
        withdrawn = and_(outages.c.incarnation == life, outages.c.kind == "withdrawn")
        ranges = select(outages.c.first_sequence, outages.c.last_sequence).where(withdrawn)
        for first, last in connection.execute(ranges):
            found |= set(range(first, last + 1))
    return len(set(range(1, upto + 1)) - found - set(kill.refused))
