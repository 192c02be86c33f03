"""Two requests compute one prompt; the later to publish goes on with the other's blocks, on record (R-RET-4, R-LIF-2).

Each control takes the record of that use away: then the ledger alone does not explain when custody ended.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import orjson
import pytest
from sqlalchemy import Engine, func, select

from kvcustody.audit.evidence.coverage.summary import CoverageRow, coverage
from kvcustody.audit.kinds import BlocksAttached, Event
from kvcustody.audit.leaf.change_items import plain_bodies
from kvcustody.audit.store.schema.leaf_tables import attachments
from kvcustody.audit.store.schema.ledger import events
from kvcustody.governance.admission_outcome import Admission
from kvcustody.governance.governor import sequence_events as evidence
from kvcustody.governance.identity.principal import Principal
from kvcustody.ids import SessionId, SubjectId, TenantId
from standins.robust.custody_world import BLOCK, MODEL, SHARDS, CustodyWorld

WHOLE = 3
PROMPT = np.arange(WHOLE * BLOCK + 5, dtype=np.int32)
Make = Callable[..., CustodyWorld]


def admit(world: CustodyWorld, user: str) -> object:
    """Admit the prompt for a user of one tenant, and compute nothing yet."""
    principal = Principal("idp", TenantId("alpha"), SubjectId(user), SessionId(user))
    answer = world.governor.admit(principal, MODEL, PROMPT, request_id=user)
    assert isinstance(answer, Admission) and answer.hit_tokens == 0
    return answer.request_id


def join(world: CustodyWorld, request: object, how: str) -> None:
    """Publish what the other request has published already."""
    if how == "commit":
        world.governor.commit([request], [len(PROMPT)])
        return
    assert world.governor.extend_many([request], [7]) == ()  # computed; published by what comes next
    if how == "fork":
        child = world.governor.fork(request, "child")
        world.governor.release(child.request_id)


def two_requests(world: CustodyWorld, how: str) -> CoverageRow:
    """The first holds until 120 s; the second is released a minute later, so it holds until 180 s."""
    first, second = admit(world, "first"), admit(world, "second")
    world.governor.commit([first], [len(PROMPT)])
    join(world, second, how)
    world.governor.release(first)
    world.wait(60)
    world.governor.release(second)
    assert world.broken() == set()
    world.wait(130)
    assert world.broken() == set() and world.governor.check() == []
    assert world.governor.counts().live_blocks == 0
    with world.engine.connect() as connection:
        return coverage(connection).total


def is_join(event: Event) -> bool:
    return isinstance(event, BlocksAttached)


@pytest.mark.parametrize("how", ["commit", "release", "fork"])
def test_a_join_is_on_record(make: Make, store: Engine, how: str) -> None:
    world = make()
    row = two_requests(world, how)
    assert (row.disputed, row.late, row.failed, row.missing, row.unproven, row.overdue) == (0, 0, 0, 0, 0, 0)
    assert row.due == row.in_time == row.ended_in_time >= 2 * (WHOLE + 1) * SHARDS
    with store.connect() as connection:
        assert connection.scalar(select(func.sum(attachments.c.attached_blocks))) == WHOLE
        (residency,) = connection.scalars(select(attachments.c.residency).distinct())
        every = map(orjson.loads, connection.scalars(select(events.c.leaf)))
        leaves = [body for leaf in every for body in plain_bodies(leaf)]
    story = sorted((leaf["sequence"], leaf["kind"]) for leaf in leaves if leaf.get("residency") == residency)
    kinds = list(dict.fromkeys(kind for _, kind in story if kind != "blocks-released"))
    assert kinds == ["residency-opened", "blocks-attached", "residency-released"]


@pytest.mark.parametrize("how", ["commit", "release", "fork"])
def test_a_join_that_is_not_recorded_is_disputed(make: Make, how: str) -> None:
    """Positive control. Custody outlives every hold on record, so the claim stands alone and is shown as such."""
    world = make(chosen=is_join)
    row = two_requests(world, how)
    assert world.ledger.dropped
    assert row.disputed == row.due - row.ended_in_time == WHOLE * SHARDS


def test_the_same_holds_on_postgresql(make: Make, postgres_store: Engine) -> None:
    row = two_requests(make(engine=postgres_store), "commit")
    assert row.disputed == 0 and row.due == row.in_time


def read_again(world: CustodyWorld) -> CoverageRow:
    """A second request attaches at its admission what the first left, and leaves a minute later."""
    for _ in range(2):
        answer = world.admit("alpha", PROMPT)
        assert answer is not None
        world.wait(60)
        world.governor.release(answer.request_id)
        world.lengths.clear()
    assert world.seen["hits"] == WHOLE
    world.wait(130)
    assert world.broken() == set() and world.governor.counts().live_blocks == 0
    with world.engine.connect() as connection:
        return coverage(connection).total


def test_windows_are_attached_on_record(make: Make) -> None:
    """A reader of a path uses the window blocks of its other layer groups as well, attached or joined."""
    row = read_again(make(windows=(1, 2)))
    assert row.disputed == 0 and row.due == row.in_time


def test_windows_are_joined_on_record(make: Make) -> None:
    row = two_requests(make(windows=(1, 2)), "commit")
    assert row.disputed == 0 and row.due == row.in_time


def test_windows_that_are_not_recorded_are_disputed(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Positive control: without them an opening lists the blocks of its table alone."""
    monkeypatch.setattr(evidence, "_attached", lambda sequence: sequence.table[: sequence.hit_blocks])
    row = read_again(make(windows=(1, 2)))
    assert row.disputed == row.due - row.ended_in_time == (1 + 2) * SHARDS
