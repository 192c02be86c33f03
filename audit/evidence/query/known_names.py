"""Check names in questions and acts, so that a typo does not find, hold or end nothing unnoticed.

1. A name that the ledger does not know is refused, with the nearest one that it knows. Names that it knows are counted
   as known wherever they stand in it, not in the period or log that was asked about alone.
2. Only what may be told is suggested: a caller behind a tenant's wall is never given this check.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

from sqlalchemy import Connection, exists, select

from kvcustody.audit.evidence.query.events import EventFilter, find_events, newest_events
from kvcustody.audit.evidence.query.issuers import named_tenant
from kvcustody.audit.kinds import log_of
from kvcustody.audit.leaf import LEAF_KEYS
from kvcustody.audit.store.schema.ledger import logs, tenants
from kvcustody.errors import ConfigError
from kvcustody.ids import TenantId

OUTCOME_PARTS = ("outcome", "effect", "result")
_NAMES_MAX = 2_000  # that a suggestion is chosen from
_LEAVES_MAX = 5_000
_SHOWN_MAX = 8


def known_tenant(connection: Connection, name: str | None) -> TenantId | None:
    """Return the tenant name that the given name stands for; None means any.

    Raises `ConfigError` for a tenant that the ledger has never seen, and for an id that several issuers may have given.
    """
    if name is None:
        return None
    tenant = named_tenant(connection, name)
    check_tenant(connection, tenant)
    return tenant


def check_tenant(connection: Connection, tenant: str | None) -> None:
    """Raise `ConfigError` if the ledger has never seen a tenant of this name; None means any."""
    if tenant is None:
        return
    known = exists().where(tenants.c.tenant == tenant)
    logged = exists().where(logs.c.name == log_of(tenant))
    if not connection.scalar(select(known | logged)):
        raise _unknown("tenant", tenant, tenant_names(connection))


def tenant_names(connection: Connection, limit: int = _NAMES_MAX) -> list[str]:
    """Return the tenants that the ledger knows, at most `limit`, in the order of their names."""
    return list(connection.scalars(select(tenants.c.tenant).order_by(tenants.c.tenant).limit(limit)))


def known_kind(name: str) -> str:
    """Return a kind of event; raises `ConfigError` for an unknown one, with the nearest."""
    if name in LEAF_KEYS:
        return name
    close = get_close_matches(name, sorted(LEAF_KEYS), n=1)
    hint = f"did you mean `{close[0]}`? " if close else ""
    every = "`kvcustody audit kinds` lists all of them"
    raise ConfigError(f"no event is called `{_shown(name)}`: {hint}{every}", kind=name)


def check_said(connection: Connection, wanted: EventFilter) -> None:
    """Raise `ConfigError` if no leaf names the actor or outcome of a search without results."""
    asked: tuple[tuple[str, str | None, EventFilter, tuple[str, ...]], ...] = (
        ("actor", wanted.actor, EventFilter(actor=wanted.actor), ("actor",)),
        ("outcome", wanted.outcome, EventFilter(outcome=wanted.outcome), OUTCOME_PARTS),
    )
    for name, value, alone, parts in asked:
        if value is None or find_events(connection, alone, limit=1).rows:
            continue
        newest = newest_events(connection, EventFilter(), limit=_LEAVES_MAX)
        said = {row.body.get(part) for row in newest for part in parts}
        raise _unknown(name, value, sorted(text for text in said if isinstance(text, str) and text))


def _unknown(what: str, value: str, known: Iterable[str]) -> ConfigError:
    """Return the error for an unknown name, with the nearest known one."""
    names = list(known)
    close = get_close_matches(value, names, n=1, cutoff=0.6)
    if close:
        more = f"did you mean `{_shown(close[0])}`?"
    elif names:
        more = "there are " + ", ".join(f"`{_shown(name)}`" for name in names[:_SHOWN_MAX])
        more += ", …" if len(names) > _SHOWN_MAX else ""
    else:
        more = "it knows none"
    return ConfigError(f"the ledger knows no {what} `{_shown(value)}`: {more}", **{what: value})


def _shown(name: str) -> str:
    return "".join(char if char.isprintable() and char != "`" else "?" for char in name)[:128]
