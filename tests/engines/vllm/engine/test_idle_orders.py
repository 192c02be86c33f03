"""Orders reach an engine that nobody sends a request: it sleeps in its queue, and is woken by what is put on record.

Every order against an engine that sleeps, and the control in which nothing wakes it: `release/test_idle_engine.py`.
"""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import func, select

from kvcustody.audit.evidence.erasure.requests_and_answers import status
from kvcustody.audit.kinds import Event, KeysOrdered
from kvcustody.audit.store.database.engine import open_store
from kvcustody.audit.store.schema.ledger import events
from kvcustody.clock import SystemClock
from kvcustody.governance.erasure.erasure_run import request_event
from kvcustody.governance.erasure.selector import Selector
from standins import builders
from standins.engines.vllm.deployment import Deployment
from standins.engines.vllm.local_engine import BLOCK, LocalEngine
from standins.waiting import until

CLOCK = SystemClock()
PROMPT = [*range(20, 20 + 3 * BLOCK), 17]


def put(deployment: Deployment, spill: Path, event: Event) -> None:
    """As another process on the same ledger does."""
    store = open_store(deployment.ledger_url)
    writer = builders.writer(store, spill, worker="desk", clock=CLOCK)
    writer.submit_durable(event)
    writer.close()
    store.dispose()


def key_events(deployment: Deployment) -> int:
    store = open_store(deployment.ledger_url, read_only=True)
    with store.connect() as connection:
        found = connection.execute(select(func.count()).where(events.c.kind == "key-event")).scalar_one()
    store.dispose()
    return int(found)


def test_an_erasure_and_an_order_on_keys_reach_an_engine_that_sleeps(governed: LocalEngine, tmp_path: Path) -> None:
    deployment = governed.deployment
    assert deployment is not None
    assert governed.ask(PROMPT, tenant="sleeps").cached_tokens == 0
    assert governed.ask(PROMPT, tenant="sleeps").cached_tokens == 3 * BLOCK, "positive control"

    now_us = CLOCK.now_us()
    order = request_event(Selector(tenant="sleeps"), "idle-1", "dpo", now_us + 60_000_000, now_us)
    put(deployment, tmp_path / "spill", order)
    store = open_store(deployment.ledger_url, read_only=True)

    def answered() -> bool:
        with store.connect() as connection:
            return status(connection, "idle-1", CLOCK.utc_us()).outcome == "complete"

    until(answered)
    store.dispose()
    assert governed.ask(PROMPT, tenant="sleeps").cached_tokens == 0

    assert governed.ask(PROMPT, tenant="sleeps").cached_tokens == 3 * BLOCK, "positive control"
    before = key_events(deployment)
    put(deployment, tmp_path / "spill", KeysOrdered(CLOCK.now_us(), "sleeps", "destroy", "carl", "test"))
    until(lambda: key_events(deployment) > before)
    assert governed.ask(PROMPT, tenant="sleeps").cached_tokens == 0
