"""Events of how long the ledger's own content is kept, and for whom it no longer means anybody."""

from __future__ import annotations

from typing import NamedTuple


class RetentionPurged(NamedTuple):
    """The content of a log's leaves below `below` is about to be dropped; their hashes stay (class A).

    `first` is the first of them that still had content. `size` and `digest` name what was exported before: the
    checkpoint by its root leaves, and SHA-256 of the export's manifest. `approver` is another person than `actor`.
    """

    at_us: int
    of_log: str
    first: int
    below: int
    size: int
    digest: str
    actor: str
    approver: str
    reason: str


class LegalHoldChanged(NamedTuple):
    """A legal hold on ledger content was placed or lifted (class A). `tenant` None: on all of it.

    It binds the ledger's retention, and no deadline of any block.
    """

    at_us: int
    hold: str
    tenant: str | None
    action: str
    reason: str
    actor: str


class SubjectUnlinked(NamedTuple):
    """A subject's names and key are about to be destroyed: its pseudonyms mean nobody from then on (class A)."""

    at_us: int
    tenant: str
    pseudonyms: int
    actor: str
    reason: str


class SinkChanged(NamedTuple):
    """A sink of leaves (a webhook, a collector's file) is about to be attached, detached, or sent its dead batches
    again (class A). It is on record here and not in the sink, which may be the one that is dead."""

    at_us: int
    sink: str
    action: str
    actor: str
    reason: str
    trace: str = ""
