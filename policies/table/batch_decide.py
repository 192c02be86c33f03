"""The dense form of a decision table, with which numpy answers many requests for one instant.

1. `permits` agrees with `DecisionTable.decide` on every well-formed request; anything out of range is a deny.
2. Tenants are indices: listed ones in order of name; unlisted ones share a row and are told apart only for equality.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcustody.policies.document.model import Action, Scope, Via
from kvcustody.policies.table.model import TENANT_LENGTH_MAX, AccessColumns, Integers, Row, Tables, Timeline

_ACTIONS, _SCOPES = len(Action), len(Scope)


class BatchTable:
    """Permit bits of the own rows, and sorted intervals of all cells across tenants."""

    __slots__ = ("_cross", "_end", "_index", "_levels", "_longest", "_own", "_permit", "_refused", "_start")

    def __init__(self, tables: Tables, levels: int) -> None:
        self._levels = levels
        self._index = {tenant: index for index, tenant in enumerate(sorted(tables.own))}
        self._refused = tables.unlisted is None
        self._own = self._own_bits(tables)
        entries = sorted(self._cross_entries(tables))
        columns = np.array(entries, dtype=np.int64).reshape(-1, 4)
        self._cross, self._start, self._end = columns[:, 0].copy(), columns[:, 1].copy(), columns[:, 2].copy()
        self._permit = columns[:, 3].astype(bool)
        counts = np.unique(self._cross, return_counts=True)[1]
        self._longest = int(counts.max()) if len(counts) else 0

    def _own_bits(self, tables: Tables) -> NDArray[np.bool_]:
        shape = (_ACTIONS, self._levels, _SCOPES)
        rows = np.zeros((len(self._index) + 1, *shape), dtype=bool)
        # Tenants that are decided alike have the same decisions, admission apart: its reason names the tenant.
        admission = self._levels * _SCOPES
        seen: dict[tuple[int, ...], list[bool]] = {}
        listed: list[Row | None] = [tables.own[tenant] for tenant in self._index]
        for index, row in enumerate([*listed, tables.unlisted]):
            if row is None:
                continue
            rest = tuple(map(id, row[admission:]))
            if rest not in seen:
                seen[rest] = [decision.permitted for decision in row[admission:]]
            admitted = [decision.permitted for decision in row[:admission]]
            rows[index] = np.reshape(admitted + seen[rest], shape)
        return rows

    def _cross_entries(self, tables: Tables) -> list[tuple[int, int, int, int]]:
        """(key, start, end, permit) of every interval; the key packs all that a request says but the time."""
        entries: list[tuple[int, int, int, int]] = []

        def add(key: int, timeline: Timeline) -> None:
            entries.extend((key, piece.start_us, piece.end_us, piece.decision.permitted) for piece in timeline)

        for (reader, owner), levels in tables.grants.items():
            pair = self._pair(self._index[reader], self._index[owner])
            for level, timeline in enumerate(levels):
                for scope in (Scope.TENANT, Scope.GROUP, Scope.PUBLIC) if timeline else ():
                    add(int(self._key(pair, Via.GRANT, Action.REUSE, level, scope)), timeline)
        for (who, owner), row in tables.segments.items():
            reader_row = self._index[who] if isinstance(who, str) else len(self._index)
            pair = self._pair(reader_row, self._index[owner])
            for (action, level, scope_, source), timeline in row.items():
                if source is None:
                    add(int(self._key(pair, Via.SEGMENT, action, level, scope_)), timeline)
        return entries

    def _pair(self, reader: int, owner: int) -> int:
        return reader * (len(self._index) + 1) + owner

    def _key(self, pair: Any, via: Any, action: Any, level: Any, scope: Any) -> Any:
        """One integer for (pair, via, action, level, scope); works on integers and on arrays alike."""
        return (((pair * 3 + via) * _ACTIONS + action) * self._levels + level) * _SCOPES + scope

    def intern(self, readers: Sequence[str], owners: Sequence[str]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return indices for tenants. Unlisted tenants get indices that are valid within this call; malformed ones get
        -1.
        """
        seen = dict(self._index)
        result = []
        for names in (readers, owners):
            indices = np.empty(len(names), dtype=np.int64)
            for place, name in enumerate(names):
                if type(name) is not str or not 0 < len(name) <= TENANT_LENGTH_MAX:
                    indices[place] = -1
                else:
                    indices[place] = seen.setdefault(name, len(seen) + 1)
            result.append(indices)
        return result[0], result[1]

    def permits(self, requests: AccessColumns[Integers], now_utc_us: int) -> NDArray[np.bool_]:
        """Return the mask of permits; readers and owners are indices of one `intern` call."""
        actions, readers, owners, classifications, scopes, vias = requests
        valid = (readers >= 0) & (owners >= 0) & (vias >= 0) & (vias < 3)
        for values, count in ((actions, _ACTIONS), (classifications, self._levels), (scopes, _SCOPES)):
            valid &= (values >= 0) & (values < count)
        unlisted = len(self._index)
        reader_row, owner_row = np.minimum(readers, unlisted), np.minimum(owners, unlisted)
        result = np.zeros(len(actions), dtype=bool)
        own = valid & (vias == Via.OWN) & (readers == owners)
        result[own] = self._own[reader_row[own], actions[own], classifications[own], scopes[own]]
        cross = np.flatnonzero(valid & (vias != Via.OWN) & (owner_row < unlisted))
        if self._refused:
            cross = cross[reader_row[cross] < unlisted]
        if len(cross) and self._longest:
            pair = reader_row[cross].astype(np.int64) * (unlisted + 1) + owner_row[cross]
            key = self._key(pair, vias[cross], actions[cross], classifications[cross], scopes[cross])
            result[cross] = self._live(key, now_utc_us)
        return result

    def _live(self, keys: NDArray[np.int64], now_utc_us: int) -> NDArray[np.bool_]:
        """Return whether an interval of each key contains the instant and permits."""
        permitted = np.zeros(len(keys), dtype=bool)
        place = np.searchsorted(self._cross, keys)
        for offset in range(self._longest):
            at = np.minimum(place + offset, len(self._cross) - 1)
            same = self._cross[at] == keys
            permitted |= same & (self._start[at] <= now_utc_us) & (now_utc_us < self._end[at]) & self._permit[at]
        return permitted
