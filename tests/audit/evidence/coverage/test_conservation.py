"""Conservation: all recorded, every identity holds; one step removed, one breaks (R-LIF-2)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import Engine

from kvcustody.audit.evidence.coverage.conservation import ConservationIdentity, conservation
from kvcustody.audit.kinds import CustodyEnded, Event, ReceiptRecorded, ResidencyOpened, ResidencyReleased
from kvcustody.errors import LedgerError

STEPS: dict[str, Callable[[Event], bool]] = {
    "residency opened": lambda event: isinstance(event, ResidencyOpened),
    "residency released": lambda event: isinstance(event, ResidencyReleased) and bool(event.written),
    "release of an empty residency": lambda event: isinstance(event, ResidencyReleased) and not event.written,
    "custody end": lambda event: isinstance(event, CustodyEnded),
    "receipts of one shard": lambda event: isinstance(event, ReceiptRecorded) and event.shard == 1,
    "boot receipt": lambda event: isinstance(event, ReceiptRecorded) and event.tenant is None,
}


def identities(store: Engine, writer: Any, world: Any, events: list[Event]) -> tuple[ConservationIdentity, ...]:
    writer.submit(events)
    assert writer.flush()
    with store.connect() as connection:
        return conservation(connection, writer.incarnation, world.counts())


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_everything_recorded_holds(store: Engine, make_writer: Any, world: Any, seed: int) -> None:
    played = world(seed).run(250)
    assert played.dirty or played.open  # a moment with work in hand
    found = identities(store, make_writer(store), played, played.events)
    assert len(found) == 4 + 2 * played.shards
    assert [item for item in found if item.difference] == []
    assert found[0].left > 50


@pytest.mark.parametrize("step", STEPS)
def test_one_removed_recording_breaks_an_identity(store: Engine, make_writer: Any, world: Any, step: str) -> None:
    played = world(4).run(250)
    chosen = [number for number, event in enumerate(played.events) if STEPS[step](event)]
    middle = chosen[len(chosen) // 2]
    events = played.events[:middle] + played.events[middle + 1 :]
    broken = [item for item in identities(store, make_writer(store), played, events) if item.difference]
    assert broken, step
    assert all(item.left != item.right for item in broken)


def test_a_receipt_of_every_shard_removed_breaks_two_identities_a_shard(
    store: Engine, make_writer: Any, world: Any
) -> None:
    played = world(5).run(250)
    launch = next(e.launch for e in reversed(played.events) if isinstance(e, ReceiptRecorded) and e.tenant)
    events = [e for e in played.events if not (isinstance(e, ReceiptRecorded) and e.launch == launch)]
    broken = [item for item in identities(store, make_writer(store), played, events) if item.difference]
    assert len(broken) == 2 * played.shards


def test_an_unknown_incarnation_is_an_error(store: Engine, world: Any) -> None:
    with store.connect() as connection, pytest.raises(LedgerError, match="not in the ledger"):
        conservation(connection, "0" * 32, world(1).counts())
