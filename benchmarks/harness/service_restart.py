"""A service, or its database, that is restarted while workers hand in: is every acknowledged leaf there, once?

Each worker is a thread with a connection of its own (`control_plane.Connection`), as an engine's process has. It sends
a batch until that is acknowledged, whatever is lost on the way. The ledger is read afterwards, from its own tables.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sqlalchemy import select

from kvcustody.audit.store.database.engine import open_store
from kvcustody.audit.store.schema.ledger import events, incarnations
from kvcustody.errors import ServiceError
from kvcustody.governance.control_plane.connection import ControlPlaneConnection

_BATCH_LEAVES = 50
_TRIES_SECONDS = 0.05
_MEDIA = "application/x-ndjson"
Batches = Callable[[str, str, int, int], list[tuple[int, bytes]]]


class _Sender(threading.Thread):
    """One worker: hands in its batches one after the other; `acknowledged` are the sequences that were answered."""

    def __init__(self, server: str, key: str, name: str, batches_of: Batches, count: int, offset_us: int) -> None:
        super().__init__(daemon=True)
        self.incarnation = uuid.uuid4().hex
        self.acknowledged: list[int] = []
        self.retries = 0
        self._server, self._key, self._offset_us = server, key, offset_us
        self._batches = batches_of(name, self.incarnation, count, _BATCH_LEAVES)

    def run(self) -> None:
        path = f"/v1/worker/incarnations/{self.incarnation}"
        with ControlPlaneConnection(self._server, self._key, timeout_seconds=20) as connection:
            self.retries += until_taken(lambda: connection.put(path, {"offset_us": self._offset_us}))
            for first, body in self._batches:
                place = f"{path}/batches/{first}"
                self.retries += until_taken(lambda place=place, body=body: connection.put_bytes(place, body, _MEDIA))
                self.acknowledged += range(first, first + _BATCH_LEAVES)


def until_taken(act: Callable[[], Any]) -> int:
    """Ask a control plane until it answers; how often it did not. Raises what it refuses."""
    retries = 0
    while True:
        try:
            act()
            return retries
        except ServiceError as error:
            if error.operands.get("problem") not in ("unreachable", "unavailable"):
                raise
            retries += 1
            time.sleep(_TRIES_SECONDS)


def measure(
    folder: Path,
    keys: dict[str, str],
    batches_of: Batches,
    *,
    workers: int,
    count: int,
    offset_us: int,
    restart: Callable[[], None],
    database_url: str,
) -> dict[str, Any]:
    """Restart while `workers` hand in `count` batches each; what was acknowledged, lost and there twice."""
    address = f"unix:{folder}/api.sock"
    names = [f"w{number}" for number in range(workers)]
    senders = [_Sender(address, keys[name], name, batches_of, count, offset_us) for name in names]
    begun = time.perf_counter()
    for sender in senders:
        sender.start()
    while sum(len(sender.acknowledged) for sender in senders) < workers * count * _BATCH_LEAVES // 4:
        time.sleep(0.005)
    restart()
    for sender in senders:
        sender.join()
    seconds = time.perf_counter() - begun
    lost = twice = 0
    engine = open_store(database_url, read_only=True)
    with engine.connect() as connection:
        for sender in senders:
            life = select(incarnations.c.id).where(incarnations.c.uuid == sender.incarnation).scalar_subquery()
            rows = connection.scalars(select(events.c.sequence).where(events.c.incarnation == life)).all()
            lost += len(set(sender.acknowledged) - set(rows))
            twice += len(rows) - len(set(rows))
    engine.dispose()
    return {
        "workers": workers,
        "acknowledged_leaves": sum(len(sender.acknowledged) for sender in senders),
        "refused_tries": sum(sender.retries for sender in senders),
        "lost_leaves": lost,
        "leaves_there_twice": twice,
        "seconds": round(seconds, 1),
    }
