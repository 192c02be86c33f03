"""Orders in a ledger that workers write themselves: whoever can write a row there gives no order without a key."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import orjson
import pytest
from sqlalchemy import Engine, insert, select

from kvcustody.audit.evidence.cases.restrictions import restrictions_in_force
from kvcustody.audit.evidence.erasure.requests_and_answers import (
    ErasureStanding,
    read_standings,
    requests,
    status,
)
from kvcustody.audit.keep.purge_and_legal_hold import active_holds
from kvcustody.audit.kinds import Event
from kvcustody.audit.leaf.leaf_schema import ORDERS, SIGNED_ORDERS
from kvcustody.audit.store.database.signed_orders import SignedOrders, authenticate
from kvcustody.audit.store.schema.leaf_tables import erasures
from kvcustody.audit.store.schema.ledger import events
from kvcustody.audit.store.schema.ledger import logs as log_rows
from kvcustody.clock import VirtualClock
from kvcustody.governance.erasure.erasure_inbox import ErasureInbox
from kvcustody.governance.erasure.erasure_run import request_event
from kvcustody.governance.erasure.selector import Selector
from standins.erasure.signing import (
    EVE,
    OLGA,
    ONE,
    READERS,
    case_opened,
    case_step,
    enforce,
    erase_alpha,
    hold,
    monitor,
    opened_as,
    orders,
    put,
    without_rules,
)
from standins.robust.custody_world import CustodyWorld

FORGERIES: dict[str, Callable[[], SignedOrders | None]] = {
    "no signature": lambda: None,
    "a key that nobody trusts": lambda: orders(EVE),
    "a trusted name and another key": lambda: orders(EVE, name="olga"),
    "an order for another ledger": lambda: orders(OLGA, ledger="example.com/other"),
}


class Worker:
    """A worker whose ledger believes Olga alone."""

    def __init__(self, store: Engine, folder: Path) -> None:
        self.store, self.folder, self.clock = store, folder, VirtualClock()
        self.signed = orders(ONE)
        authenticate(store, self.signed)
        self.world = CustodyWorld(store, folder, worker="one", clock=self.clock).run(10)
        self.world.writer.flush()
        self.found: list[str] = []
        self.inbox = ErasureInbox(
            store,
            "one",
            self.world.writer.offset_us,
            orders=self.signed,
            on_refused=lambda refused: self.found.append(str(refused)),
        )
        self.inbox.recover_pending(self.world.governor)

    def put(self, make: Callable[[int], Event], signed: SignedOrders | None) -> None:
        self.clock.advance(1_000_000)
        put(self.store, self.folder, self.clock, make, signed)

    def look(self) -> int:
        erased = self.inbox.look(self.world.governor)
        self.world.settle()
        return erased

    @property
    def monitors(self) -> bool:
        return self.world.governor.ordered.mode == "monitor"

    def standings(self) -> tuple[ErasureStanding, list[ErasureStanding]]:
        """How the erasure stood by itself when it was asked for, and in the list of all."""
        with self.store.connect() as connection:
            asked = requests(connection)
            one = status(connection, "e-1", asked[0].at_us).standing
            return one, list(read_standings(connection, asked, asked[0].at_us).values())

    def believe_everybody(self) -> None:
        """With the one defence off."""
        authenticate(self.store, None)


@pytest.fixture
def worker(any_store: Engine, tmp_path: Path) -> Iterator[Worker]:
    made = Worker(any_store, tmp_path)
    yield made
    made.world.close()
    made.world.writer.close()


@pytest.mark.parametrize("forgery", FORGERIES)
def test_nobody_without_a_trusted_key_turns_a_worker_to_monitor_or_erases(worker: Worker, forgery: str) -> None:
    for order in (monitor, erase_alpha):
        worker.put(order, FORGERIES[forgery]())
    assert worker.look() == 0 and not worker.monitors
    assert worker.look() == 0
    kinds = sorted(found.split("`")[1] for found in worker.found)
    assert kinds == ["enforcement-ordered", "erasure-requested"], "each is found, once"
    standing, listed = worker.standings()
    assert standing.state == "not-followed" and standing.why and listed == [standing]
    worker.believe_everybody()
    assert worker.standings() == (("open", ""), [("open", "")]), "control"
    assert worker.look() == 1 and worker.monitors, "control"


def test_what_a_trusted_key_signed_is_followed(worker: Worker) -> None:
    for order in (monitor, erase_alpha):
        worker.put(order, orders(OLGA))
    assert worker.standings() == (("open", ""), [("open", "")])
    assert worker.look() == 1 and worker.monitors and worker.found == []


def test_a_copy_of_an_older_order_undoes_no_newer_one(worker: Worker) -> None:
    for order in (monitor, enforce):
        worker.put(order, orders(OLGA))
    with worker.store.begin() as connection:
        old = connection.execute(select(events).where(events.c.kind == "enforcement-ordered")).first()
        assert old is not None
        size = connection.scalar(select(log_rows.c.size).where(log_rows.c.id == old.log))
        copy = old._asdict() | {"idx": size, "sequence": 1 << 40, "at_us": old.at_us + 3_000_000}
        without_rules(connection)
        connection.execute(log_rows.update().where(log_rows.c.id == old.log).values(size=size + 1))
        connection.execute(insert(events).values(copy))
    worker.look()
    assert not worker.monitors
    worker.believe_everybody()
    worker.look()
    assert worker.monitors, "control"


def test_a_signed_leaf_that_is_copied_as_another_kind_is_no_order(worker: Worker) -> None:
    """With its control: whoever believes the row cannot read the leaf."""
    worker.put(hold("placed"), orders(OLGA))
    with worker.store.begin() as connection:
        without_rules(connection)
        row = connection.execute(select(events).where(events.c.kind == "legal-hold")).one()
        system = select(log_rows.c.id, log_rows.c.size).where(log_rows.c.name == "system")
        log, size = connection.execute(system).one()
        copy = {"log": log, "idx": size, "sequence": 1 << 40, "kind": "keys-ordered"}
        connection.execute(log_rows.update().where(log_rows.c.id == log).values(size=size + 1))
        connection.execute(insert(events).values(row._asdict() | copy))
    worker.look()
    worker.believe_everybody()
    with pytest.raises(KeyError):
        worker.look()


def test_an_edited_leaf_is_no_order(worker: Worker) -> None:
    worker.put(erase_alpha, orders(OLGA))
    with worker.store.begin() as connection:
        without_rules(connection)
        row = connection.execute(select(events).where(events.c.kind == "erasure-requested")).one()
        edited = orjson.loads(row.leaf) | {"actor": "dora"}
        place = (events.c.log == row.log, events.c.idx == row.idx)
        connection.execute(events.update().where(*place).values(leaf=orjson.dumps(edited)))
        connection.execute(erasures.update().values(actor="dora"))
    assert worker.look() == 0 and "the signature does not fit" in worker.found[0]
    worker.believe_everybody()
    assert worker.look() == 1, "control"


def test_a_row_that_says_more_than_its_signed_leaf_is_no_order(worker: Worker) -> None:
    small = Selector("alpha", "nobody")
    worker.put(lambda at_us: request_event(small, "e-1", "olga", at_us + 60_000_000, at_us), orders(OLGA))
    with worker.store.begin() as connection:
        without_rules(connection)
        connection.execute(erasures.update().values(subject=None, selector="tenant"))
    assert worker.look() == 0
    worker.believe_everybody()
    assert worker.look() == 1, "control"


@pytest.mark.parametrize("name", READERS)
def test_every_reader_follows_signed_orders_alone(any_store: Engine, tmp_path: Path, name: str) -> None:
    made, read = READERS[name]
    clock = VirtualClock()
    for number, order in enumerate(made):
        clock.advance(1_000_000)
        put(any_store, tmp_path / str(number), clock, order, None)
    with opened_as(any_store, orders()).connect() as connection:
        assert not read(connection)
    with any_store.connect() as connection:
        assert read(connection), "control"


@pytest.mark.parametrize("name", READERS)
def test_every_reader_follows_signed_orders(store: Engine, tmp_path: Path, name: str) -> None:
    made, read = READERS[name]
    clock = VirtualClock()
    for number, order in enumerate(made):
        clock.advance(1_000_000)
        put(store, tmp_path / str(number), clock, order, orders(OLGA))
    with store.connect() as believing, opened_as(store, orders()).connect() as connection:
        assert read(connection) == read(believing) and read(connection)


def test_an_unsigned_order_lifts_no_restriction_and_nohold(store: Engine, tmp_path: Path) -> None:
    clock = VirtualClock()
    begun = (case_opened, case_step("restrict", ground="18(1)(a)"), hold("placed"))
    ended = (case_step("lift-restriction", reason="forged"), hold("lifted"))
    for number, order in enumerate((*begun, *ended)):
        clock.advance(1_000_000)
        put(store, tmp_path / str(number), clock, order, orders(OLGA) if order in begun else None)
    with opened_as(store, orders()).connect() as connection:
        assert restrictions_in_force(connection) and active_holds(connection)
    with store.connect() as connection:
        assert not restrictions_in_force(connection) and not active_holds(connection), "control"
    for number, order in enumerate(ended):
        clock.advance(1_000_000)
        put(store, tmp_path / f"signed-{number}", clock, order, orders(OLGA))
    with opened_as(store, orders()).connect() as connection:
        assert not restrictions_in_force(connection) and not active_holds(connection)


def test_an_unsigned_hold_holds_all_the_same(store: Engine, tmp_path: Path) -> None:
    """What a purge dropped does not come back."""
    put(store, tmp_path, VirtualClock(), hold("placed"), None)
    with opened_as(store, orders()).connect() as connection:
        assert [one.hold for one in active_holds(connection)] == ["h-1"]


def test_every_kind_of_order_is_signed_but_steps_of_a_release() -> None:
    """The record that a step names is signed by who took it, and read by its own verifier."""
    assert {"release-step"} == ORDERS - SIGNED_ORDERS and SIGNED_ORDERS < ORDERS


def test_a_signature_is_the_only_new_key_of_a_leaf(store: Engine, tmp_path: Path) -> None:
    clock = VirtualClock()
    for name, signed in (("plain", None), ("signed", orders(OLGA))):
        put(store, tmp_path / name, clock, monitor, signed)
    with store.connect() as connection:
        query = select(events.c.leaf).where(events.c.kind == "enforcement-ordered").order_by(events.c.idx)
        plain, signed_leaf = (orjson.loads(leaf) for leaf in connection.scalars(query))
    assert signed_leaf.keys() - plain.keys() == {"signature"}
    key, _, data = signed_leaf["signature"].partition(" ")
    assert key == "olga" and len(data) == 88
