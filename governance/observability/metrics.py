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
    Measure("kv_cache_blocks", "gauge", "Blocks of a worker's pool, by state.", ("worker", "state"), "blocks.{state}"),
    Measure("kv_cache_usage_ratio", "gauge", "Share of a worker's blocks that are in use or cached.", _WORKER,
            "usage_ratio"),
    Measure("kv_cache_capacity_blocks", "gauge", "Blocks in a worker's pool.", _WORKER, "blocks.total"),
    Measure("kv_cache_allocated_blocks_total", "counter", "Blocks that a worker allocated.", _WORKER, "allocated"),
    Measure("kv_cache_block_tokens", "gauge", "Tokens per block.", _WORKER, "block_tokens"),
    Measure("kv_cache_bytes_per_block", "gauge", "Bytes per block on one shard, where the engine reports them.",
            _WORKER, "bytes_per_block"),
    Measure("kv_cache_charged_blocks", "gauge", "Blocks charged to a tenant, over all workers, as they last "
            "reported.", _TENANT),
    Measure("kv_cache_active_tokens", "gauge", "Tokens held by running requests of a worker.", _WORKER,
            "active_tokens"),
    Measure("tenant_active_tokens", "gauge", "Tokens held by a tenant's running requests, over all workers.", _TENANT),
    Measure("kv_cache_final_block_waste_tokens", "gauge", "Unused token slots in the last blocks of running "
            "requests.", _WORKER, "waste_tokens"),
    Measure("kv_cache_fragmentation_ratio", "gauge", "Unused token slots of running requests as a share of all their "
            "slots. Blocks have one size, so there is no other fragmentation.", _WORKER, "fragmentation"),
    Measure("kv_cache_clean_waits_total", "counter", "Allocations that had to wait for evictions or scrubs because "
            "too few clean blocks were free.", _WORKER, "clean_waits"),
    Measure("kv_cache_stalls_total", "counter", "Times that a running request found no room for its next token.",
            _WORKER, "stalled"),
    Measure("requests_running", "gauge", "Requests that hold blocks.", _WORKER, "running"),
    Measure("requests_deferred_total", "counter", "Requests that had to wait, by reason. A request that is retried "
            "counts each time.", ("worker", "reason"), "deferred.{reason}"),
    Measure("requests_refused_total", "counter", "Requests that policy refused, by reason.", ("worker", "reason"),
            "refused.{reason}"),
    # prefix reuse (PRE-3)
    Measure("prefix_cache_queries_tokens_total", "counter", "Prompt tokens of requests that were looked up in the "
            "prefix cache.", _WORKER, "prompt_tokens"),
    Measure("prefix_cache_hits_tokens_total", "counter", "Prompt tokens found in the prefix cache, so not prefilled "
            "again.", _WORKER, "hit_tokens"),
    Measure("prefix_cache_hit_requests_total", "counter", "Requests with a prefix cache hit.", _WORKER,
            "hit_requests"),
    Measure("prefix_cache_requests_total", "counter", "Requests that started and had a prompt to look up.", _WORKER,
            "requests"),
    Measure("prefix_cache_first_requests_total", "counter", "First requests of a session.", _WORKER, "first_requests"),
    Measure("prefix_cache_first_request_hits_total", "counter", "First requests of a session with a prefix cache "
            "hit.", _WORKER, "first_request_hits"),
    Measure("prefix_cache_granted_hit_blocks_total", "counter", "Blocks reused through a grant or a shared segment.",
            _WORKER, "granted_hit_blocks"),
    Measure("prefix_cache_hit_blocks_total", "counter", "Blocks that look-ups found, by confidence: `present` "
            "matched their checksum and were reused, `unverified` were reused without a check, `stale` were past "
            "their deadline and not reused.", ("worker", "confidence"), "hit_blocks.{confidence}"),
    Measure("prefix_cache_hit_age_seconds", "histogram", "Age of the newest block that a request reused.", _WORKER,
            "hit_age"),
    Measure("prefix_cache_hit_length_tokens", "histogram", "Tokens reused by requests with a hit, added up over "
            "layer groups.", _WORKER, "hit_length"),
    Measure("prefix_cache_lookup_seconds_total", "counter", "Time spent on look-ups (kvcustody's own pool only).",
            _WORKER, "look_up_seconds"),
    Measure("prefix_cache_nodes", "gauge", "Nodes of the prefix tree (kvcustody's own pool only).", _WORKER, "nodes"),
    Measure("prefix_cache_depth_blocks_max", "gauge", "Depth of the prefix tree's deepest branch, in blocks, among "
            "its first 4,096 nodes.", _WORKER, "depth_blocks"),
    Measure("prefix_cache_shared_tokens", "gauge", "Tokens saved because running requests share them, among the "
            "first 4,096 nodes of the tree. A token shared by n requests counts n - 1 times.", _WORKER,
            "shared_tokens"),
    Measure("time_to_first_token_seconds", "histogram", "Time from a request's arrival to its first token, by "
            "whether part of its prompt was cached: `hit` or `miss`.", ("worker", "cached"), "ttft.{cached}"),
    Measure("request_queue_seconds", "histogram", "Time from a request's arrival until its blocks were allocated.",
            _WORKER, "queue"),
    Measure("prefill_avoided_seconds_total", "counter", "Estimated prefill time saved by hits, from the measured "
            "cost of a prefill.", _WORKER, "prefill_avoided_seconds"),
    Measure("prefill_cost_seconds", "gauge", "Measured cost of a prefill: to `start` it, for each `token`, and for "
            "each `pair` of a token and one before it.", ("worker", "term"), "prefill_cost.{term}"),
    Measure("prefill_cost_error_ratio", "gauge", "Mean error of predicted prefill time, as a share of the measured "
            "time.", _WORKER, "prefill_cost_error"),
    # eviction (EVI-3)
    Measure("kv_cache_evicted_blocks_total", "counter", "Cached blocks evicted, by reason.", ("worker", "reason"),
            "evicted.{reason}"),
    Measure("requests_without_kinds_total", "counter", "Requests that marked no content kinds although the policy "
            "orders eviction by kind.", _WORKER, "without_kinds"),
    Measure("kv_cache_recomputed_blocks_total", "counter", "Blocks computed again after they had been evicted.",
            _WORKER, "recomputed"),
    Measure("kv_cache_advised_blocks", "gauge", "Pool size that would have kept nine in ten of the recomputed "
            "blocks. Absent where none was recomputed.", _WORKER, "advised_blocks"),
    Measure("tenant_cache_thrashing", "gauge", "1 while at least half of the blocks that a tenant wants again had "
            "been evicted, on any worker.", _TENANT),
    Measure("tenant_recomputed_blocks", "gauge", "Blocks of a tenant computed again after eviction, since its "
            "workers started.", _TENANT),
    # isolation (ISO-1)
    Measure("reuse_denied_requests_total", "counter", "Reuse requests that policy denied, from the ledger.",
            ("tenant", "rule")),
    Measure("identities_refused_total", "counter", "Requests refused because their identity was missing, false, or "
            "of a tenant that policy does not admit, by reason.", ("worker", "reason"), "identity.{reason}"),
    Measure("credentials_refused_total", "counter", "Credentials that the service refused, by reason.", ("reason",)),
    # enforcement that is not for everybody (adoption)
    Measure("policy_monitored", "gauge", "1 while an order exempts some requests from enforcement.", _WORKER,
            "monitors"),
    Measure("monitored_requests_total", "counter", "Requests that were monitored and not enforced.", _WORKER,
            "monitored_requests"),
    Measure("monitored_reused_tokens_total", "counter", "Prompt tokens that monitored requests reused. No other "
            "figure of hits counts them.", _WORKER, "monitored_tokens"),
    Measure("monitored_refused_tokens_total", "counter", "Prompt tokens reused by monitored requests that "
            "enforcement would have refused.", _WORKER, "would_refuse_tokens"),
    Measure("monitored_forecast_tokens_total", "counter", "Prompt tokens that monitored requests would have found "
            "under enforcement.", _WORKER, "forecast_tokens"),
    Measure("monitored_denials_total", "counter", "Denials recorded for monitored requests and not enforced, by "
            "rule.", ("worker", "reason"), "would_deny.{reason}"),
    # retention and deletion (RET-1 to RET-4)
    Measure("kv_cache_age_seconds", "gauge", "Mean age of cached blocks. In kvcustody's own pool, of the first 4,096 "
            "nodes.", _WORKER, "cached_age_seconds"),
    Measure("kv_cache_age_seconds_max", "gauge", "Age of the oldest cached block.", _WORKER, "cached_age_seconds_max"),
    Measure("residencies", "gauge", "Residencies that are open.", _WORKER, "residencies"),
    Measure("residencies_overdue", "gauge", "Open residencies past their deadline.", _WORKER, "overdue"),
    Measure("residencies_overdue_seconds_max", "gauge", "How long the most overdue residency has been past its "
            "deadline.", _WORKER, "overdue_seconds"),
    Measure("residencies_expired_total", "counter", "Residencies that ended at their deadline.", _WORKER, "expired"),
    Measure("scrubbed_blocks_total", "counter", "Blocks overwritten with zeros, counted on the device.",
            ("worker", "shard"), "scrubbed.{shard}"),
    # integrity of what is reused (PRE-1)
    Measure("integrity_checked_blocks_total", "counter", "Blocks compared with their checksum before reuse.", _WORKER,
            "integrity_checked"),
    Measure("integrity_mismatched_blocks_total", "counter", "Blocks that failed the comparison with their checksum. "
            "They are never reused.", _WORKER, "integrity_mismatched"),
    # tiers beside the device (TIE-1)
    Measure("tier_absent_stores", "gauge", "Classifications whose copies may go to a remote store only, on a worker "
            "that has none.", _WORKER, "absent_stores"),
    Measure("tier_copies", "gauge", "Sealed copies in a tier that can be found.", _TIER, "tier_copies.{tier}"),
    Measure("tier_used_bytes", "gauge", "Bytes of sealed copies in a tier.", _TIER, "tier_used_bytes.{tier}"),
    Measure("tier_capacity_bytes", "gauge", "Capacity of a tier.", _TIER, "tier_capacity_bytes.{tier}"),
    Measure("tier_waiting_copies", "gauge", "Copies whose custody ended and whose bytes or keys are not deleted yet.",
            _TIER, "tier_waiting.{tier}"),
    Measure("tier_stored_blocks_total", "counter", "Evicted blocks stored in a tier.", _TIER,
            "tier_stored_blocks.{tier}"),
    Measure("tier_restored_blocks_total", "counter", "Blocks restored from a tier and not computed again.", _TIER,
            "tier_restored_blocks.{tier}"),
    Measure("tier_store_seconds_total", "counter", "Time spent on storing blocks in a tier.", _TIER,
            "tier_store_seconds.{tier}"),
    Measure("tier_restore_seconds_total", "counter", "Time spent on restoring blocks from a tier.", _TIER,
            "tier_restore_seconds.{tier}"),
    Measure("tier_refused_total", "counter", "Stores and restores that failed or found no room or no buffer.", _TIER,
            "tier_refused.{tier}"),
    Measure("tier_left_alone_total", "counter", "Stores and restores not made because computing is faster or the "
            "gain is too small.", _TIER, "tier_left_alone.{tier}"),
    Measure("tier_prediction_error_ratio", "gauge", "Mean error of predicted restore time, as a share of the "
            "measured time.", _TIER, "tier_prediction_error.{tier}"),
    Measure("deletion_due_units", "gauge", "Units of custody due to end in the last 24 clock hours, the current one "
            "included.", _TENANT),
    Measure("deletion_covered_units", "gauge", "Units due in the last 24 hours with evidence that they ended in "
            "time.", _TENANT),
    Measure("deletion_overdue_units", "gauge", "Units due in the last 24 hours without an end on record.", _TENANT),
    Measure("deletion_unproven_units", "gauge", "Units due in the last 24 hours whose end cannot be proven, because "
            "their process died or a record is missing.", _TENANT),
    Measure("deletion_coverage_ratio", "gauge", "Share of the units due in the last 24 hours that are covered; 1 "
            "when none was due.", _TENANT),
    Measure("deletion_lag_seconds_max", "gauge", "Longest time from a deadline to the last receipt in the last 24 "
            "hours."),
    Measure("deletion_judged_age_seconds", "gauge", "Time since deletion coverage was last computed."),
    # lifecycle (LIF-1, LIF-2)
    Measure("request_cancel_to_release_seconds", "histogram", "Time from a request's cancellation until its blocks "
            "were released.", _WORKER, "cancel"),
    Measure("memory_drift_blocks", "gauge", "Blocks in custody that no request or residency accounts for and no "
            "repair resolved.", _WORKER, "drift"),
    Measure("orphan_findings", "gauge", "Orphans on record, by class.", ("orphan",)),
    # the ledger (AUD-1, AUD-2)
    Measure("service_trouble", "gauge", "1 while a problem of this kind stops the service from working fully, else "
            "0. `/v1/health` gives the reason.", ("kind",)),
    Measure("ledger_admitting", "gauge", "1 while the ledger accepts records of new custody."),
    Measure("ledger_backlog_events", "gauge", "Events of the service that are not committed yet."),
    Measure("ledger_spilled_bytes", "gauge", "Bytes in the service's spill."),
    Measure("ledger_received_leaves_total", "counter", "Leaves received from workers."),
    Measure("batch_commit_seconds", "histogram", "Time from queueing a worker's batch until it was durable."),
    Measure("ledger_checkpoint_size", "gauge", "Root leaves under the newest signed checkpoint."),
    Measure("ledger_checkpoint_age_seconds", "gauge", "Age of the newest signed checkpoint."),
    Measure("ledger_unsealed_leaves", "gauge", "Leaves that no checkpoint covers yet."),
    Measure("ledger_unsealed_age_seconds", "gauge", "Time since the oldest leaf without a checkpoint was committed."),
    Measure("ledger_leaves", "gauge", "Leaves on record.", _TENANT),
    # what waits for somebody, and its dates (the inbox)
    Measure("inbox_items", "gauge", "Open tasks in the inbox, by kind and state.", ("kind", "state")),
    Measure("erasures", "gauge", "Erasures by state: open, missed, complete, late, not-followed.", ("state",)),
    Measure("erasure_next_deadline_seconds", "gauge", "Time to the nearest deadline of an open erasure. Absent where "
            "none is open."),
    Measure("subject_cases", "gauge", "Data subjects' requests by state: open, near, missed, answered, late.",
            ("state",)),
    Measure("subject_case_next_deadline_seconds", "gauge", "Time to the nearest deadline of an open case. Absent "
            "where none is open."),
    Measure("subject_case_overdue_seconds_max", "gauge", "Time since the oldest missed deadline of a case; 0 where "
            "none is missed."),
    Measure("erasure_overdue_seconds_max", "gauge", "Time since the oldest missed deadline of an erasure; 0 where "
            "none is missed."),
    Measure("next_end_seconds", "gauge", "Time until the first key, grant, policy or certificate expires, by kind. "
            "Negative once it has expired.", ("kind",)),
    Measure("ledger_witnesses", "gauge", "Witnesses that have signed a checkpoint of this ledger."),
    Measure("ledger_unwitnessed_seconds", "gauge", "Age of the oldest checkpoint that no witness has signed."),
    # sinks of leaves
    Measure("sink_delivered_leaves_total", "counter", "Leaves that a sink's receiver accepted.", _SINK),
    Measure("sink_failing_seconds", "gauge", "Time since a failing sink last accepted anything; 0 while it works.",
            _SINK),
    Measure("sink_dead_batches", "gauge", "Batches that a sink gave up on and that nobody has sent again.", _SINK),
    Measure("sink_restarted_logs_total", "counter", "Logs read again from their first leaf, for example after a "
            "restore.", _SINK),
    Measure("sink_purged_leaves_total", "counter", "Leaves that retention deleted before a sink received them.",
            _SINK),
    Measure("sink_losses_unseen", "gauge", "Losses by restores and purges, by log, that nobody acknowledged.", _SINK),
    # reports by a calendar
    Measure("report_schedules", "gauge", "Schedules of reports by state: active, paused.", ("state",)),
    Measure("reports", "gauge", "Reports by opinion: unqualified, qualified, adverse.", ("opinion",)),
    Measure("report_deliveries", "gauge", "Deliveries of reports by state: waiting, delivered, given-up.", ("state",)),
    Measure("report_undelivered", "gauge", "Scheduled reports that failed at least once and are not made or "
            "delivered since."),
    Measure("report_undelivered_seconds_max", "gauge", "How long the oldest failing report has failed; 0 where none "
            "fails."),
    # the fleet (FLE-3)
    Measure("epoch_takers_behind", "gauge", "Doors and workers seen in the last minute that lack the newest erase "
            "epoch, by role.", ("role",)),
    Measure("epoch_behind_seconds", "gauge", "Longest time that a door or worker seen in the last minute has lacked "
            "the newest erase epoch."),
    # routes (FLE-2): receipts of the last ten minutes
    Measure("route_receipts", "gauge", "Route receipts of the last ten minutes."),
    Measure("route_receipts_awaited", "gauge", "Route receipts of the last ten minutes whose matching receipt may "
            "still arrive."),
    Measure("route_findings", "gauge", "Problems found in the route receipts of the last ten minutes, by problem.",
            ("problem",)),
    Measure("route_requests", "gauge", "Routed requests of the last ten minutes that a worker answered.", _ROUTED),
    Measure("route_locality_ratio", "gauge", "Share of routed prompt tokens found in the cache of the chosen worker, "
            "in the last ten minutes.", _ROUTED),
    Measure("route_hit_tokens_mean", "gauge", "Mean tokens that a routed request found in the cache of its worker, "
            "in the last ten minutes.", _ROUTED),
    Measure("route_queue_mean", "gauge", "Mean number of requests at the worker when a routed request arrived, in "
            "the last ten minutes.", _ROUTED),
    Measure("route_free_blocks", "gauge", "Free blocks of the worker when the newest routed request arrived.",
            _ROUTED),
    Measure("route_stale_misses", "gauge", "Routed requests of the last ten minutes that found fewer tokens than "
            "their router promised.", _ROUTED),
    Measure("route_promised_tokens", "gauge", "Tokens that routers promised in the last ten minutes."),
    Measure("route_promised_found_tokens", "gauge", "Promised tokens of the last ten minutes that were found."),
    Measure("route_queue_delta", "gauge", "Mean queue at the chosen worker less the shortest queue of any other, in "
            "the last ten minutes."),
    Measure("route_imbalance", "gauge", "Requests of the busiest worker over the mean of all workers that answered, "
            "in the last ten minutes."),
    # KV events: `socket`, the worker's own; `nats`, the fleet's stream; `dynamo`, its own publisher
    Measure("kv_events_told_blocks", "gauge", "Blocks that a worker announced to routers and has not withdrawn, by "
            "place.", _PLACE, "events_told_blocks.{place}"),
    Measure("kv_events_sent_total", "counter", "KV event batches (or stream messages) sent, by place.", _PLACE,
            "events_sent.{place}"),
    Measure("kv_events_lost_total", "counter", "KV event batches (or stream messages) that could not be sent, by "
            "place. Indexes then ask for a snapshot or drop the worker's blocks.", _PLACE, "events_lost.{place}"),
    Measure("kv_events_connected", "gauge", "1 while a worker can send KV events, by place. Its own socket is always "
            "connected.", _PLACE, "events_connected.{place}"),
    Measure("worker_up", "gauge", "1 while a worker's open process was seen in the last minute.", _WORKER),
    Measure("worker_policy_revision", "gauge", "Policy revision that a worker enforces.", _WORKER),
    Measure("worker_lease_seconds", "gauge", "Remaining time of a worker's lease: `policy` for reuse across scopes, "
            "`custody` for any reuse. Negative once it has expired.", ("worker", "lease"), "lease.{lease}"),
    Measure("worker_denied_requests_total", "counter", "Requests denied reuse because a lease had expired or their "
            "door's erase epochs differed, by rule.", ("worker", "rule"), "lease_denied.{rule}"),
    Measure("worker_status_age_seconds", "gauge", "Age of a worker's counters when it sent them. An engine that "
            "takes no step updates none.", _WORKER, "status_age_seconds"),
    Measure("worker_ledger_backlog_events", "gauge", "Events of a worker that the control plane has not received "
            "yet.", _WORKER, "ledger.backlog"),
    Measure("worker_ledger_spilled_bytes", "gauge", "Bytes in a worker's spill.", _WORKER, "ledger.spilled_bytes"),
    Measure("worker_ledger_spill_seconds", "gauge", "Time until a worker's spill is full at the rate of its last "
            "minute.", _WORKER, "ledger.spill_seconds"),
    Measure("worker_ledger_replaying", "gauge", "1 while a worker sends its spill.", _WORKER, "ledger.replaying"),
    Measure("worker_ledger_kept_bytes", "gauge", "Bytes of batches that a worker keeps until a signed checkpoint "
            "covers them.", _WORKER, "ledger.kept_bytes"),
    Measure("worker_ledger_kept_dropped_bytes", "gauge", "Bytes of batches without a signed checkpoint that a worker "
            "dropped because they exceeded `kept_bytes_max`.", _WORKER, "ledger.kept_dropped_bytes"),
    Measure("worker_ledger_unverified", "gauge", "1 while a worker trusts no key that signed the newest checkpoint.",
            _WORKER, "ledger.kept_unverified"),
    Measure("worker_received_sequence", "gauge", "Highest sequence received from a worker.", _WORKER),
    # the service itself
    Measure("http_requests_total", "counter", "HTTP requests answered.", ("operation", "status")),
    Measure("http_request_seconds_total", "counter", "Time spent on HTTP requests.", ("operation", "status")),
    Measure("metrics_collector_age_seconds", "gauge", "Age of the figures shown here from the `ledger` and from "
            "`workers`.", ("collector",)),
    Measure("metrics_collector_success", "gauge", "1 after the last read by a collector succeeded, else 0. Figures "
            "older than three scrapes and a minute are not shown.", ("collector",)),
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
        name = f"kvcustody_{measure.name}".removesuffix(
            "_total",
        )
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
