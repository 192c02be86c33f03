"""Events of the keys that sign the ledger's checkpoints; data keys have events of their own."""

from __future__ import annotations

from typing import NamedTuple


class SigningKeyRecorded(NamedTuple):
    """A key that signs checkpoints was made, or took over from another (class A).

    `vkey` is the public key (C2SP). `record` is the handover that both keys signed, in base64 (none: the first key).
    """

    at_us: int
    action: str
    vkey: str
    record: str
    actor: str
