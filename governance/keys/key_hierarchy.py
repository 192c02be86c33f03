"""A deployment's keys as a hierarchy: what each one ends, and when; read from the stores without any secret.

    tree = read_hierarchy(keyring_path, shred_keys_path, now_us)

1. Nothing is unwrapped, so no root key is needed. Owners of epochs are named as the store names them. A subject's key
   cannot be attributed to a subject: it is counted, and named by its random id.
2. A store that does not exist holds no keys; one that cannot be read raises `KeyringError`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from kvcustody.governance.identity.domain_spec import KeyOwner
from kvcustody.governance.keys.shred_keys import ShredKey, read_shred_keys
from kvcustody.governance.keys.shred_receipts import DestroyedKey, ShredReceipts
from kvcustody.governance.keys.wrapped_key_store import FileKeyStore
from kvcustody.times import iso

EPOCH_ENDS = "all of the owner's data under it: blocks are no longer found, copies in tiers can never be opened"
EPOCH_WHEN = "by an order to destroy the owner's keys"
SUBJECT_ENDS = "every copy of one subject's blocks, in every tier"
SUBJECT_WHEN = "with the subject's erasure"
BUCKET_ENDS = "every copy that falls due in its time, in every tier"


class EpochKey(NamedTuple):
    """One secret of an owner; the current one keys new blocks."""

    owner: KeyOwner
    epoch: int
    created_us: int
    is_current: bool


class DestroyedEpoch(NamedTuple):
    """A destroyed secret of an owner."""

    owner: KeyOwner
    epoch: int
    destroyed_us: int


class KeyHierarchy(NamedTuple):
    """Existing and destroyed keys, each oldest first, as read at `now_us` (UTC)."""

    epochs: list[EpochKey]
    subjects: list[ShredKey]
    buckets: list[ShredKey]
    destroyed_epochs: list[DestroyedEpoch]
    destroyed: list[DestroyedKey]
    now_us: int

    @property
    def overdue(self) -> list[ShredKey]:
        """Keys of expired buckets: a worker with a tier ends them at its next step."""
        return [key for key in self.buckets if key.until_us <= self.now_us]

    def data(self) -> dict[str, Any]:
        """Return JSON data."""
        return {
            "read": iso(self.now_us),
            "epochs": [
                {**key.owner._asdict(), "epoch": key.epoch, "created": iso(key.created_us), "current": key.is_current,
                 "ends": EPOCH_ENDS, "when": EPOCH_WHEN}
                for key in self.epochs
            ],
            "subjects": [
                {"id": key.id.hex(), "created": iso(key.created_us), "ends": SUBJECT_ENDS, "when": SUBJECT_WHEN}
                for key in self.subjects
            ],
            "buckets": [
                {"id": key.id.hex(), "classification": key.label, "created": iso(key.created_us),
                 "ends": BUCKET_ENDS, "when": iso(key.until_us), "overdue": key.until_us <= self.now_us}
                for key in self.buckets
            ],
            "destroyed": [
                *({**key.owner._asdict(), "epoch": key.epoch, "destroyed": iso(key.destroyed_us)}
                  for key in self.destroyed_epochs),
                *(_receipt(key) for key in self.destroyed),
            ],
        }  # fmt: skip


def _receipt(key: DestroyedKey) -> dict[str, Any]:
    fields = {
        "kind": key.kind,
        "id": key.id.hex(),
        "created": iso(key.created_us),
        "destroyed": iso(key.destroyed_us),
    }
    return fields | ({"classification": key.label, "due": iso(key.until_us)} if key.kind == "bucket" else {})


def read_hierarchy(keyring: Path, shred: Path, now_us: int) -> KeyHierarchy:
    """Read the hierarchy from two stores. Raises `KeyringError`."""
    document = FileKeyStore(keyring).load()
    epochs = [
        EpochKey(owner, epoch, stored.created_utc_us, document.latest.get(owner) == epoch)
        for (owner, epoch), stored in sorted(document.epochs.items())
    ]
    gone = [DestroyedEpoch(owner, epoch, at_us) for (owner, epoch), at_us in document.destroyed.items()]
    keys = read_shred_keys(shred) if shred.exists() else []
    return KeyHierarchy(
        epochs,
        [key for key in keys if not key.until_us],
        [key for key in keys if key.until_us],
        sorted(gone, key=lambda key: key.destroyed_us),
        ShredReceipts(shred).read(),
        now_us,
    )
