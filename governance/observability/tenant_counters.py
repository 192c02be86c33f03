"""Plain counters by tenant, for metrics and reports; no decision depends on them."""

from __future__ import annotations

from collections.abc import Hashable

_TABLES = ("deferred", "refused", "denials", "would_deny")
SESSIONS_MAX = 4096  # of one tenant that are remembered: one that comes back after as many others is a new one


class TenantCounters:
    """One tenant's counts since the Governor started."""

    __slots__ = (
        "deferred",
        "denials",
        "first_request_hits",
        "first_requests",
        "forecast_blocks",
        "granted_hit_blocks",
        "hit_blocks",
        "hit_requests",
        "monitored_blocks",
        "monitored_requests",
        "numbered",
        "prompt_tokens",
        "recomputed_blocks",
        "refused",
        "requests",
        "sessions",
        "stale_blocks",
        "unkeyed_requests",
        "verified_blocks",
        "without_kinds",
        "would_deny",
        "would_refuse_blocks",
    )

    def __init__(self) -> None:
        self.requests = 0  # that began
        self.unkeyed_requests = 0  # of them, those whose prompt has no keys
        self.numbered = 0  # requests that came without an id of their own
        self.prompt_tokens = 0
        self.hit_requests = 0
        self.hit_blocks = 0
        self.recomputed_blocks = 0  # computed again after they had been evicted
        self.verified_blocks = 0  # attached, and checked against their checksum as they were
        self.stale_blocks = 0  # found under their keys, and not attached: past their time, or no longer in reach
        self.granted_hit_blocks = 0
        self.monitored_requests = (
            0  # of them, those that the policy was not enforced for: no other figure has their hits
        )
        self.monitored_blocks = 0  # that these attached
        self.would_refuse_blocks = 0  # of those, what the policy would not have let them read
        self.forecast_blocks = 0  # that they would have attached, had it been enforced
        self.without_kinds = 0  # requests that said no kind of content, while the policy orders eviction by kind
        self.first_requests = 0
        self.first_request_hits = 0
        self.sessions: dict[int, None] = {}  # digests of them, the one that asked last at the end
        self.deferred: dict[str, int] = {}
        self.refused: dict[str, int] = {}
        self.denials: dict[str, int] = {}
        self.would_deny: dict[str, int] = {}  # denials that were recorded and not enforced

    @property
    def looked_up(self) -> int:
        """The number of requests that began and whose prompt has keys."""
        return self.requests - self.unkeyed_requests

    def count(self, table: dict[str, int], reason: str, by: int = 1) -> None:
        """Add to one of the tables of reasons."""
        table[reason] = table.get(reason, 0) + by

    def add(self, other: TenantCounters) -> None:
        """Add another tenant's counters, without its sessions."""
        for name in _NUMBERS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in _TABLES:
            table: dict[str, int] = getattr(self, name)
            theirs: dict[str, int] = getattr(other, name)
            for reason, count in theirs.items():
                self.count(table, reason, count)

    def count_session(self, session: Hashable, *, hit: bool) -> None:
        """Count the first request of `session`."""
        digest = hash(session)
        if digest not in self.sessions:
            self.first_requests += 1
            self.first_request_hits += hit
            if len(self.sessions) >= SESSIONS_MAX:
                del self.sessions[next(iter(self.sessions))]
        else:
            del self.sessions[digest]
        self.sessions[digest] = None

    def count_start(self, session: Hashable | None, prompt_tokens: int | None, hit_blocks: int) -> None:
        """Count a request that began. `session`: None without one; `prompt_tokens`: None where it cannot be
        looked up.
        """
        self.requests += 1
        if prompt_tokens is None:
            self.unkeyed_requests += 1
        else:
            self.prompt_tokens += prompt_tokens
        if hit_blocks:
            self.hit_requests += 1
            self.hit_blocks += hit_blocks
        if session is not None:
            self.count_session(session, hit=hit_blocks > 0)


_NUMBERS = tuple(name for name in TenantCounters.__slots__ if name not in (*_TABLES, "sessions"))
