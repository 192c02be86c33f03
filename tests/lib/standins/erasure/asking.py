"""Asks for erasures as a control plane does, and for how they stand."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import Engine

from kvcustody.audit.evidence.erasure.requests_and_answers import status
from kvcustody.audit.evidence.subjects.subject_key_store import SubjectKeys
from kvcustody.clock import VirtualClock
from kvcustody.governance.erasure.erasure_inbox import ErasureInbox
from kvcustody.governance.erasure.erasure_run import request_event
from kvcustody.governance.erasure.selector import Selector
from standins import builders
from standins.robust.custody_world import CustodyWorld


def inbox(world: CustodyWorld, worker: str, keys: SubjectKeys | None = None) -> ErasureInbox:
    return ErasureInbox(world.engine, worker, world.writer.offset_us, keys)


def ask(
    store: Engine,
    folder: Path,
    clock: VirtualClock,
    selector: Selector,
    erasure: str,
    keys: SubjectKeys | None = None,
) -> None:
    """As a control plane does: on record before anybody acts on it."""
    writer = builders.writer(store, folder / "desk", worker="desk", clock=clock, keys=keys)
    now_us = clock.now_us()
    writer.submit_durable(request_event(selector, erasure, "dpo", now_us + 60_000_000, now_us))
    writer.close()


def outcome(store: Engine, erasure: str, clock: VirtualClock) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
    with store.connect() as connection:
        found = status(connection, erasure, clock.utc_us())
    return found.outcome, found.waiting, found.unreachable
