"""A worker's way to the erasures that others ask for, over the API.

X1 What a worker owes is asked for until it has answered: an answer is a leaf in its ledger, so an order that was lost
   or interrupted comes again, and one that was carried out does not.
X2 The control plane holds the question open until there is something new, so an erasure arrives at once.
"""

from __future__ import annotations

from kvcustody.audit.erasures import Names, Requested
from kvcustody.governance.control_plane.connection import Connection
from kvcustody.governance.erasure_inbox import ErasureInbox

WAIT_SECONDS = 15


class RemoteInbox(ErasureInbox):
    """The inbox of a worker whose ledger is behind a control plane. `offset_us`: UTC less boot time of this process."""

    def __init__(self, connection: Connection, offset_us: int) -> None:
        super().__init__(None, "", offset_us)
        self._connection = connection

    def _pending(self) -> list[tuple[Requested, Names | None]]:
        wait = (
            WAIT_SECONDS if self._taken or self._thread is not None else 0
        )  # the first question waits for nothing
        known = ",".join(sorted(self._taken)[-64:])
        found = self._connection.get("/v1/worker/erasures", wait=wait, known=known or None)
        made: list[tuple[Requested, Names | None]] = []
        for item in found["items"]:
            named = Names(item.pop("subject_name"), item.pop("session_name")) if item.pop("named") else None
            made.append((Requested(**item), named))
        return made
