"""Events of a policy's release: every step of it, what a worker stages, and what it takes back."""

from __future__ import annotations

from typing import NamedTuple


class ReleaseStep(NamedTuple):
    """One step of the release workflow, about to be taken (class A).

    `step` is its number in the release; `record` the digest of the signed record, which holds the rest.
    """

    at_us: int
    step: int
    action: str
    revision: int
    digest: str
    record: str
    actor: str
    detail: str = ""
    trace: str = ""


class PolicyStaged(NamedTuple):
    """A revision took effect for some tenants of a worker (class A). `stage` names them, or their share."""

    at_us: int
    revision: int
    name: str
    digest: str
    stage: str
    actor: str
    previous: int = 0


class GrantsRevoked(NamedTuple):
    """A worker took grants, segments or sharing groups back: in effect before it is recorded (class B)."""

    at_us: int
    ids: tuple[str, ...]
    revision: int
    actor: str
