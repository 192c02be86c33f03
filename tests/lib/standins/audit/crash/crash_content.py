"""What a killed life did, done again from its seed, against what the ledger holds of it (F2: the sets are equal).

- The leaves of a life's operations, by sequence, are the first of those that it did: none missing in between, none
twice, none else, each saying what was done, in every log that it belongs to.
- What may share a leaf is the first that it did of that for each tenant: its leaf comes after all that was done before
it, and before the next act that is neither an opening nor a join.
- Its acts that waited for their record are there once or not at all (they were refused), in their order.
Clock readings, pseudonyms and what numbers a leaf are left out: no seed gives them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import orjson
from sqlalchemy import Connection, Select, func, select

from kvcustody.audit.kinds import Event, HitCounted
from kvcustody.audit.leaf import Context, leaves
from kvcustody.audit.leaf.change_items import CHANGED, plain_bodies
from kvcustody.audit.leaf.leaf_schema import LIST_OF_KIND
from kvcustody.audit.store.schema.ledger import events, incarnations
from standins.audit.crash.crash_server import Operations, durable_act

_CONTEXT = Context("0" * 32, 0, lambda tenant, subject, session="": "0" * 24)
_KINDS = (
    *("residency-opened", "blocks-attached", "residency-released", "custody-ended", "receipt"),
    *("decision", "key-event", CHANGED),
)
_PASSING = ("residency-opened", "blocks-attached")  # these may be on record before what waits to share a leaf
SHARED = frozenset(LIST_OF_KIND)
Body = dict[str, Any]


def check_content(connection: Connection, seed: int, incarnation: str) -> None:
    """Raise unless the ledger holds of this life what it did, in its order."""
    done, waited = _split(_bodies(connection, incarnation))
    alone = [group for group in done if group[0]["kind"] not in SHARED]
    shared: dict[str, list[Body]] = {}
    for (body,) in (group for group in done if group[0]["kind"] in SHARED):
        shared.setdefault(str(body["log"]), []).append(body)
    did: dict[str, list[Body]] = {log: [] for log in shared}
    lacks_alone = lacks_shared = False  # of what was done up to here
    at = 0
    for number, right in enumerate(_operations(seed)):
        if right[0]["kind"] in SHARED:
            log = str(right[0]["log"])
            if len(did.get(log, ())) < len(shared.get(log, ())):
                assert not lacks_alone, f"operation {number} of life {seed} is on record before an earlier one"
                did[log].append(right[0])
            else:
                lacks_shared = True
        elif at < len(alone):
            said = f"operation {number} of life {seed} is on record as {alone[at]}, and was {right}"
            assert alone[at] == right, said
            assert not lacks_shared or right[0]["kind"] in _PASSING, f"{said}, before what waited"
            at += 1
        else:
            lacks_alone = True
        if at == len(alone) and all(len(did[log]) == len(found) for log, found in shared.items()):
            break
        assert number < 10 * len(done) + 10_000, f"life {seed} did not do all that is on record of it"
    for log, found in shared.items():
        wrong = f"what {log} shares in life {seed} is on record as other than it was"
        assert sorted(map(repr, found)) == sorted(map(repr, did[log])), wrong
    numbers = [_number(group[0]) for group in waited]
    assert numbers == sorted(set(numbers)), f"acts of life {seed} that waited are on record as {numbers}"
    for group in waited:
        assert group == _said(durable_act(_number(group[0]), 0)), group


def unknown_operations(connection: Connection, known: Sequence[str]) -> int:
    """How many leaves of operations are of lives that nobody knows of."""
    lives = set(connection.scalars(select(incarnations.c.id).where(incarnations.c.uuid.not_in(known))))
    query = select(events.c.incarnation, func.count()).where(events.c.kind.in_(("residency-opened", "decision")))
    found = connection.execute(query.group_by(events.c.incarnation)).all()
    return sum(count for life, count in found if life in lives)


def _bodies(connection: Connection, incarnation: str) -> Iterator[Body]:
    """The leaves of a life's own acts, by sequence."""
    life = select(incarnations.c.id).where(incarnations.c.uuid == incarnation).scalar_subquery()
    mine: Select[Any] = select(events.c.leaf).where(events.c.incarnation == life, events.c.kind.in_(_KINDS))
    for leaf in connection.scalars(mine.order_by(events.c.sequence, events.c.part)):
        for body in plain_bodies(orjson.loads(leaf)):
            # What else it wrote closes a dead one's custody.
            if body.get("of_incarnation") in (None, "", incarnation):
                yield dict(body)


def _split(bodies: Iterator[Body]) -> tuple[list[list[Body]], list[list[Body]]]:
    """Leaves by event: operations, and acts that waited."""
    done: list[list[Body]] = []
    waited: list[list[Body]] = []
    for _, group in itertools.groupby(bodies, lambda body: (body["sequence"], body.get("item", 0))):
        found = sorted(map(_bare, group), key=lambda body: str(body["log"]))
        acted = found[0]["kind"] == "key-event" or found[0].get("via") == "grant"
        (waited if acted else done).append(found)
    return done, waited


def _operations(seed: int) -> Iterator[list[Body]]:
    """What a life of this seed records, without end."""
    operations = Operations(seed)
    while True:
        event = operations.next(0)
        if not isinstance(event, HitCounted):  # added up
            yield _said(event)


def _said(event: Event) -> list[Body]:
    """The bare leaves of an event, one for each of its logs."""
    return sorted(
        (_bare(orjson.loads(leaf.data)) for leaf in leaves(event, _CONTEXT, 1)),
        key=lambda body: str(body["log"]),
    )


def _number(body: Body) -> int:
    """Which of its life's acts a leaf is of."""
    found: int = body["epoch" if body["kind"] == "key-event" else "residency"]
    return found


def _bare(body: Body) -> Body:
    left_out = ("incarnation", "of_incarnation", "sequence", "subject", "session", "item")
    kept = ((key, value) for key, value in sorted(body.items()) if key not in left_out)
    return {key: value for key, value in kept if not key.endswith("_us")}
