"""Workers' answers to an order to destroy keys: none before it, for another, or by a clock that is ahead."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import Engine

from kvcustody.audit.evidence.query.key_orders import (
    CLOCKS_DIFFER_US,
    KeyOrderStanding,
    key_orders,
    order_standings,
)
from kvcustody.audit.kinds import Event, KeyEvent, KeysDropped, KeysOrdered, WorkerStarted
from kvcustody.audit.write.record_operator_act import record_operator_act


def order(store: Engine, tenant: str = "acme") -> int:
    """The moment of an order that is given now."""
    record_operator_act(store, lambda at_us: KeysOrdered(at_us, tenant, "destroy", "carl", "test"))
    with store.connect() as connection:
        return key_orders(connection)[-1].at_us


def said(writer: Any, *events: Event) -> None:
    writer.submit(list(events))
    assert writer.flush()


def standing(store: Engine, tenant: str = "acme") -> KeyOrderStanding:
    """Of the tenant's first order."""
    with store.connect() as connection:
        return next(one for one in order_standings(connection) if one.tenant == tenant)


def started(store: Engine, make_writer: Any, worker: str = "w1") -> Any:
    writer = make_writer(store, worker=worker)
    said(writer, WorkerStarted(1, worker, 64, 1, 4096, "cpu", "test"))
    return writer


@pytest.mark.parametrize("moment", [1 << 60, 0])
def test_an_answer_that_was_given_before_its_order_is_none(store: Engine, make_writer: Any, moment: int) -> None:
    worker = started(store, make_writer)
    said(worker, KeysDropped(1, moment, 0))
    at_us = order(store)
    assert standing(store).waiting == ("w1",)
    said(worker, KeysDropped(2, at_us + 1, 0))
    assert standing(store).state == "open", "of a moment at which nobody ordered anything"
    said(worker, KeysDropped(3, at_us, 0))
    assert standing(store).state == "complete", "control: of this order's own"


def test_an_answer_about_another_tenants_order_is_none(store: Engine, make_writer: Any) -> None:
    worker = started(store, make_writer)
    order(store)
    other = order(store, "labs")
    said(worker, KeysDropped(1, other, 0))
    assert (standing(store).state, standing(store, "labs").state) == ("open", "complete")
    again = order(store)
    said(worker, KeysDropped(2, again, 0))
    assert standing(store).state == "complete", "control: of a later one on the same tenant"


def test_who_seems_to_have_begun_later_by_a_clock_that_is_ahead_is_waited_for(store: Engine, make_writer: Any) -> None:
    at_us = order(store)
    worker = make_writer(store, worker="ahead")
    begun = at_us - worker.offset_us + CLOCKS_DIFFER_US // 2
    said(worker, WorkerStarted(begun, "ahead", 64, 1, 4096, "cpu", "test"))
    assert standing(store).waiting == ("ahead",)
    later = make_writer(store, worker="later")
    said(
        later,
        WorkerStarted(at_us - later.offset_us + 2 * CLOCKS_DIFFER_US, "later", 64, 1, 4096, "cpu", "test"),
    )
    assert standing(store).waiting == ("ahead",), "control: no clock explains it"


def test_one_epoch_that_is_said_to_be_gone_twice_hides_no_other(store: Engine, make_writer: Any) -> None:
    worker = started(store, make_writer)
    at_us = order(store)
    said(worker, KeysDropped(1, at_us, 2))

    def key(epoch: int, state: str) -> KeyEvent:
        return KeyEvent(2, "acme", "destroyed", epoch, "governor", in_service=state)

    said(worker, key(1, "owed"), key(2, "owed"), key(1, "gone"), key(1, "gone"))
    assert (standing(store).state, standing(store).in_service) == ("open", 1)
    said(worker, key(2, "gone"))
    assert standing(store).state == "complete", "control"


def test_what_a_process_owed_that_died_before_it_said_so_keeps_the_order_open(store: Engine, make_writer: Any) -> None:
    worker = started(store, make_writer)
    at_us = order(store)
    said(worker, KeysDropped(1, at_us, 0))
    assert standing(store).state == "complete", "void: something is owed"

    def key(state: str) -> KeyEvent:
        return KeyEvent(2, "acme", "destroyed", 1, "governor", in_service=state)

    said(worker, key("still-owed"))
    assert (standing(store).state, standing(store).in_service) == ("open", 1)
    said(worker, key("gone"))
    assert standing(store).state == "complete"
