"""Prometheus metrics of a service and its workers, under the field's usual names.

1. A tenant appears under a pseudonym of this service (or its name, or not at all), and only so many of them: the rest
   are added up as `other`. A label is never a subject, a session, a prompt or a key.
2. A metric is a measure of docs/reference/metrics.md, with its unit in its name; a test compares the two.
3. What a worker says of itself is shown as it said it; what the ledger says is computed from the ledger.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from kvcustody.errors import ConfigError
from kvcustody.governance.observability.histogram import INFINITE

if TYPE_CHECKING:
    from prometheus_client.core import Metric

OTHER = "other"


class Measure(NamedTuple):
    """One metric: its name, kind, help and labels; `key` is how workers name it in their status."""

    name: str
    kind: str
    help: str
    labels: tuple[str, ...] = ()
    key: str = ""  # `{label}` stands for a label; of a histogram, what comes before `.le.BOUND` and `.sum`


_TENANT = ("tenant",)
_WORKER = ("worker",)
_ROUTED = ("routed_to",)  # a worker, by receipts: it may have ended since
_SINK = ("sink",)
_TIER = ("worker", "tier")
_PLACE = ("worker", "place")  # where KV events are told
MEASURES: tuple[Measure, ...] = (
    # paged allocation (PAG-4)
    Measure("kv_cache_blocks", "gauge", "Blocks of a worker by state.", ("worker", "state"), "blocks.{state}"),
    Measure("kv_cache_usage_ratio", "gauge", "Share of blocks in use or cached.", _WORKER, "usage_ratio"),
    Measure("kv_cache_capacity_blocks", "gauge", "Blocks that a worker governs.", _WORKER, "blocks.total"),
    Measure("kv_cache_allocated_blocks_total", "counter", "Blocks handed out.", _WORKER, "allocated"),
    Measure("kv_cache_block_tokens", "gauge", "Tokens of a block.", _WORKER, "block_tokens"),
    Measure("kv_cache_bytes_per_block", "gauge", "Bytes of a block on a shard, where they are known.", _WORKER,
            "bytes_per_block"),
    Measure("kv_cache_charged_blocks", "gauge", "Blocks that tenants are charged for, on all workers, as these said.",
            _TENANT),
    Measure("kv_cache_active_tokens", "gauge", "Tokens of running requests.", _WORKER, "active_tokens"),
    Measure("tenant_active_tokens", "gauge", "The same by tenant, on all workers.", _TENANT),
    Measure("kv_cache_final_block_waste_tokens", "gauge", "Tokens that blocks of running requests have room for and do "
            "not hold.", _WORKER, "waste_tokens"),
    Measure("kv_cache_fragmentation_ratio", "gauge", "The same as a share of all that they have room for; blocks are "
            "alike, so nothing else is lost.", _WORKER, "fragmentation"),
    Measure("kv_cache_clean_waits_total", "counter", "Hand-outs that found too few clean blocks, and waited for "
            "evictions or scrubs.", _WORKER, "clean_waits"),
    Measure("kv_cache_stalls_total", "counter", "Times that a running request got no room for its next token.", _WORKER,
            "stalled"),
    Measure("requests_running", "gauge", "Requests that hold blocks.", _WORKER, "running"),
    Measure("requests_deferred_total", "counter", "Requests that were told to wait, by reason; one that asks again is "
            "counted once for each.", ("worker", "reason"), "deferred.{reason}"),
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
    Measure("prefix_cache_hit_blocks_total", "counter", "Blocks that look-ups found, by confidence: `present` were "
            "checked against their checksum as they were attached, `unverified` were attached as they were, `stale` "
            "were past their time and not attached.", ("worker", "confidence"), "hit_blocks.{confidence}"),
    Measure("prefix_cache_hit_age_seconds", "histogram", "Age of the newest block that a request attached.", _WORKER,
            "hit_age"),
    Measure("prefix_cache_hit_length_tokens", "histogram", "Tokens that requests with a hit attached; with several "
            "layer groups, those of all.", _WORKER, "hit_length"),
    Measure("prefix_cache_lookup_seconds_total", "counter", "Time spent on look-ups, in our own pools.", _WORKER,
            "look_up_seconds"),
    Measure("prefix_cache_nodes", "gauge", "Runs in the prefix tree, of our own pools.", _WORKER, "nodes"),
    Measure("prefix_cache_depth_blocks_max", "gauge", "The deepest branch of the tree, of its first 4,096 runs.",
            _WORKER, "depth_blocks"),
    Measure("prefix_cache_shared_tokens", "gauge", "Tokens that running requests share, once for each beyond the "
            "first; of the same runs.", _WORKER, "shared_tokens"),
    Measure("time_to_first_token_seconds", "histogram", "From when a request came to its first token, by whether "
            "any of its prompt was in the cache: `hit` or `miss`.", ("worker", "cached"), "ttft.{cached}"),
    Measure("request_queue_seconds", "histogram", "From when a request came until it had its blocks: how long "
            "allocation took.", _WORKER, "queue"),
    Measure("prefill_avoided_seconds_total", "counter", "Prefill time that hits saved, by the measured cost of a "
            "prefill.", _WORKER, "prefill_avoided_seconds"),
    Measure("prefill_cost_seconds", "gauge", "What a prefill takes: to `start`, for each `token`, for each `pair` of "
            "a token and one before it.", ("worker", "term"), "prefill_cost.{term}"),
    Measure("prefill_cost_error_ratio", "gauge", "What predictions of that cost were wrong by, as a share of what "
            "was measured.", _WORKER, "prefill_cost_error"),
    # eviction (EVI-3)
    Measure("kv_cache_evicted_blocks_total", "counter", "Cached blocks that made room, by reason.",
            ("worker", "reason"), "evicted.{reason}"),
    Measure("requests_without_kinds_total", "counter", "Requests whose content was marked with no kind, while "
            "the policy orders eviction by kind.", _WORKER, "without_kinds"),
    Measure("kv_cache_recomputed_blocks_total", "counter", "Blocks that were computed again after they had been "
            "evicted.", _WORKER, "recomputed"),
    Measure("kv_cache_advised_blocks", "gauge", "The pool that would have kept nine in ten of them; absent where "
            "there were none.", _WORKER, "advised_blocks"),
    Measure("tenant_cache_thrashing", "gauge", "1 while at least half of what a tenant wants again had been evicted, "
            "on any worker.", _TENANT),
    Measure("tenant_recomputed_blocks", "gauge", "Blocks of a tenant that were computed again since its workers began.",
            _TENANT),
    # isolation (ISO-1)
    Measure("reuse_denied_requests_total", "counter", "Reuses that policy denied, on record.", ("tenant", "rule")),
    Measure("identities_refused_total", "counter", "Requests without an identity, with a false one, or of a tenant "
            "that policy does not admit, by reason.", ("worker", "reason"), "identity.{reason}"),
    Measure("credentials_refused_total", "counter", "Credentials that the service refused, by reason.", ("reason",)),
    # enforcement that is not for everybody (adoption)
    Measure("policy_monitored", "gauge", "1 while the policy is not enforced for everybody.", _WORKER, "monitors"),
    Measure("monitored_requests_total", "counter", "Requests that it was not enforced for.", _WORKER,
            "monitored_requests"),
    Measure("monitored_reused_tokens_total", "counter", "Prompt tokens that these attached, in no other "
            "figure of hits.", _WORKER, "monitored_tokens"),
    Measure("monitored_refused_tokens_total", "counter", "Of them, those that the policy would not have let them read.",
            _WORKER, "would_refuse_tokens"),
    Measure("monitored_forecast_tokens_total", "counter", "Prompt tokens that they would have found, had it been "
            "enforced.", _WORKER, "forecast_tokens"),
    Measure("monitored_denials_total", "counter", "Denials that were recorded of them and not enforced, by rule.",
            ("worker", "reason"), "would_deny.{reason}"),
    # retention and deletion (RET-1 to RET-4)
    Measure("kv_cache_age_seconds", "gauge", "Mean age of cached blocks; in our own pools, of the first 4,096 runs.",
            _WORKER, "cached_age_seconds"),
    Measure("kv_cache_age_seconds_max", "gauge", "Age of the oldest of them.", _WORKER, "cached_age_seconds_max"),
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
    # tiers beside the device (TIE-1)
    Measure("tier_absent_stores", "gauge", "Classifications of the active policy whose copies would go to a remote "
            "store alone, where the worker has none.", _WORKER, "absent_stores"),
    Measure("tier_copies", "gauge", "Sealed copies that can be found in a tier.", _TIER, "tier_copies.{tier}"),
    Measure("tier_used_bytes", "gauge", "Their sealed bytes.", _TIER, "tier_used_bytes.{tier}"),
    Measure("tier_capacity_bytes", "gauge", "The most that a tier keeps.", _TIER, "tier_capacity_bytes.{tier}"),
    Measure("tier_waiting_copies", "gauge", "Copies that ended and whose bytes, or keys, are not gone yet.", _TIER,
            "tier_waiting.{tier}"),
    Measure("tier_stored_blocks_total", "counter", "Evicted blocks that a tier took.", _TIER,
            "tier_stored_blocks.{tier}"),
    Measure("tier_restored_blocks_total", "counter", "Blocks that came back to a request in place of being computed.",
            _TIER, "tier_restored_blocks.{tier}"),
    Measure("tier_store_seconds_total", "counter", "Time that stores took.", _TIER, "tier_store_seconds.{tier}"),
    Measure("tier_restore_seconds_total", "counter", "Time that restores took.", _TIER, "tier_restore_seconds.{tier}"),
    Measure("tier_refused_total", "counter", "Stores and restores that found no room or buffer, or failed.", _TIER,
            "tier_refused.{tier}"),
    Measure("tier_left_alone_total", "counter", "Stores and restores that were decided against: slower than computing, "
            "or not worth it.", _TIER, "tier_left_alone.{tier}"),
    Measure("tier_prediction_error_ratio", "gauge", "What predictions of restores were wrong by, as a share of what "
            "was measured.", _TIER, "tier_prediction_error.{tier}"),
    Measure("deletion_due_units", "gauge", "Custody that was due to end in the last 24 hours of the clock, the open "
            "one too.", _TENANT),
    Measure("deletion_covered_units", "gauge", "Of it, what has evidence of its end in time.", _TENANT),
    Measure("deletion_overdue_units", "gauge", "Of it, what has no end on record.", _TENANT),
    Measure("deletion_unproven_units", "gauge", "Of it, what nothing can prove: its process died, or no leaf says that "
            "it was written.", _TENANT),
    Measure("deletion_coverage_ratio", "gauge", "Covered share of what was due; 1 when nothing was.", _TENANT),
    Measure("deletion_lag_seconds_max", "gauge", "Longest time from due to the last receipt, in these hours."),
    Measure("deletion_judged_age_seconds", "gauge", "Age of these figures: when the hours were judged last."),
    # lifecycle (LIF-1, LIF-2)
    Measure("request_cancel_to_release_seconds", "histogram", "From when a request was cancelled until what it held "
            "was given back.", _WORKER, "cancel"),
    Measure("memory_drift_blocks", "gauge", "Blocks in custody that nothing accounts for, found and not repaired.",
            _WORKER, "drift"),
    Measure("orphan_findings", "gauge", "Orphans on record, by class.", ("orphan",)),
    # the ledger (AUD-1, AUD-2)
    Measure("service_trouble", "gauge", "1 while something of this kind keeps the service from what it is for, 0 else; "
            "`/v1/health` says what.", ("kind",)),
    Measure("ledger_admitting", "gauge", "1 while new custody can be recorded."),
    Measure("ledger_backlog_events", "gauge", "Events of the service that are not committed."),
    Measure("ledger_spilled_bytes", "gauge", "Bytes in the service's spill."),
    Measure("ledger_received_leaves_total", "counter", "Leaves that workers handed in."),
    Measure("batch_commit_seconds", "histogram", "From when a worker's batch was queued until it was durable."),
    Measure("ledger_checkpoint_size", "gauge", "Root leaves under the newest signed checkpoint."),
    Measure("ledger_checkpoint_age_seconds", "gauge", "Age of the newest signed checkpoint."),
    Measure("ledger_unsealed_leaves", "gauge", "Leaves that no checkpoint covers yet."),
    Measure("ledger_unsealed_age_seconds", "gauge", "How long the oldest of them has been committed."),
    Measure("ledger_leaves", "gauge", "Leaves on record.", _TENANT),
    # what waits for somebody, and its dates (the inbox)
    Measure("inbox_items", "gauge", "Things that wait for somebody, by kind and state.", ("kind", "state")),
    Measure("erasures", "gauge", "Erasures by state: open, missed, complete, late, not-followed.", ("state",)),
    Measure("erasure_next_deadline_seconds", "gauge", "Until the nearest deadline of an open erasure; absent: none."),
    Measure("subject_cases", "gauge", "Requests of people by state: open, near, missed, answered, late.", ("state",)),
    Measure("subject_case_next_deadline_seconds", "gauge", "Until the nearest deadline of an open case; absent: none."),
    Measure("subject_case_overdue_seconds_max", "gauge", "Since the oldest deadline that a case missed; 0: none."),
    Measure("erasure_overdue_seconds_max", "gauge", "Since the oldest deadline that an erasure missed; 0: none."),
    Measure("next_end_seconds", "gauge", "Until the first of a kind ends (key, grant, policy, certificate); below 0: "
            "it has ended.", ("kind",)),
    Measure("ledger_witnesses", "gauge", "Witnesses that ever signed the ledger."),
    Measure("ledger_unwitnessed_seconds", "gauge", "How long the oldest checkpoint that no witness signed has waited."),
    # sinks of leaves
    Measure("sink_delivered_leaves_total", "counter", "Leaves that a sink's receiver took.", _SINK),
    Measure("sink_failing_seconds", "gauge", "How long it has taken nothing; 0: it takes what comes.", _SINK),
    Measure("sink_dead_batches", "gauge", "Batches that were given up and not sent again.", _SINK),
    Measure("sink_restarted_logs_total", "counter", "Logs that were read again from their first leaf, as after a "
            "restore.", _SINK),
    Measure("sink_purged_leaves_total", "counter", "Leaves that retention deleted before the sink had them.", _SINK),
    Measure("sink_losses_unseen", "gauge", "Restores and purges, by log, that nobody acknowledged.", _SINK),
    # reports by a calendar
    Measure("report_schedules", "gauge", "Schedules of reports by state: active, paused.", ("state",)),
    Measure("reports", "gauge", "Reports that were made, by opinion: unqualified, qualified, adverse.", ("opinion",)),
    Measure("report_deliveries", "gauge", "Reports handed over, by state: waiting, delivered, given-up.", ("state",)),
    Measure("report_undelivered", "gauge", "Scheduled reports not made or not taken at least once, and not since."),
    Measure("report_undelivered_seconds_max", "gauge", "How long the oldest of them has failed; 0: none."),
    # the fleet (FLE-3)
    Measure("epoch_takers_behind", "gauge", "Doors and workers that lack the newest erase epoch, of those that were "
            "heard in the last minute, by role.", ("role",)),
    Measure("epoch_behind_seconds", "gauge", "How long some door or worker has lacked the newest erase epoch, of those "
            "that were heard in the last minute: the longest."),
    # routes (FLE-2): receipts of the last ten minutes
    Measure("route_receipts", "gauge", "Route receipts of the last ten minutes."),
    Measure("route_receipts_awaited", "gauge", "Of these, those whose other half may still come."),
    Measure("route_findings", "gauge", "What is wrong with them, by problem.", ("problem",)),
    Measure("route_requests", "gauge", "Of these requests, those that a worker answered.", _ROUTED),
    Measure("route_locality_ratio", "gauge", "Share of their prompt tokens that they found at their worker.", _ROUTED),
    Measure("route_hit_tokens_mean", "gauge", "Tokens that one of them found at its worker.", _ROUTED),
    Measure("route_queue_mean", "gauge", "Requests that were at the worker when one of them came.", _ROUTED),
    Measure("route_free_blocks", "gauge", "Blocks that nobody held when the last of them came.", _ROUTED),
    Measure("route_stale_misses", "gauge", "Of them, those that found less than their router promised.", _ROUTED),
    Measure("route_promised_tokens", "gauge", "Tokens that routers promised."),
    Measure("route_promised_found_tokens", "gauge", "Of these, those that were found."),
    Measure("route_queue_delta", "gauge", "Queue at the worker chosen less the shortest elsewhere, on average."),
    Measure("route_imbalance", "gauge", "Requests of the busiest worker over the mean of those that answered any."),
    # KV events: `socket`, the worker's own; `nats`, the fleet's stream; `dynamo`, its own publisher
    Measure("kv_events_told_blocks", "gauge", "Blocks that a worker told routers of and did not take back, by place.",
            _PLACE, "events_told_blocks.{place}"),
    Measure("kv_events_sent_total", "counter", "Batches, or messages of the stream, that were sent, by place.", _PLACE,
            "events_sent.{place}"),
    Measure("kv_events_lost_total", "counter", "Of these, those that were not sent: indexes ask for a snapshot, or "
            "forget.", _PLACE, "events_lost.{place}"),
    Measure("kv_events_connected", "gauge", "1 while a worker can tell: at its own socket, always.", _PLACE,
            "events_connected.{place}"),
    Measure("worker_up", "gauge", "1 while an open incarnation was heard in the last minute.", _WORKER),
    Measure("worker_policy_revision", "gauge", "Policy revision that a worker enforces.", _WORKER),
    Measure("worker_lease_seconds", "gauge", "How long a worker may reuse without further word, by lease: `policy` for "
            "what crosses scopes, `custody` for anything. Below 0: it is over.", ("worker", "lease"), "lease.{lease}"),
    Measure("worker_denied_requests_total", "counter", "Requests that reused nothing, or nothing across scopes: a "
            "lease was over, or their door knew other erasures, by rule.", ("worker", "rule"), "lease_denied.{rule}"),
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
    Measure("metrics_collector_age_seconds", "gauge", "Age of what is shown here of the `ledger` and of `workers`.",
            ("collector",)),
    Measure("metrics_collector_success", "gauge", "0 while reading it fails, and before it was read; what is older "
            "than three scrapes and a minute is not shown.", ("collector",)),
)  # fmt: skip
BY_NAME = {measure.name: measure for measure in MEASURES}
LEASE_RULES = ("custody-lease", "policy-lease", "erase-epoch")
_TALLIES = (
    "hit_requests",
    "prompt_tokens",
    "first_requests",
    "first_request_hits",
    "granted_hit_blocks",
    "monitored_requests",
    "without_kinds",
)
Sample = tuple[str, tuple[str, ...], float]


def families(samples: Iterable[Sample]) -> Iterator[Metric]:
    """The metrics of samples (name, label values, value), in the order of the measures."""
    try:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
    except ImportError:
        raise ConfigError("prometheus-client is not installed; pip install 'kvcustody[service]'") from None
    by_name: dict[str, list[Sample]] = {}
    for sample in samples:
        by_name.setdefault(sample[0], []).append(sample)
    for measure in MEASURES:
        if measure.name not in by_name:
            continue
        make = CounterMetricFamily if measure.kind == "counter" else GaugeMetricFamily
        name = f"kvcustody_{measure.name}".removesuffix("_total")
        if measure.kind == "histogram":
            distribution = HistogramMetricFamily(name, measure.help, labels=measure.labels)
            for one, (buckets, total) in _distributions(by_name[measure.name]).items():
                distribution.add_metric(one, buckets, total)
            yield distribution
            continue
        family = make(name, measure.help, labels=measure.labels)
        for _, labels, value in by_name[measure.name]:
            family.add_metric(labels, value)
        yield family


def _distributions(samples: Iterable[Sample]) -> dict[tuple[str, ...], tuple[list[tuple[str, float]], float]]:
    """By labels: the buckets of a histogram in order, and its sum. The last label of a sample says which it is."""
    by_labels: dict[tuple[str, ...], tuple[dict[str, float], list[float]]] = {}
    for _, (*labels, part), value in samples:
        buckets, total = by_labels.setdefault(tuple(labels), ({}, []))
        if part == "sum":
            total.append(value)
        else:
            buckets["+Inf" if part == f"le.{INFINITE}" else part.removeprefix("le.")] = value
    return {
        labels: (sorted(buckets.items(), key=lambda item: float(item[0])), sum(total))
        for labels, (buckets, total) in by_labels.items()
    }


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
    """Return the samples of a worker's status; keys that no measure names are left out (rule 3)."""
    for measure in MEASURES:
        start, braces, label = measure.key.partition("{")
        if not measure.key:
            continue
        if measure.kind == "histogram":
            start += "" if braces else "."
            for name, value in status.items():
                if name.startswith(start):
                    rest = name.removeprefix(start)
                    label, _, part = rest.partition(".") if braces else ("", "", rest)
                    yield measure.name, (worker, label, part) if braces else (worker, part), float(value)
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
    """Return a facade's `stats()` as counters by the keys of the measures, bounded in number."""
    figures: dict[str, float] = {
        "block_tokens": block_tokens,
        "running": stats.running,
        "drift": stats.drift_blocks,
    }
    if bytes_per_block:
        figures["bytes_per_block"] = bytes_per_block

    def add(name: str, value: float) -> None:
        figures[name] = figures.get(name, 0) + value

    slots = ages = aged = 0.0
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
            ("clean_waits", pool.clean_waits),
            ("integrity_checked", pool.checked_blocks),
            ("integrity_mismatched", pool.mismatched_blocks),
        ):
            add(name, value)
        if pool.nodes is not None:
            add("nodes", pool.nodes)
        if pool.active_tokens is not None:
            add("active_tokens", pool.active_tokens)
        if pool.active_tokens is not None and pool.active_slots is not None:
            add("waste_tokens", pool.active_slots - pool.active_tokens)
            slots += pool.active_slots
        if pool.tree is not None:
            add("shared_tokens", pool.tree.shared_blocks * block_tokens)
            figures["depth_blocks"] = max(figures.get("depth_blocks", 0), pool.tree.deepest_blocks)
        if pool.advised_blocks:
            add("advised_blocks", pool.advised_blocks)
        if pool.cached_age_us is not None:
            mean_us, oldest_us = pool.cached_age_us
            cached = pool.by_state.get("cached", 0)
            ages += mean_us * cached / 1_000_000
            aged += cached
            figures["cached_age_seconds_max"] = max(figures.get("cached_age_seconds_max", 0), oldest_us / 1_000_000)
        figures["overdue_seconds"] = max(figures.get("overdue_seconds", 0), pool.overdue_us / 1_000_000)
    if slots:
        figures["fragmentation"] = figures["waste_tokens"] / slots
    if aged:
        figures["cached_age_seconds"] = ages / aged
    figures |= {f"lease.{name}": seconds for name, seconds in stats.leases.items()}
    figures["monitors"] = float(stats.monitors)
    figures |= stats.tiers
    figures |= stats.events
    figures |= {name: value for name, value in stats.serving.items() if value or name != "look_up_seconds"}
    _count_tenants(stats, block_tokens, add)
    for reason, count in stats.attempts.items():
        add(f"identity.{reason}", count)
    total = figures.get("blocks.total", 0)
    if total:
        figures["usage_ratio"] = (figures.get("blocks.active", 0) + figures.get("blocks.cached", 0)) / total
    return figures


def _count_tenants(stats: Any, block_tokens: int, add: Callable[[str, float], None]) -> None:
    """What was counted by tenant, added up."""
    for tally in (stats.departed, *stats.tenants.values()):
        add("hit_blocks.present", tally.verified_blocks)
        add("hit_blocks.unverified", tally.hit_blocks - tally.verified_blocks)
        add("hit_blocks.stale", tally.stale_blocks)
        add("recomputed", tally.recomputed_blocks)
        add("requests", tally.looked_up)
        for name in _TALLIES:
            add(name, getattr(tally, name))
        for name in ("monitored", "would_refuse", "forecast"):
            add(f"{name}_tokens", getattr(tally, f"{name}_blocks") * block_tokens)
        for rule, count in list(tally.would_deny.items()):
            add(f"would_deny.{_word(rule)}", count)
        for rule in LEASE_RULES:
            if rule in tally.denials:
                add(f"lease_denied.{rule}", tally.denials[rule])
        if stats.are_hits_leading:
            add("hit_tokens", tally.hit_blocks * block_tokens)
        for reason, count in list(tally.deferred.items()):  # the engine goes on counting
            add(f"deferred.{reason}", count)
        for reason, count in list(tally.refused.items()):
            add(f"refused.{_word(reason)}", count)


def metrics_table() -> str:
    """Return the table of the metrics page."""
    rows = ["| metric | kind | labels | meaning |", "|---|---|---|---|"]
    rows += [
        f"| `kvcustody_{measure.name}` | {measure.kind} | {', '.join(measure.labels)} | {measure.help} |"
        for measure in MEASURES
    ]
    return "\n".join(rows) + "\n"


def _word(text: str) -> str:
    """A reason as a label: rule ids and words stay, everything else becomes `_`."""
    return "".join(c if c.isascii() and (c.isalnum() or c in "._:/-") else "_" for c in text.lower())[:40]
