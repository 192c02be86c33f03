"""Events of an erasure in one process: what it took, what lawfully stays, and what was read back afterwards."""

from __future__ import annotations

from typing import NamedTuple

from kvcustody.audit.runs import Runs


class ErasureApplied(NamedTuple):
    """An erasure took effect here (class B): `runs` is all custody that it covers, ended or about to end or kept.

    `requests` were aborted, `finishing` run on unattachable, `residencies` lapsed; `objects[i]` are those of `tiers[i]`.
    """

    at_us: int
    erasure: str
    tenant: str | None
    requests: int
    finishing: int
    residencies: int
    runs: Runs
    tiers: tuple[str, ...] = ()
    objects: tuple[int, ...] = ()


class ErasureRemaining(NamedTuple):
    """Custody that an erasure covers and that stays, with the reason (class B)."""

    at_us: int
    erasure: str
    tenant: str | None
    reason: str
    runs: Runs


class ErasureReread(NamedTuple):
    """What an erasure ended was read back after its receipts (class B).

    Only blocks that were still CLEAN at the same generation could be read: `checked`; the rest, `changed`, had been
    handed out again. `nonzero`: bytes that were not zero.
    """

    at_us: int
    erasure: str
    tenant: str | None
    checked: int
    changed: int
    nonzero: int
