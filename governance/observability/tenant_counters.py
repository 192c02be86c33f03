"""Plain counters by tenant, for metrics and reports; nothing here decides anything."""

from __future__ import annotations


class TenantCounters:
    """One tenant's counts since the Governor started."""

    __slots__ = (
        "deferred",
        "denials",
        "first_request_hits",
        "first_requests",
        "granted_hit_blocks",
        "hit_blocks",
        "hit_requests",
        "numbered",
        "prompt_tokens",
        "refused",
        "requests",
    )

    def __init__(self) -> None:
        self.requests = 0
        self.numbered = 0  # requests that came without an id of their own
        self.prompt_tokens = 0
        self.hit_requests = 0
        self.hit_blocks = 0
        self.granted_hit_blocks = 0
        self.first_requests = 0
        self.first_request_hits = 0
        self.deferred: dict[str, int] = {}
        self.refused: dict[str, int] = {}
        self.denials: dict[str, int] = {}

    def count(self, table: dict[str, int], reason: str, by: int = 1) -> None:
        """Add to one of the tables of reasons."""
        table[reason] = table.get(reason, 0) + by
