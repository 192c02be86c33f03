"""What a worker records about its policy, besides the activation.

1. The document is recorded in pieces beside the activation. So a reader of the ledger knows the policy in effect even
   where it was never released there. The activation's digest shows whether it is the right one.
2. Nothing waits for it. If a document is too long, or was lost, only its digest is known.
"""

from __future__ import annotations

import orjson

from kvcustody.audit.kinds import Event, GrantsRevoked, PolicyText
from kvcustody.governance.decisions.staged_table import StagedTable
from kvcustody.policies.table.decision_table import DecisionTable

_PIECE_BYTES = 6000  # of 8192 that a leaf may have
_PIECES_MAX = 64
_IDS_AT_ONCE = 32


def documents_on_record(table: DecisionTable, at_us: int) -> list[Event]:
    """Return the pieces of the document behind a table, and of both documents where one is staged; none without a
    document.
    """
    tables = (table.base, table) if isinstance(table, StagedTable) else (table,)
    return [event for one in tables for event in _pieces(one, at_us)]


def revoked_on_record(ids: frozenset[str], revision: int, at_us: int, actor: str) -> list[Event]:
    """Return the ids that are revoked when a policy begins; none where all of it holds."""
    listed = sorted(ids)
    parts = (listed[place : place + _IDS_AT_ONCE] for place in range(0, len(listed), _IDS_AT_ONCE))
    return [GrantsRevoked(at_us, tuple(part), revision, actor) for part in parts]


def _pieces(table: DecisionTable, at_us: int) -> list[Event]:
    texts: list[str] = []
    rest = table.policy.source
    while rest and len(texts) <= _PIECES_MAX:
        size = _PIECE_BYTES
        while len(orjson.dumps(rest[:size])) > _PIECE_BYTES:  # as a leaf escapes it
            size //= 2
        texts.append(rest[:size])
        rest = rest[size:]
    if len(texts) > _PIECES_MAX:
        return []
    return [PolicyText(at_us, table.digest, number, len(texts), text) for number, text in enumerate(texts, 1)]
