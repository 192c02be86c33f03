"""Events of erasures in one process (what was taken, what stays, what was read back), and of overdue custody."""

from __future__ import annotations

from typing import NamedTuple

from kvcustody.audit.runs import Runs


class ErasureApplied(NamedTuple):
    """An erasure took effect here (class B): `runs` is all custody that it covers, ended or about to end or kept.

    `requests` were aborted, `finishing` run on unattachable, `residencies` lapsed; `objects[i]` are of `tiers[i]`.
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


class CustodyOverdue(NamedTuple):
    """Holds are past their deadline and not lapsed yet: the process slept, or fell behind (class B).

    Nothing of them is served meanwhile. A second one, with none left, says that it has caught up.
    """

    at_us: int
    pool: int
    residencies: int
    due_us: int
