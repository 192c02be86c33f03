"""Plants orphans of every class in a working process, one defect at a time, and says what a scan must find."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from sqlalchemy import Engine, insert, select

from kvcustody.allocator.prefix.node import KEY_BYTES, Node
from kvcustody.allocator.prefix.sequence import RunningSequence
from kvcustody.audit.kinds import CustodyEnded, Event, ReceiptRecorded, ResidencyReleased, WorkerStarted
from kvcustody.audit.leaf import Context, leaf
from kvcustody.audit.leaf.batch import read_leaves
from kvcustody.audit.store.database.engine import WRITE
from kvcustody.audit.store.schema.ledger import events, incarnations, logs
from kvcustody.audit.write.append_leaves import Appender
from kvcustody.clock import Clock
from kvcustody.governance.orphans.ledger_join import WriterJoin
from kvcustody.governance.tiers.copy_event import CopyEvent
from kvcustody.governance.tiers.copy_leaves import copy_leaves
from standins import builders
from standins.erasure.file_tier import FileTier
from standins.orphans.custody_tier import LIFE_US, CustodyTier
from standins.robust.custody_world import CustodyWorld

Planted = Counter[str]


def plant_dead_process(store: Engine, folder: Path, clock: Clock, name: str) -> None:
    """A process that announced memory and went, and a later one of its name that has closed nothing yet."""
    spill = folder / name
    spill.mkdir()
    builders.record(
        store,
        spill,
        [WorkerStarted(clock.now_us(), name, 8, 1, 4096, "cpu", "test")],
        worker=name,
        clock=clock,
    )
    context = Context(name.encode().hex().zfill(32), 0, lambda *_: "")
    later = leaf(WorkerStarted(clock.now_us(), name, 8, 1, 4096, "cpu", "test"), context, 1)
    with store.connect().execution_options(**WRITE) as connection, connection.begin():
        Appender().append(connection, read_leaves([later]))


class Garden:
    """A process with a ledger, a tier, and requests and cache of three tenants."""

    def __init__(self, store: Engine, folder: Path, seed: int) -> None:
        self.random = random.Random(seed)
        self.names = random.Random(seed + 1)
        self.dropping: tuple[type, ...] = ()
        self.world = CustodyWorld(store, folder, seed=seed, blocks=160, chosen=self._chosen)
        self.world.break_a_block = lambda: None  # type: ignore[method-assign]
        self.store = store
        self.folder = folder
        self.tier = FileTier(folder / "tier")
        self.governor = self.world.governor
        self.copies = CustodyTier(folder / "copies", self.world.clock, self.world.writer.submit)
        self.governor.erasures.tiers += [self.tier, self.copies]
        self.manager = self.governor.managers[0]
        self.join = WriterJoin(self.world.writer)
        self.serial = 0
        self.plants: dict[str, Callable[[], Planted]] = {
            "lost finish": self.lost_finish,
            "reference without sequence": self.leaked_reference,
            "blocks of nobody": self.leaked_blocks,
            "sequence without reference": self.double_release,
            "slot lost": self.lost_slot,
            "hold without residency": self.leaked_hold,
            "residency without block": self.blockless,
            "stuck fence": self.stuck_fence,
            "dead incarnation": self.dead_process,
            "unreachable chain": self.unreachable,
            "receipt without release": self.dropped_end,
            "ledger gap": self.dropped_end_and_receipt,
            "sequence gap": self.skipped_sequences,
            "release lost": self.dropped_release,
            "tier object without index": self.stray_object,
            "index without tier object": self.stray_entry,
            "copy without custody": self.unrecorded_copy,
            "copy whose end is on record": self.ended_copy,
            "custody without copy": self.lost_copy,
            "copies lost and unrecorded": self.swapped_copies,
            "copy past its ceiling": self.late_copy,
        }

    def _chosen(self, event: Event) -> bool:
        return isinstance(event, self.dropping)

    def close(self) -> None:
        """End the writer's thread; what was planted stays."""
        self.world.writer.close(5.0)

    def quiet(self) -> None:
        """Some running requests, some cache, nothing on its way; and copies that are not due."""
        self.copies.expire()
        while len(self.copies.held) < 3:
            self.copies.keep(self.names.randbytes(32), "gamma", 10 * LIFE_US)
        for fence in self.world.fences:
            self.governor.retire(fence)
        self.world.fences.clear()
        while len(self.world.lengths) > 6:
            request = next(iter(self.world.lengths))
            del self.world.lengths[request]
            self.governor.release(request)
        while len(self.world.lengths) < 3:
            if self.world.admit(self.random.choice(("alpha", "beta", "gamma"))) is None:
                self.world.wait(30)
        request = next(iter(self.world.lengths))
        del self.world.lengths[request]
        self.governor.release(request)  # something is cached
        self.world.wait(3)

    def running(self) -> RunningSequence:
        return self.random.choice(list(self.governor.running.values()))

    def cached(self) -> Node:
        nodes = [node for node in self.manager.tree.nodes() if node.refs == 0 and node.first_child is None]
        return self.random.choice(nodes)

    # -- the process ----------------------------------------------------------------------------------------

    def lost_finish(self) -> Planted:
        handle = self.random.choice(list(self.governor.running))
        del self.governor._live[handle]
        self.world.lengths.pop(handle, None)
        return Counter({"lost finish": 1, "residency without block": 1})  # in the process, and in the ledger

    def leaked_reference(self) -> Planted:
        """Attached, and the sequence never came to be: one reference too many on every node of a path."""
        leaf: Node | None = self.cached()
        assert leaf is not None
        self.manager.tree.attach(leaf, self.world.clock.now_us())
        count = 0
        while leaf is not None:
            leaf, count = leaf.parent, count + 1
        return Counter({"reference without sequence": count})

    def leaked_blocks(self) -> Planted:
        account = self.random.choice(list(self.manager.accounts.values()))
        now_us = self.world.clock.now_us()
        if self.manager.reclaimer.ensure(account, 2, now_us) is not None:
            return Counter()
        self.manager._hand_out(account, 2)
        return Counter({"reference without sequence": 1})

    def double_release(self) -> Planted:
        """A path is released once too often, under a running request."""
        sequence = self.running()
        alone = [node for node in _path(sequence.leaf) if node.refs == 1 and node.holds == 0]
        shared = len(list(_path(sequence.leaf))) - len(alone)
        if not list(_path(sequence.leaf)):
            return Counter()
        self.manager.tree.release(sequence.leaf, None, self.world.clock.now_us(), "twice")
        self.world.lengths = {
            handle: length
            for handle, length in self.world.lengths.items()
            if not alone or self.governor.running[handle] is not sequence
        }
        return Counter({"sequence without reference": shared + bool(alone)})

    def lost_slot(self) -> Planted:
        sequence = self.running()
        self.manager.release(sequence, self.world.clock.now_us(), "behind its back")
        self.world.lengths = {
            handle: length
            for handle, length in self.world.lengths.items()
            if self.governor.running[handle] is not sequence
        }
        return Counter({"sequence without reference": 1})

    def leaked_hold(self) -> Planted:
        self.cached().holds += 1
        return Counter({"hold without residency": 1})

    def blockless(self) -> Planted:
        account = self.random.choice(list(self.manager.accounts.values()))
        domain = next(iter(self.manager.tree.nodes())).domain
        now_us = self.world.clock.now_us()
        hold = self.manager.residency(account, domain, None, None, now_us)
        hold.deadline_us, hold.is_held = now_us + 10_000_000_000, True
        self.manager.hold_table.add(hold)
        return Counter({"residency without block": 1})

    def stuck_fence(self) -> Planted:
        handle = self.random.choice(list(self.governor.running))
        fence = self.governor.fence([handle])
        self.world.lengths.pop(handle, None)
        before = sum(len(part.stuck) for part in self.manager.pool.partitions)
        self.governor.release(handle)
        self.world.wait(40)
        self.world.fences.append(fence)
        after = sum(len(part.stuck) for part in self.manager.pool.partitions)
        return Counter({"stuck fence": after - before}) if after > before else Counter()

    def unreachable(self) -> Planted:
        node = self.cached()
        if not node.keys:
            return Counter()
        key = node.keys[:KEY_BYTES]
        index = self.manager.tree.index
        del index.stripes[hash(key) & index.mask][key]
        return Counter({"unreachable chain": 1})

    # -- the ledger -----------------------------------------------------------------------------------------

    def _dropped(self, *kinds: type) -> int:
        """Events of these kinds about one ended request do not reach the ledger; returns how many were lost."""
        before = len(self.world.ledger.dropped)
        self.dropping = kinds
        handle = self.random.choice(list(self.governor.running))
        self.world.lengths.pop(handle, None)
        sequence = self.governor.running[handle]
        sequence.stop_publishing()
        self.governor.release(handle)
        self.world.wait(3)
        self.dropping = ()
        return len(self.world.ledger.dropped) - before

    def dropped_end(self) -> Planted:
        self._dropped(CustodyEnded)
        lost = [event for event in self.world.ledger.dropped if isinstance(event, CustodyEnded)]
        self.world.ledger.dropped.clear()
        return Counter({"receipt without release": len({event.tenant for event in lost})})

    def dropped_end_and_receipt(self) -> Planted:
        self._dropped(CustodyEnded, ReceiptRecorded)
        lost = [event for event in self.world.ledger.dropped if isinstance(event, CustodyEnded)]
        self.world.ledger.dropped.clear()
        return Counter({"ledger gap": -1 if lost else 0})  # at least one, by writer and list

    def dropped_release(self) -> Planted:
        lost = self._dropped(ResidencyReleased)
        self.world.ledger.dropped.clear()
        return Counter({"residency without block": lost})

    def skipped_sequences(self) -> Planted:
        """A process long gone, of whose leaves the first four are nowhere."""
        self.serial += 1
        uuid = f"{self.serial:030x}99"
        with self.store.connect().execution_options(**WRITE) as connection, connection.begin():
            values = {"uuid": uuid, "worker": 999, "offset_us": 0, "started_us": 5, "end": "closed"}
            connection.execute(insert(incarnations).values(**values))
            life = connection.scalar(select(incarnations.c.id).where(incarnations.c.uuid == uuid))
            log = 10_000 + self.serial
            connection.execute(insert(logs).values(id=log, name=f"tenant/gone-{log}", size=1, frontier=b""))
            leaf = {"log": log, "idx": 0, "incarnation": life, "sequence": 5, "leaf": b"{}"}
            shape = {"part": 1, "parts": 1, "kind": "hit-counters", "outage": "B", "at_us": 5}
            connection.execute(insert(events).values(**leaf, **shape))
        return Counter({"ledger gap": 1})

    def dead_process(self) -> Planted:
        self.serial += 1
        plant_dead_process(self.store, self.folder, self.world.clock, f"gone-{self.serial}")
        return Counter({"dead incarnation": 1})

    # -- the tier -------------------------------------------------------------------------------------------

    def stray_object(self) -> Planted:
        key = self.random.randbytes(32)
        self.tier.store(key, "alpha", self.world.clock.now_us())
        del self.tier.entries[key]
        return Counter({"tier object without index": 1})

    def stray_entry(self) -> Planted:
        key = self.random.randbytes(32)
        self.tier.store(key, "beta", self.world.clock.now_us())
        self.tier.destroy([key])
        return Counter({"index without tier object": 1})

    def unrecorded_copy(self) -> Planted:
        self.copies.telling = False
        self.copies.keep(self.names.randbytes(32), "alpha")
        self.copies.telling = True
        return Counter({"copy without custody": 1})

    def ended_copy(self) -> Planted:
        """Its end went on record, and it is found all the same."""
        copy = self.copies.keep(self.names.randbytes(32), "beta")
        at_us = self.world.clock.now_us()
        ended = CopyEvent("ended", *copy[:6], at_us, copy.due_us, "ceiling")
        self.world.writer.submit(copy_leaves("host", [ended]))
        return Counter({"copy without custody": 1})

    def lost_copy(self) -> Planted:
        copy = self.copies.keep(self.names.randbytes(32), "alpha")
        self.copies.telling = False
        self.copies.destroy([copy.name])
        self.copies.telling = True
        return Counter({"custody without copy": 1})

    def swapped_copies(self) -> Planted:
        """As many are lost as are not recorded: counts alone are equal."""
        return self.lost_copy() + self.unrecorded_copy()

    def late_copy(self) -> Planted:
        self.copies.keep(self.names.randbytes(32), "beta", -2_000_000)
        return Counter({"copy past its ceiling": 1})


def _path(leaf: Node | None):  # type: ignore[no-untyped-def]
    while leaf is not None:
        yield leaf
        leaf = leaf.parent
