"""Metrics of a service and of its workers, in the names of the field, for Prometheus.

1. A tenant appears under a pseudonym of this service (or its name, or not at all), and only so many of them: the rest
   are added up as `other`. A label is never a subject, a session, a prompt or a key.
2. A metric is a measure of docs/operate/metrics.md, with its unit in its name; a test compares the two.
3. What a worker says of itself is shown as it said it; what the ledger says is computed from the ledger.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from kvcustody.errors import ConfigError

if TYPE_CHECKING:
    from prometheus_client.core import Metric

OTHER = "other"


class Measure(NamedTuple):
    """One metric: its name, kind, help and labels; `key` is how workers name it in their status."""

    name: str
    kind: str
    help: str
    labels: tuple[str, ...] = ()
    key: str = ""


_TENANT = ("tenant",)
_WORKER = ("worker",)
MEASURES: tuple[Measure, ...] = (
    # paged allocation (PAG-4)
    Measure("kv_cache_blocks", "gauge", "Blocks of a worker by state.", ("worker", "state"), "blocks.{state}"),
    Measure("kv_cache_usage_ratio", "gauge", "Share of blocks in use or cached.", _WORKER, "usage_ratio"),
    Measure("kv_cache_capacity_blocks", "gauge", "Blocks that a worker governs.", _WORKER, "blocks.total"),
    Measure("kv_cache_allocated_blocks_total", "counter", "Blocks handed out.", _WORKER, "allocated"),
    Measure("kv_cache_bytes_per_block", "gauge", "Bytes of a block on a shard, where they are known.", _WORKER,
            "bytes_per_block"),
    Measure("kv_cache_charged_blocks", "gauge", "Blocks that tenants are charged for, on all workers, as these said.",
            _TENANT),
    Measure("kv_cache_active_tokens", "gauge", "Tokens of running requests, in our own pools.", _WORKER,
            "active_tokens"),
    Measure("requests_running", "gauge", "Requests that hold blocks.", _WORKER, "running"),
    Measure("requests_deferred_total", "counter", "Times that a request was told to wait, by reason; one that asks "
            "again is told again.", ("worker", "reason"), "deferred.{reason}"),
    Measure("requests_refused_total", "counter", "Requests that policy refused, by reason.", ("worker", "reason"),
            "refused.{reason}"),
    # prefix reuse (PRE-3)
    Measure("prefix_cache_queries_tokens_total", "counter", "Prompt tokens of requests that were looked up.", _WORKER,
            "prompt_tokens"),
    Measure("prefix_cache_hits_tokens_total", "counter", "Prompt tokens found in the pool, not prefilled again.",
            _WORKER, "hit_tokens"),
    Measure("prefix_cache_hit_requests_total", "counter", "Requests with a hit.", _WORKER, "hit_requests"),
    Measure("prefix_cache_requests_total", "counter", "Requests that began and had something to be looked up.", _WORKER,
            "requests"),
    Measure("prefix_cache_first_requests_total", "counter", "First requests of a session.", _WORKER, "first_requests"),
    Measure("prefix_cache_first_request_hits_total", "counter", "First requests of a session with a hit.", _WORKER,
            "first_request_hits"),
    Measure("prefix_cache_granted_hit_blocks_total", "counter", "Blocks attached through a grant or segment.", _WORKER,
            "granted_hit_blocks"),
    Measure("prefix_cache_nodes", "gauge", "Runs in the prefix tree, of our own pools.", _WORKER, "nodes"),
    # eviction (EVI-3)
    Measure("kv_cache_evicted_blocks_total", "counter", "Cached blocks that made room, by reason.",
            ("worker", "reason"), "evicted.{reason}"),
    # isolation (ISO-1)
    Measure("reuse_denied_requests_total", "counter", "Reuses that policy denied, on record.", ("tenant", "rule")),
    Measure("identities_refused_total", "counter", "Requests without an identity, with a false one, or of a tenant "
            "that policy does not admit, by reason.", ("worker", "reason"), "identity.{reason}"),
    Measure("credentials_refused_total", "counter", "Credentials that the service refused, by reason.", ("reason",)),
    # retention and deletion (RET-1 to RET-4)
    Measure("residencies", "gauge", "Residencies that are held.", _WORKER, "residencies"),
    Measure("residencies_overdue", "gauge", "Residencies past their deadline.", _WORKER, "overdue"),
    Measure("residencies_overdue_seconds_max", "gauge", "For how long the oldest of them has been.", _WORKER,
            "overdue_seconds"),
    Measure("residencies_expired_total", "counter", "Residencies that lapsed at their deadline.", _WORKER, "expired"),
    Measure("scrubbed_blocks_total", "counter", "Blocks overwritten, counted on the device.", ("worker", "shard"),
            "scrubbed.{shard}"),
    # integrity of what is reused (PRE-1)
    Measure("integrity_checked_blocks_total", "counter", "Blocks compared with their checksums before they were "
            "reused.", _WORKER, "integrity_checked"),
    Measure("integrity_mismatched_blocks_total", "counter", "Of them, those that had changed: never attached.",
            _WORKER, "integrity_mismatched"),
    Measure("deletion_due_units", "gauge", "Custody that was due to end in the last 24 hours of the clock, the open "
            "one too.", _TENANT),
    Measure("deletion_covered_units", "gauge", "Of it, what has evidence of its end in time.", _TENANT),
    Measure("deletion_overdue_units", "gauge", "Of it, what has no end on record.", _TENANT),
    Measure("deletion_unproven_units", "gauge", "Of it, what nothing can prove: its process died, or no leaf says that "
            "it was written.", _TENANT),
    Measure("deletion_coverage_ratio", "gauge", "Covered share of what was due; 1 when nothing was.", _TENANT),
    Measure("deletion_lag_seconds_max", "gauge", "Longest time from due to the last receipt, in these hours."),
    Measure("deletion_judged_age_seconds", "gauge", "Age of these figures: when the hours were judged last."),
    # lifecycle (LIF-2)
    Measure("memory_drift_blocks", "gauge", "Blocks in custody that nothing accounts for, found and not repaired.",
            _WORKER, "drift"),
    Measure("orphan_findings", "gauge", "Orphans on record, by class.", ("orphan",)),
    # the ledger (AUD-1, AUD-2)
    Measure("ledger_admitting", "gauge", "1 while new custody can be recorded."),
    Measure("ledger_backlog_events", "gauge", "Events of the service that are not committed."),
    Measure("ledger_spilled_bytes", "gauge", "Bytes in the service's spill."),
    Measure("ledger_received_leaves_total", "counter", "Leaves that workers handed in."),
    Measure("ledger_checkpoint_size", "gauge", "Root leaves under the newest signed checkpoint."),
    Measure("ledger_checkpoint_age_seconds", "gauge", "Age of the newest signed checkpoint."),
    Measure("ledger_unsealed_leaves", "gauge", "Leaves that no checkpoint covers yet."),
    Measure("ledger_unsealed_age_seconds", "gauge", "How long the oldest of them has been committed."),
    Measure("ledger_leaves", "gauge", "Leaves on record.", _TENANT),
    # the fleet (FLE-3)
    Measure("worker_up", "gauge", "1 while an open incarnation was heard in the last minute.", _WORKER),
    Measure("worker_policy_revision", "gauge", "Policy revision that a worker enforces.", _WORKER),
    Measure("worker_status_age_seconds", "gauge", "Age of a worker's counters when it sent them; nothing was counted "
            "since on an engine that takes no step.", _WORKER, "status_age_seconds"),
    Measure("worker_ledger_backlog_events", "gauge", "Events of a worker that are not handed in.", _WORKER,
            "ledger.backlog"),
    Measure("worker_ledger_spilled_bytes", "gauge", "Bytes in a worker's spill.", _WORKER, "ledger.spilled_bytes"),
    Measure("worker_ledger_spill_seconds", "gauge", "How long a worker's spill lasts at its last minute's rate.",
            _WORKER, "ledger.spill_seconds"),
    Measure("worker_ledger_replaying", "gauge", "1 while a worker hands in its spill.", _WORKER, "ledger.replaying"),
    Measure("worker_ledger_kept_bytes", "gauge", "Bytes of batches that a worker keeps until they are signed.", _WORKER,
            "ledger.kept_bytes"),
    Measure("worker_ledger_kept_dropped_bytes", "gauge", "Bytes that a worker let go of unsigned, as they were over "
            "`kept_bytes_max`.", _WORKER, "ledger.kept_dropped_bytes"),
    Measure("worker_ledger_unverified", "gauge", "1 while a worker trusts no key that signed the newest checkpoint.",
            _WORKER, "ledger.kept_unverified"),
    Measure("worker_received_sequence", "gauge", "Highest sequence that a worker handed in.", _WORKER),
    # the service itself
    Measure("http_requests_total", "counter", "Requests answered.", ("operation", "status")),
    Measure("http_request_seconds_total", "counter", "Time spent on them.", ("operation", "status")),
)  # fmt: skip
BY_NAME = {measure.name: measure for measure in MEASURES}
_TALLIES = (
    "hit_requests",
    "prompt_tokens",
    "first_requests",
    "first_request_hits",
    "granted_hit_blocks",
)
Sample = tuple[str, tuple[str, ...], float]


def families(samples: Iterable[Sample]) -> Iterator[Metric]:
    """The metrics of samples (name, label values, value), in the order of the measures."""
    try:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
    except ImportError:
        raise ConfigError("prometheus-client is not installed; pip install 'kvcustody[service]'") from None
    found: dict[str, list[Sample]] = {}
    for sample in samples:
        found.setdefault(sample[0], []).append(sample)
    for measure in MEASURES:
        if measure.name not in found:
            continue
        make = CounterMetricFamily if measure.kind == "counter" else GaugeMetricFamily
        name = f"kvcustody_{measure.name}".removesuffix("_total")
        family = make(name, measure.help, labels=measure.labels)
        for _, labels, value in found[measure.name]:
            family.add_metric(labels, value)
        yield family


def exposition(samples: Iterable[Sample]) -> bytes:
    """Samples in Prometheus' text format."""
    made = list(families(samples))
    from prometheus_client import CollectorRegistry, generate_latest

    class _Made:
        def collect(self) -> list[Metric]:
            return made

    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Made())
    return bytes(generate_latest(registry))


def of_worker(worker: str, status: Mapping[str, Any]) -> Iterator[Sample]:
    """The samples of what a worker says of itself; what no measure names is left out (rule 3)."""
    for measure in MEASURES:
        start, braces, label = measure.key.partition("{")
        if not measure.key:
            continue
        if not braces:
            if measure.key in status:
                yield measure.name, (worker,), float(status[measure.key])
            continue
        assert label.endswith("}")
        for name, value in status.items():
            if name.startswith(start) and name != "blocks.total":
                yield measure.name, (worker, name.removeprefix(start)), float(value)


def worker_status(stats: Any, block_tokens: int, bytes_per_block: int = 0) -> dict[str, float]:
    """What a worker reports of a facade's `stats()`: counters by the keys of the measures, bounded in number."""
    found: dict[str, float] = {
        "running": stats.running,
        "drift": stats.drift_blocks,
    }
    if bytes_per_block:
        found["bytes_per_block"] = bytes_per_block

    def add(name: str, value: float) -> None:
        found[name] = found.get(name, 0) + value

    for pool in stats.pools:
        for state, blocks in pool.by_state.items():
            add(f"blocks.{state}", blocks)
        for shard, blocks in enumerate(pool.scrubbed):
            add(f"scrubbed.{shard}", blocks)
        for reason, blocks in pool.evicted.items():
            add(f"evicted.{reason}", blocks)
        for name, value in (
            ("blocks.total", pool.total),
            ("allocated", pool.allocated),
            ("residencies", pool.residencies),
            ("expired", pool.expired_residencies),
            ("overdue", pool.overdue_residencies),
            ("integrity_checked", pool.checked_blocks),
            ("integrity_mismatched", pool.mismatched_blocks),
        ):
            add(name, value)
        if pool.nodes is not None:
            add("nodes", pool.nodes)
        if pool.active_tokens is not None:
            add("active_tokens", pool.active_tokens)
        found["overdue_seconds"] = max(found.get("overdue_seconds", 0), pool.overdue_us / 1_000_000)
    for tally in (stats.departed, *stats.tenants.values()):
        add("requests", tally.looked_up)
        for name in _TALLIES:
            add(name, getattr(tally, name))
        if stats.are_hits_leading:
            add("hit_tokens", tally.hit_blocks * block_tokens)
        for reason, count in list(tally.deferred.items()):  # the engine goes on counting
            add(f"deferred.{reason}", count)
        for reason, count in list(tally.refused.items()):
            add(f"refused.{_word(reason)}", count)
    for reason, count in stats.attempts.items():
        add(f"identity.{reason}", count)
    total = found.get("blocks.total", 0)
    if total:
        found["usage_ratio"] = (found.get("blocks.active", 0) + found.get("blocks.cached", 0)) / total
    return found


def metrics_table() -> str:
    """The table of docs/operate/metrics.md."""
    rows = ["| metric | kind | labels | meaning |", "|---|---|---|---|"]
    rows += [
        f"| `kvcustody_{measure.name}` | {measure.kind} | {', '.join(measure.labels)} | {measure.help} |"
        for measure in MEASURES
    ]
    return "\n".join(rows) + "\n"


def _word(text: str) -> str:
    """A reason as a label: rule ids and words stay, everything else becomes `_`."""
    return "".join(c if c.isascii() and (c.isalnum() or c in "._:/-") else "_" for c in text.lower())[:40]
