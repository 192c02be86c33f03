"""What the engine tells routers and the ledger is true, scoped and complete."""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path

from kvcustody.audit.evidence.coverage.summary import coverage
from kvcustody.audit.kinds import (
    CustodyEnded,
    ReceiptRecorded,
    ResidencyOpened,
    ResidencyReleased,
    WorkerStarted,
)
from kvcustody.audit.kinds.block_runs import flatten
from kvcustody.audit.store.database.engine import open_store
from kvcustody.audit.write.event_writer import EventWriter
from kvcustody.integrations.events.block_event import CLEARED, STORED, check_event, split_keys
from kvcustody.migrations.upgrade import upgrade
from kvcustody.testkit.conformance.case import (
    Bench,
    Case,
    CaseHarness,
    case,
    expect,
    expect_equal,
    person,
)
from kvcustody.testkit.conformance.policy import IDLE_US, SECOND_US, WITHIN_US

ALPHA, BOB, BETA = person("alpha"), person("alpha", "bob"), person("beta")


def workload(rig: CaseHarness) -> None:
    """Run every kind of beginning and end, under pressure, with hits."""
    for number in range(3):
        shared = rig.prompt(3)
        for who in (ALPHA, BETA, BOB):
            rig.ask(who, shared, 3)
            rig.ask(who, (*shared, *rig.prompt(2)), 3)
        request = rig.submit(BETA, rig.prompt(5, 2), 9)
        rig.until_running(request)
        rig.steps(number)
        if rig.has("preemption"):
            rig.engine.preempt(request)
            rig.steps(number)
        rig.engine.abort(request)
        rig.idle(SECOND_US)


@case("events/truth", "events")
def truth(bench: Bench) -> None:
    """Replayed, the events give the engine's own index, after every step; nothing is removed that was not stored."""
    rig = bench.open(blocks=24)
    known: Counter[bytes] = Counter()
    stored = 0

    def compare() -> None:
        nonlocal stored
        for event in rig.engine.events():
            keys = split_keys(event.keys)
            if event.kind == CLEARED:
                known.clear()
            elif event.kind == STORED:
                stored += len(keys)
                known.update(keys)
            else:
                known.subtract(keys)
            wrong = [key for key in keys if known[key] < 0]
            expect(not wrong, f"{len(wrong)} keys were removed that were not stored")
        told = {key for key, count in known.items() if count}
        expect_equal(len(told ^ rig.engine.indexed()), 0, "keys on which events and index disagree")

    for _ in range(6):
        for who in (ALPHA, BETA):
            request = rig.submit(who, rig.prompt(4, 2), 4)
            for _ in range(12):
                rig.engine.step()
                compare()
            rig.finish(request)
            compare()
    rig.idle(IDLE_US + WITHIN_US)
    compare()
    expect(stored > 24, f"only {stored} blocks were stored (control)")
    expect_equal(len(rig.engine.indexed()), 0, "keys left in the index")


@case("events/scope", "events")
def scope(bench: Bench) -> None:
    """Every event, removals too, has its typed scope; by default none carries token ids or salts."""
    rig = bench.open(blocks=24)
    owner_of: dict[bytes, str] = {}
    seen: Counter[str] = Counter()
    for who in (ALPHA, BETA, BOB) * 3:
        salt = "pepper" if rig.has("salts") and who is BOB else None
        rig.ask(who, rig.prompt(4), 4, salt=salt)
        _expect_scoped(rig, who.tenant, owner_of, seen)
    rig.idle(IDLE_US + WITHIN_US)
    _expect_scoped(rig, "", owner_of, seen)
    expect(seen["stored"] > 24 and seen["removed"] > 24, f"too few events (control): {dict(seen)}")


def _expect_scoped(rig: CaseHarness, tenant: str, owner_of: dict[bytes, str], seen: Counter[str]) -> None:
    for event in rig.engine.events():
        check_event(event)
        keys = split_keys(event.keys)
        seen[event.kind] += len(keys)
        expect(not len(event.tokens), f"a `{event.kind}` event carries token ids")
        expect(event.salt is None, f"a `{event.kind}` event carries a salt")
        if event.kind == STORED:
            expect_equal(event.scope.tenant, tenant, "tenant of a stored event")
            owner_of.update(dict.fromkeys(keys, event.scope.tenant))
        elif event.kind != CLEARED:
            owners = {owner_of.get(key, "nobody") for key in keys}
            expect_equal(owners, {event.scope.tenant}, "owners of what a removed event names")


@case("ledger/complete")
def complete(bench: Bench) -> None:
    """Every residency that opened is released, every block that was handed out ends with a receipt of every shard."""
    rig = bench.open(blocks=24)
    workload(rig)
    rig.idle(IDLE_US + WITHIN_US)
    rig.healthy()
    rig.engine.close()
    opened = Counter(event.residency for event in rig.ledger(ResidencyOpened))
    released = Counter(event.residency for event in rig.ledger(ResidencyReleased))
    expect(len(opened) > 20, f"only {len(opened)} residencies (control)")
    expect_equal(released, opened, "residencies released, by residency opened")
    written = _handles([*rig.ledger(ResidencyOpened), *rig.ledger(ResidencyReleased)], "written")
    doubled = [handle for handle, count in written.items() if count > 1]
    expect(not doubled, f"{len(doubled)} (block, generation) were handed out twice, as {doubled[:3]}")
    ended = _handles(rig.ledger(CustodyEnded), "runs")
    expect_equal(ended, written, "custody ends, by (block, generation) handed out")
    for shard in range(rig.capabilities.shards):
        receipts = [event for event in rig.ledger(ReceiptRecorded) if event.shard == shard and event.tenant]
        expect_equal(_handles(receipts, "runs"), written, f"receipts of shard {shard}")


def _handles(events: list[object], runs: str) -> Counter[tuple[int, int]]:
    """Return how often each (block, generation) is listed."""
    counted: Counter[tuple[int, int]] = Counter()
    for event in events:
        _, blocks, generations = flatten(getattr(event, runs))
        counted.update(zip(blocks.tolist(), generations.tolist(), strict=True))
    return counted


@case("ledger/coverage")
def covered(bench: Bench) -> None:
    """The audit room's own arithmetic over the ledger: all custody covered, in time, nothing disputed or overdue."""
    rig = bench.open(blocks=24)
    workload(rig)
    rig.idle(IDLE_US + WITHIN_US)
    rig.engine.close()
    with tempfile.TemporaryDirectory() as folder:
        store = open_store(f"sqlite:///{Path(folder) / 'ledger.sqlite'}")
        upgrade(store)
        writer = EventWriter(
            store, worker="kit", clock=rig.clock, spill_directory=Path(folder) / "spill", clear_names=True
        )
        caps = rig.capabilities
        writer.submit([WorkerStarted(1, "kit", caps.blocks, caps.shards, 1, "cpu", caps.engine, 1)])
        writer.submit(rig.engine.ledger())
        expect(writer.flush(), "the events cannot be written")
        with store.connect() as connection:
            total = coverage(connection).total
        writer.close()
        store.dispose()
    expect(total.due > 60, f"only {total.due} units were due (control)")
    expect_equal((total.in_time, total.overdue, total.disputed), (total.due, 0, 0), "(in time, overdue, disputed)")


@case("ledger/verified")
def verified(bench: Bench) -> None:
    """Where the policy says `verify: all`, every receipt says that every block was read back."""
    rig = bench.open(blocks=24)
    workload(rig)
    rig.engine.close()
    receipts = [event for event in rig.ledger(ReceiptRecorded) if event.tenant]
    expect(bool(receipts), "no receipts (control)")
    levels = Counter(event.level for event in receipts)
    expect_equal(set(levels), {"full"}, f"verification levels of {len(receipts)} receipts")
    for event in receipts:
        expect_equal(event.verified, sum(len(run.blocks) for run in event.runs), "blocks read back of a receipt")


CASES: tuple[Case, ...] = (truth, scope, complete, covered, verified)
