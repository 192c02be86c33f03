"""Events of what is done about custody: erasures, and scans for orphans."""

from __future__ import annotations

from typing import NamedTuple

from kvcustody.audit.runs import Runs


class ErasureRequested(NamedTuple):
    """All custody of a selector must end by the deadline (class B). `actor` asked for it."""

    at_us: int
    erasure: str
    tenant: str | None
    selector: str
    subject: str | None
    session: str | None
    deadline_us: int
    actor: str
    detail: str = ""
    trace: str = ""


class ErasureCompleted(NamedTuple):
    """An erasure ran: what ended, what lawfully remains and why (class B). `outcome`: complete or partial."""

    at_us: int
    erasure: str
    tenant: str | None
    outcome: str
    residencies: int
    blocks: int
    remaining: int
    reason: str = ""


class OrphanScanned(NamedTuple):
    """A scan compared the allocator, live sequences and the ledger (class B). `mode`: online or full."""

    at_us: int
    scan: int
    mode: str
    started_us: int
    ended_us: int
    residencies: int
    blocks: int
    findings: int


class OrphanFound(NamedTuple):
    """Custody that two sources disagree about (class B). `orphan` is one of the classes of the design."""

    at_us: int
    scan: int
    finding: int
    orphan: str
    cause: str
    tenant: str | None
    age_us: int
    runs: Runs
    action: str
    outcome: str
    residency: int = 0
