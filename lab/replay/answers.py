"""Four answers of a replay: what isolation costs, what sharing gives, which pool it needs, what the ledger weighs."""

from __future__ import annotations

from typing import Any, NamedTuple

from kvcustody.audit.evidence.query.evidence_size import EvidenceSize
from kvcustody.lab.replay.sharing import SharedPrefix, SharingCounter
from kvcustody.plurals import several
from kvcustody.times import DAY_US

NO_CONTENT = "not known: the trace has lengths and no content"

_ROUGH_BELOW = 100


class PoolNeed(NamedTuple):
    """How much of its pool a replay used. `advised`: blocks that would have kept what was computed again; 0: these."""

    blocks: int
    most_used: int
    advised: int
    everything: int


class ReplayAnswers(NamedTuple):
    """What an engineer asks of a trace, in tokens, blocks and bytes."""

    prompt_tokens: int
    found_tokens: int
    subject_tokens: int
    tenant_tokens: int
    everybody_tokens: int
    shared_prefixes: tuple[SharedPrefix, ...]
    has_content: bool
    pool: PoolNeed
    ledger: EvidenceSize | None
    requests_per_day: float

    def rows(self) -> list[tuple[str, str]]:
        """Return each question with its answer in a sentence."""
        return [
            ("what isolation costs", self._isolation()),
            ("what sharing would give", self._sharing()),
            ("what pool it needs", self._pool()),
            ("what the ledger will weigh", self._ledger()),
        ]

    def as_json(self) -> dict[str, Any]:
        """Return the figures and the sentences for `--json`."""
        ledger, day = self.ledger, self.requests_per_day
        a_request = None if ledger is None or not ledger.requests else 1 / ledger.requests
        return {
            "isolation": {
                "prompt_tokens": self.prompt_tokens,
                "found_tokens": self.found_tokens,
                "unlimited": {
                    "within_subjects_tokens": self.subject_tokens if self.has_content else None,
                    "within_tenants_tokens": self.tenant_tokens if self.has_content else None,
                    "everybody_tokens": self.everybody_tokens if self.has_content else None,
                },
                "cost_tokens": self.everybody_tokens - self.tenant_tokens if self.has_content else None,
            },
            "sharing": [prefix._asdict() for prefix in self.shared_prefixes],
            "pool": self.pool._asdict(),
            "ledger": None
            if ledger is None or a_request is None
            else {
                "leaves_per_request": ledger.leaves * a_request,
                "bytes_per_request": ledger.leaf_bytes * a_request,
                "disk_bytes_per_request": ledger.disk_bytes * a_request,
                "requests_per_day": day,
                "disk_gigabytes_per_day": ledger.disk_bytes * a_request * day / 1e9,
            },
            "sentences": dict(self.rows()),
        }

    def _share(self, tokens: int) -> str:
        return f"{tokens / self.prompt_tokens:.1%}" if self.prompt_tokens else "no data"

    def _isolation(self) -> str:
        if not self.has_content:
            return NO_CONTENT
        cost = self.everybody_tokens - self.tenant_tokens
        return (
            f"{self._share(cost)} of prompt tokens ({several(cost, 'token')} of prefill). Without limits "
            f"{self._share(self.everybody_tokens)} would be found if everybody shared, "
            f"{self._share(self.tenant_tokens)} within tenants and {self._share(self.subject_tokens)} within subjects. "
            f"This replay found {self._share(self.found_tokens)} in its pool, under its policy"
        )

    def _sharing(self) -> str:
        if not self.has_content:
            return NO_CONTENT
        if not self.shared_prefixes:
            return "nothing: no tenant sent a whole block that another had sent before it"
        best = self.shared_prefixes[0]
        return (
            f"at most {several(self.everybody_tokens - self.tenant_tokens, 'token')}. The best prefix to declare has "
            f"{several(best.prefix_tokens, 'token')} and would save {several(best.tenants, 'tenant')} "
            f"{several(best.tokens, 'token')} (docs/how-to/share-a-prefix.md)"
        )

    def _pool(self) -> str:
        pool = self.pool
        if pool.advised:
            need = f"{pool.advised:,} blocks would have kept what was evicted and computed again"
        else:
            need = f"these {pool.blocks:,} blocks are enough: nothing was evicted and then computed again"
        return (
            f"{need}. At most {several(pool.most_used, 'block')} held something; "
            f"{several(pool.everything, 'block')} would hold everything"
        )

    def _ledger(self) -> str:
        ledger = self.ledger
        if ledger is None or not ledger.requests:
            return "not known: nothing was recorded"
        disk = ledger.disk_bytes / ledger.requests
        rough = (
            f" (rough: measured from {several(ledger.requests, 'request')})" if ledger.requests < _ROUGH_BELOW else ""
        )
        average = ledger.leaves / ledger.requests
        return (
            f"a request leaves {average:.1f} records on average, and takes {_size_text(disk)} on disk; "
            f"{_size_text(disk * self.requests_per_day)} a day at this trace's rate, "
            f"{self.requests_per_day:,.0f} requests a day{rough}"
        )


def answers_of(
    sharing: SharingCounter,
    *,
    found_tokens: int,
    pool: PoolNeed,
    ledger: EvidenceSize | None,
    requests: int,
    span_us: int,
) -> ReplayAnswers:
    """Return the answers for a replay of `requests` that arrived over `span_us`."""
    return ReplayAnswers(
        sharing.prompt_tokens,
        found_tokens,
        sharing.subject_tokens,
        sharing.tenant_tokens,
        sharing.everybody_tokens,
        tuple(sharing.shared_prefixes()),
        sharing.has_content,
        pool,
        ledger,
        requests * DAY_US / max(span_us, 1_000_000),
    )


def _size_text(size: float) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6)):
        if size >= scale:
            return f"{size / scale:,.1f} {unit}"
    return f"{size / 1e3:,.1f} kB"
