"""The subjects in the fleet's NATS accounts, and the permissions to publish and read them.

    kv.<tenant>.<scope>.<epoch>.<worker>   KV events under one name, in the stream
    beat.<tenant>.<worker>                 up to which number a worker has told of a tenant's blocks
    ask.<tenant|all>.<reader>.<worker>     a reader asks a worker for a snapshot
    snap.<reader>.<worker>                 the answer
    epochs                                 a hint that erase epochs were raised

1. Tenant and scope are tags of erase epochs: they identify nobody, and end with the control plane's key. The epoch is
   the newest that ends the name. So the subject is enough to find what erasures end.
2. A worker may publish with its own name in the last place. A tenant's reader may read its tenant's subjects, through a
   consumer of its own name that the server lets filter nothing else.
3. Only the keeper may create, change or purge the stream, or hint.
4. Readers have their own account (`accounts`). Of the fleet's account it imports what `READ_SUBJECTS` and
   `ASKED_SUBJECTS` list. The subjects are the same, except for those of the server's API.
"""

from __future__ import annotations

import hashlib
import re
from typing import Any, Final, NamedTuple

from kvcustody.governance.edge.erase_epochs import EpochScope, KnownEpochs
from kvcustody.governance.edge.named_requester import NamedRequester

STREAM: Final = "KV"
EVENTS: Final = "kv.>"
HINTS: Final = "epochs"
EVERY: Final = "all"
_SERVER_API: Final = "$JS.API"
READERS_API: Final = "JS.FLEET.API"
"""What the part of the server's API that readers have begins with in their account."""
READ_SUBJECTS: Final = ("snap.>", "beat.>")
"""What readers may subscribe to, as far as their credentials let each."""
ASKED_SUBJECTS: Final = {
    **{
        f"{_SERVER_API}.CONSUMER.{act}.{STREAM}.>": act == "MSG.NEXT"
        for act in ("CREATE", "MSG.NEXT", "INFO", "DELETE")
    },
    "ask.>": False,
}
"""Where readers may ask, as far as their credentials let each; and whether one question has many answers."""
_PLAIN = re.compile(r"[A-Za-z0-9_-]{1,64}")


class EventSubject(NamedTuple):
    """The name under which a worker publishes blocks. `tenant` and `scope` are tags in hexadecimal digits."""

    tenant: str
    scope: str
    epoch: int
    worker: str

    def __str__(self) -> str:
        return f"kv.{self.tenant}.{self.scope}.{self.epoch}.{self.worker}"

    @classmethod
    def parse(cls, text: str) -> EventSubject | None:
        """Return the parsed subject; None for a subject of another form."""
        parts = text.split(".")
        if len(parts) != 5 or parts[0] != "kv" or not parts[3].isascii() or not parts[3].isdigit():
            return None
        return cls(parts[1], parts[2], int(parts[3]), parts[4])

    @classmethod
    def of(cls, place: NamedRequester, known: KnownEpochs, worker: str) -> EventSubject:
        """Return the subject of a name under these epochs."""
        _, tenant, private = known.tags_of(*place)
        epoch = max(known.of(*place))
        if place.subject is not None and place.session is not None:
            epoch = max(epoch, known.of(place.issuer, place.tenant, None, place.session).private)
        return cls(tenant.hex(), private.hex(), epoch, worker)

    def is_ended(self, known: KnownEpochs) -> bool:
        """Return whether a known erasure has ended the name."""
        epochs = known.epochs
        try:
            tags = (bytes.fromhex(self.tenant), bytes.fromhex(self.scope))
        except ValueError:
            return True  # no name at all
        raised = (epochs.epoch(tag) for tag in (known.tags.of(EpochScope()), *tags) if len(tag) == 16)
        return max(raised, default=0) > self.epoch


def tenant_tag(known: KnownEpochs, issuer: str, tenant: str) -> str:
    """Return a tenant's place in subjects."""
    return known.tags.of(EpochScope(issuer, tenant)).hex()


def for_readers(subject: str) -> str:
    """Return the name of a subject in `ASKED_SUBJECTS` in the readers' account."""
    return subject.replace(_SERVER_API, READERS_API, 1)


def name_in_subject(name: str) -> str:
    """Return a worker's or reader's name as one part of a subject: itself, or a digest where it is no plain word."""
    if _PLAIN.fullmatch(name) and name != EVERY:
        return name
    return "x" + hashlib.blake2b(name.encode(), digest_size=16).hexdigest()


def beat_subject(tenant: str, worker: str) -> str:
    """Return the subject of beats; see the module."""
    return f"beat.{tenant}.{worker}"


def ask_subject(tenant: str, reader: str, worker: str) -> str:
    """Return the subject of snapshot requests; see the module."""
    return f"ask.{tenant}.{reader}.{worker}"


def snapshot_subject(reader: str, worker: str) -> str:
    """Return the subject of snapshots; see the module."""
    return f"snap.{reader}.{worker}"


def inbox(name: str) -> str:
    """Return the inbox for the server's answers to one user."""
    return f"_INBOX.{name}"


def worker_permissions(worker: str) -> dict[str, Any]:
    """Return a worker's permissions: to write only its own subjects, and to read requests and hints."""
    return _permissions(
        [f"kv.*.*.*.{worker}", beat_subject("*", worker), snapshot_subject("*", worker)],
        [ask_subject("*", "*", worker), HINTS],
    )


def door_permissions() -> dict[str, Any]:
    """Return a door's permissions: to read hints."""
    return _permissions([], [HINTS])


def keeper_permissions(name: str) -> dict[str, Any]:
    """Return the keeper's permissions: to manage the stream, and to write hints."""
    return _permissions(["$JS.API.>", HINTS], [f"{inbox(name)}.>"])


def reader_permissions(reader: str, tenant: str = EVERY) -> dict[str, Any]:
    """Return the permissions of a reader of one tenant's blocks (its tag), or of every tenant's (an operator's
    router).
    """
    tenant_part = "*" if tenant == EVERY else tenant
    events = EVENTS if tenant == EVERY else f"kv.{tenant}.>"
    return _permissions(
        [
            f"{READERS_API}.CONSUMER.CREATE.{STREAM}.{reader}.{events}",
            *(f"{READERS_API}.CONSUMER.{act}.{STREAM}.{reader}" for act in ("MSG.NEXT", "INFO", "DELETE")),
            ask_subject(tenant, reader, "*"),
        ],
        [f"{inbox(reader)}.>", snapshot_subject(reader, "*"), beat_subject(tenant_part, "*")],
    )


def _permissions(publish: list[str], subscribe: list[str]) -> dict[str, Any]:
    """Return these permissions and deny all others; an empty list would permit everything."""
    return {
        "pub": {"allow": publish} if publish else {"deny": [">"]},
        "sub": {"allow": subscribe} if subscribe else {"deny": [">"]},
        "subs": 64,
        "data": -1,
        "payload": -1,
    }
