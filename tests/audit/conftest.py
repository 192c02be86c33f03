"""Stores to write to, and a small world that holds custody and reports it as a governor would."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from sqlalchemy import Connection, Engine

from kvcustody.audit.evidence.coverage.conservation import PoolCounts
from kvcustody.audit.kinds import (
    BlocksAttached,
    CustodyEnded,
    Event,
    HoldsNarrowed,
    ReceiptRecorded,
    ResidencyOpened,
    ResidencyReleased,
    WorkerStarted,
)
from kvcustody.audit.kinds.block_runs import gather
from kvcustody.audit.store.database.append_only_triggers import create_triggers
from kvcustody.audit.write.event_writer import EventWriter, WriterSettings
from standins import builders
from standins.audit.ledgers import whole_ledger
from standins.builders import ledger

WITHIN_US = 1_000_000
QUICK = WriterSettings(
    interval_seconds=0.002,
    retry_seconds=0.02,
    durable_seconds=2.0,
    root_interval_seconds=3600.0,  # sealed where a test asks for it, however slow the machine is
)


@pytest.fixture
def store(tmp_path: Path, migrated: Path) -> Iterator[Engine]:
    with ledger(migrated, tmp_path / "ledger.db", timeout_seconds=0.2) as engine:
        engine.connect().close()  # from here on the test process is one of those that have the file open
        yield engine


@pytest.fixture
def unguarded() -> Callable[[Connection], None]:
    """What somebody does who owns the database: triggers do not fire, and SQLite keeps no rule of a table."""

    def lift(connection: Connection) -> None:
        if connection.dialect.name == "postgresql":
            connection.exec_driver_sql("SET session_replication_role = replica")
            return
        connection.detach()  # these settings are the connection's
        connection.exec_driver_sql("PRAGMA ignore_check_constraints = ON")
        connection.exec_driver_sql("PRAGMA defer_foreign_keys = ON")
        names = connection.exec_driver_sql("SELECT name FROM sqlite_master WHERE type = 'trigger'").scalars().all()
        for name in names:
            connection.exec_driver_sql(f"DROP TRIGGER {name}")

    return lift


@pytest.fixture
def guard() -> Callable[[Connection], None]:
    """What hides the act of `unguarded`: SQLite has its triggers again."""
    return lambda connection: None if connection.dialect.name == "postgresql" else create_triggers(connection)


@pytest.fixture
def lock() -> Callable[[Engine], contextlib.AbstractContextManager[None]]:
    return whole_ledger.locked


@pytest.fixture
def make_writer(tmp_path: Path) -> Iterator[Callable[..., EventWriter]]:
    writers: list[EventWriter] = []

    def make(engine: Engine, *, worker: str = "worker-1", settings: WriterSettings = QUICK, **rest: Any) -> EventWriter:
        spill = rest.pop("spill_directory", tmp_path / "spill")
        keys = rest.pop("subject_keys", None)
        writer = builders.writer(engine, spill, worker=worker, settings=settings, keys=keys, clear_names=True, **rest)
        writers.append(writer)
        return writer

    yield make
    for writer in writers:
        with contextlib.suppress(Exception):  # a test may have broken its store on purpose
            writer.close(1.0)


class Held(NamedTuple):
    generation: int
    tenant: str


class World:
    """A pool with residencies, holds, ceilings, evictions and scrubs; every act becomes an event."""

    def __init__(
        self, seed: int, *, blocks: int = 48, shards: int = 2, tenants: int = 3, narrows: bool = False
    ) -> None:
        self.random = random.Random(seed)
        self.narrows = narrows
        self.now = 1_000_000
        self.shards = shards
        self.tenants = [f"tenant-{number}" for number in range(tenants)]
        self.clean = list(range(blocks))
        self.generation = 0
        self.refs: dict[int, set[int]] = {}
        self.holds: dict[int, dict[int, int]] = {}
        self.last_release: dict[int, int] = {}
        self.ceiling: dict[int, int] = {}
        self.held: dict[int, Held] = {}
        self.dirty: list[int] = []
        self.open: dict[int, tuple[str, list[int], list[int]]] = {}
        self.residency = 0
        self.launch = 0
        self.scrubbed = [0] * shards
        self.events: list[Event] = [
            WorkerStarted(self.now, "worker-1", blocks, shards, 4096, "cpu", "test"),
        ]
        self._receipts(list(range(blocks)), boot=True)

    def run(self, steps: int) -> World:
        for _ in range(steps):
            self.step()
        return self

    def step(self) -> None:
        self.now += self.random.randrange(1, 400_000)
        if self.narrows and self.random.random() < 0.1:
            self.narrow(self.random.choice(self.tenants))
        chance = self.random.random()
        if chance < 0.4:
            self.enter()
        elif chance < 0.7 and self.open:
            self.leave(self.random.choice(sorted(self.open)))
        elif chance < 0.85:
            self.expire(evict=self.random.random() < 0.3)
        else:
            self.scrub()

    def enter(self) -> int:
        self.residency += 1
        tenant = self.random.choice(self.tenants)
        mine = [
            block
            for block, held in self.held.items()
            if held.tenant == tenant and self.now < self.ceiling[block] and block not in self.dirty
        ]
        attached = self.random.sample(mine, self.random.randrange(len(mine) + 1)) if mine else []
        written = []
        for _ in range(min(len(self.clean), self.random.randrange(6))):
            block = self.clean.pop(self.random.randrange(len(self.clean)))
            self.generation += 1
            self.held[block] = Held(self.generation, tenant)
            self.refs[block], self.holds[block] = set(), {}
            self.last_release[block], self.ceiling[block] = 0, self.now + 8_000_000
            written.append(block)
        for block in attached + written:
            self.refs[block].add(self.residency)
        self.open[self.residency] = (tenant, attached, written)
        self.events.append(
            ResidencyOpened(
                self.now,
                self.residency,
                tenant,
                f"user-{self.residency % 5}",
                None,
                False,
                "internal",
                (1,),
                self._runs(attached[::2]),
                ("own-scope",),
                1,
                self.now + 8_000_000,
                self._runs(written[::2]),
            )
        )
        if attached[1::2]:
            self.events.append(BlocksAttached(self.now, self.residency, tenant, self._runs(attached[1::2])))
        return self.residency

    def leave(self, residency: int) -> None:
        tenant, attached, written = self.open.pop(residency)
        hold = self.now + self.random.choice((0, 500_000, 3_000_000))
        for block in attached + written:
            self.refs[block].discard(residency)
            self.last_release[block] = self.now
            self.holds[block][residency] = hold
        held = hold if hold > self.now else 0
        self.events.append(ResidencyReleased(self.now, residency, tenant, "finish", self._runs(written[1::2]), held))
        self.expire()

    def expire(self, *, evict: bool = False) -> None:
        """End the custody of what nobody references or holds any longer; evict ends it early."""
        for block, held in sorted(self.held.items()):
            if self.refs[block] or block in self.dirty or not self.last_release[block]:
                continue
            due = max(self.last_release[block], min(self.ceiling[block], max(self.holds[block].values())))
            if due > self.now and not (evict and self.random.random() < 0.5):
                continue
            due = max(self.last_release[block], min(due, self.now))
            self.dirty.append(block)
            self.events.append(
                CustodyEnded(
                    self.now,
                    held.tenant,
                    "internal",
                    self._runs([block]),
                    "expired",
                    due,
                    self.now,
                    self.last_release[block],
                    WITHIN_US,
                    self.ceiling[block],
                )
            )

    def narrow(self, tenant: str) -> None:
        """Every hold of a tenant ends a second earlier than it would, and not before now."""
        standing: dict[int, int] = {}
        for block, held in self.held.items():
            if held.tenant != tenant or block in self.dirty:
                continue
            for residency, until in self.holds[block].items():
                if until > self.now:
                    standing[residency] = max(self.now, until - 1_000_000)
                    self.holds[block][residency] = standing[residency]
        if standing:
            rows = sorted(standing.items())
            self.events.append(
                HoldsNarrowed(self.now, tenant, 2, *(tuple(column) for column in zip(*rows, strict=True)))
            )

    def scrub(self) -> None:
        self.now += 10
        self._receipts(self.dirty)
        for block in self.dirty:
            del self.held[block], self.refs[block], self.holds[block]
            self.clean.append(block)
        self.dirty = []

    def counts(self) -> PoolCounts:
        return PoolCounts(
            allocated_total=self.generation,
            unreported=sum(len(written[1::2]) for _, _, written in self.open.values()),
            live_blocks=len(self.held) - len(self.dirty),
            fenced=0,
            dirty=len(self.dirty),
            quarantined=0,
            scrubbed=tuple(self.scrubbed),
            open_residencies=len(self.open),
        )

    def _receipts(self, blocks: list[int], *, boot: bool = False) -> None:
        if not blocks:
            return
        self.launch += 1
        owners = {None: blocks} if boot else {}
        for block in () if boot else blocks:
            owners.setdefault(self.held[block].tenant, []).append(block)  # type: ignore[arg-type]
        for shard in range(self.shards):
            self.scrubbed[shard] += len(blocks)
            for tenant, theirs in owners.items():
                generations = [0 if boot else self.held[block].generation for block in theirs]
                runs = gather(np.array(theirs), np.array(generations))
                self.events.append(
                    ReceiptRecorded(
                        self.now,
                        self.launch,
                        shard,
                        tenant,
                        "memset",
                        f"cpu:{shard}",
                        4096 * len(theirs),
                        self.now,
                        self.now + 5,
                        "full",
                        1.0,
                        len(theirs),
                        "ok",
                        runs,
                    )
                )

    def _runs(self, blocks: list[int]) -> Any:
        return gather(np.array(blocks, np.int64), np.array([self.held[block].generation for block in blocks], np.int64))


@pytest.fixture
def world() -> Callable[..., World]:
    return World


@pytest.fixture(scope="module")
def world_class() -> type[World]:
    """`World` itself, for fixtures that live as long as their module."""
    return World
