"""The recorded start decides whose process answered an erasure: a row's name makes no erasure complete."""

from __future__ import annotations

import pytest
from sqlalchemy import Engine, select, update

from kvcustody.audit.evidence.erasure.requests_and_answers import read_standings, requests, status
from kvcustody.audit.kinds import ErasureCompleted, ErasureRequested, Event, WorkerStarted
from kvcustody.audit.leaf import Context, leaves
from kvcustody.audit.leaf.batch import read_leaves
from kvcustody.audit.store.database.signed_orders import authenticate
from kvcustody.audit.store.schema.ledger import incarnations, workers
from kvcustody.audit.write.append_leaves import Appender
from standins.erasure.signing import orders

HONEST, EVE = "a" * 32, "e" * 32
LATER_US = 1 << 52
ASKED = ErasureRequested(5, "e-1", "acme", "tenant", None, None, 1 << 40, "dora")
ANSWER = ErasureCompleted(9, "e-1", "acme", "complete", 1, 1, 0)


def started(worker: str) -> WorkerStarted:
    return WorkerStarted(1, worker, 1000, 1, 4096, "cpu", "test")


def record(store: Engine, incarnation: str, *events: Event) -> None:
    context = Context(incarnation, 1 << 50, lambda *_: "")
    made = [leaf.data for number, event in enumerate(events, 1) for leaf in leaves(event, context, number)]
    with store.begin() as connection:
        Appender().append(connection, read_leaves(made))


def said(store: Engine) -> tuple[str, str, str]:
    """By the one and by the list, and the outcome."""
    with store.connect() as connection:
        found = status(connection, "e-1", LATER_US)
        [listed] = read_standings(connection, requests(connection), LATER_US).values()
    return found.state.value, listed.state.value, found.outcome


@pytest.mark.parametrize("forger", ["of another worker", "never started"])
def test_a_row_makes_no_process_another_workers(store: Engine, forger: str) -> None:
    """Every role that writes may change the row. Control: a process that started as this worker's completes it."""
    record(store, HONEST, started("gpu-0"), ASKED)
    record(store, EVE, *([started("gpu-9")] if forger == "of another worker" else ()), ANSWER)
    with store.begin() as connection:
        named = select(workers.c.id).where(workers.c.name == "gpu-0").scalar_subquery()
        changed = update(incarnations).where(incarnations.c.uuid == EVE).values(worker=named)
        assert connection.execute(changed).rowcount == 1
    open_still = said(store)
    record(store, "b" * 32, started("gpu-0"), ANSWER)
    assert (open_still[0], open_still[2]) == (open_still[1], "partial") and open_still[0] in (
        "open",
        "missed",
    )
    assert said(store) in {("complete", "complete", "complete"), ("late", "late", "complete")}


def test_an_order_that_nobody_follows_and_nobody_owes_is_not_complete(store: Engine) -> None:
    """No worker was there. Control: the same order is complete where orders are not authenticated."""
    record(store, HONEST, ASKED)
    assert said(store) == ("complete", "complete", "complete")
    authenticate(store, orders())
    try:
        assert said(store) == ("not-followed", "not-followed", "partial")
    finally:
        authenticate(store, None)
