"""Events of the control plane: who read the ledger, and who may ask at all."""

from __future__ import annotations

from typing import NamedTuple


class AccessRecorded(NamedTuple):
    """Somebody with a role that sees others' custody read the ledger or took something out of it (class A).

    `operation` is the operation's name in the API. `of_tenant` is whom the question was about, empty for everybody.
    `filters` are the names of the filters that were used, never their values: one could be a subject's name.
    """

    at_us: int
    actor: str
    roles: tuple[str, ...]
    operation: str
    of_tenant: str = ""
    filters: tuple[str, ...] = ()
    trace: str = ""


class PrincipalChanged(NamedTuple):
    """A principal was enrolled or disabled, or a key of theirs issued, replaced or revoked (class A).

    `detail` is a key's public prefix. Never the key.
    """

    at_us: int
    principal: str
    action: str
    roles: tuple[str, ...]
    of_tenant: str
    actor: str
    detail: str = ""
    trace: str = ""
