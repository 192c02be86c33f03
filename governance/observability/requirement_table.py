"""Which requirement stands where: the module, the metrics, the test that recounts it, and on which engines it holds.

    requirements_table()                        # docs/build/requirements.md

1. A row is a requirement, or one measure of it. A test compares every path, metric and test named with what is there,
   and finds every metric of a worker in a row.
2. A verdict is `yes`, or `absent: ` and why.
"""

from __future__ import annotations

from typing import NamedTuple

_METRICS = "governance/observability/test_worker_metrics.py::test_"
_MONITORED = (
    "governance/monitoring/test_monitored_metrics.py::"
    "test_every_figure_of_monitored_requests_is_what_a_recount_says"
)
_RECOUNT = f"{_METRICS}every_metric_of_an_engine_is_what_a_recount_says"
_CYCLE = f"{_METRICS}a_cycle_that_does_not_fit_is_named_with_the_pool_that_would_hold_it"
_AVOIDED = f"{_METRICS}prefill_time_avoided_is_what_the_prefills_cost"
_LOOK_UP = f"{_METRICS}time_of_look_ups_is_said_of_our_own_pools"
_CANCEL = f"{_METRICS}what_is_cancelled_is_timed_from_the_cancel"
_STALE = f"{_METRICS}a_hit_past_its_time_is_stale_and_no_hit"
_TOLD = "service/fleet/test_agent.py::test_a_workers_counters_revision_and_charges_are_known_there"
_PLAN = "engines/vllm/adapter/test_sizing.py::test_every_layer_keeps_what_we_say_and_as_many_blocks_fit"
_TIERS = "governance/offload/test_tier_metrics.py::test_every_metric_of_a_tier_is_what_a_recount_says"
_NO_TIER = "absent: these are of our own pools' tiers"
_THE_ENGINES = "absent: the index is the engine's"


class RequirementRow(NamedTuple):
    """One row; tests are below `tests/`, metrics without `kvcustody_`."""

    requirement: str
    what: str
    lives: tuple[str, ...]
    metrics: tuple[str, ...]
    tests: tuple[str, ...]
    own_pool: str = "yes"
    transformers: str = "yes"
    vllm: str = "yes"


ROWS: tuple[RequirementRow, ...] = (
    RequirementRow("PAG-2", "bytes and blocks from a model's config", ("allocator/sizing/blocks_that_fit.py",), (),
                   ("allocator/test_sizing.py::test_bytes_per_token", _PLAN)),
    RequirementRow("PAG-2", "blocks and tokens of each tenant's quota", ("console/size/tenants.py",), (),
                   ("console/test_size_command.py::test_tenants_get_blocks_and_tokens_from_their_quotas",)),
    RequirementRow("PAG-4", "active tokens, by worker and tenant", ("governance/observability/stats.py",),
                   ("kv_cache_active_tokens", "tenant_active_tokens"), (_RECOUNT,)),
    RequirementRow("PAG-4", "capacity, allocated and free blocks, occupancy", ("allocator/pool/pool.py",
                   "allocator/external/pool.py"), ("kv_cache_blocks", "kv_cache_usage_ratio",
                   "kv_cache_capacity_blocks", "kv_cache_allocated_blocks_total"), (_RECOUNT,)),
    RequirementRow("PAG-4", "blocks that tenants are charged for", ("allocator/pool/accounting.py",),
                   ("kv_cache_charged_blocks",), (_TOLD,
                   f"{_METRICS}who_is_charged")),
    RequirementRow("PAG-4", "bytes of a token, measured", ("governance/observability/advise.py",
                   "allocator/pool/tensor_memory.py"), ("kv_cache_bytes_per_block", "kv_cache_block_tokens"),
                   (_TOLD, "governance/observability/test_advise.py::test_every_answer_is_what_the_figures_say")),
    RequirementRow("PAG-4", "final-block waste, fragmentation", ("governance/observability/stats.py",),
                   ("kv_cache_final_block_waste_tokens", "kv_cache_fragmentation_ratio"), (_RECOUNT,)),
    RequirementRow("PAG-4", "how long allocation takes", ("governance/observability/serving_measures.py",
                   "governance/observability/first_asked.py"), ("request_queue_seconds",), (_RECOUNT,
                   f"{_METRICS}who_waits_for_room_waits_from_when_it_first_came")),
    RequirementRow("PAG-4", "free-list pressure", ("allocator/pool/pool.py",), ("kv_cache_clean_waits_total",),
                   (_RECOUNT,)),
    RequirementRow("PAG-4", "running requests without room for a token", ("governance/governor/governor.py",),
                   ("kv_cache_stalls_total",), (_RECOUNT,), vllm="absent: the engine preempts by itself"),
    RequirementRow("PAG-4", "requests that run, wait for memory, or are refused",
                   ("governance/observability/tenant_counters.py",),
                   ("requests_running", "requests_deferred_total", "requests_refused_total"), (_RECOUNT,)),
    RequirementRow("PAG-4", "out of memory on the device", (), (), (), *("absent: no measure counts it",) * 3),
    RequirementRow("PRE-1", "what a key is made of", ("governance/identity/model_identity.py",
                   "governance/identity/domain_spec.py", "allocator/prefix/key_chain.py"), (),
                   ("governance/identity/test_model_identity.py::test_each_field_changes_the_digest",
                    "governance/observability/test_advise.py::test_the_keys_parts_are_the_fields_that_are_encoded")),
    RequirementRow("PRE-1", "reused blocks are what was published", ("allocator/manager/integrity.py",
                   "allocator/external/block_sums.py"),
                   ("integrity_checked_blocks_total", "integrity_mismatched_blocks_total"), (_RECOUNT,
                   "allocator/pool/test_integrity.py::test_flipped_bits_are_found_as_stated",
                   "engines/transformers/batching/test_integrity.py::test_random_values_over_the_cache_are_recomputed",
                   "engines/vllm/adapter/reuse/test_integrity.py::"
                   "test_a_changed_block_is_a_miss_with_all_that_continues_it")),
    RequirementRow("PRE-2", "longest match, leaf before parent", ("allocator/prefix/longest_prefix.py",
                   "allocator/prefix/eviction_policy.py"), (),
                   ("allocator/prefix/test_index.py::test_longest_prefix_of_random_prompts_is_exact",
                    "allocator/prefix/test_eviction.py::test_leaf_order_holds_under_every_policy",
                    "allocator/external/test_ranking.py::test_no_block_stands_above_what_it_continues")),
    RequirementRow("PRE-2", "tree nodes, depth, shared tokens", ("allocator/prefix/tree.py",),
                   ("prefix_cache_nodes", "prefix_cache_depth_blocks_max", "prefix_cache_shared_tokens"), (_RECOUNT,),
                   vllm=_THE_ENGINES),
    RequirementRow("PRE-2", "hit length", ("governance/observability/serving_measures.py",),
                   ("prefix_cache_hit_length_tokens",), (_RECOUNT,)),
    RequirementRow("PRE-2", "look-up time", ("governance/observability/serving_measures.py",),
                   ("prefix_cache_lookup_seconds_total",), (_LOOK_UP,), vllm=_THE_ENGINES),
    RequirementRow("PRE-3", "prompt tokens and requests, found and asked",
                   ("governance/observability/tenant_counters.py",),
                   ("prefix_cache_queries_tokens_total", "prefix_cache_hits_tokens_total",
                    "prefix_cache_requests_total", "prefix_cache_hit_requests_total"), (_RECOUNT,)),
    RequirementRow("PRE-3", "prefill time avoided, and its error", ("governance/observability/prefill_cost.py",),
                   ("prefill_avoided_seconds_total", "prefill_cost_seconds", "prefill_cost_error_ratio"), (_AVOIDED,)),
    RequirementRow("PRE-3", "age at hit", ("governance/observability/serving_measures.py",),
                   ("prefix_cache_hit_age_seconds",), (_RECOUNT,)),
    RequirementRow("PRE-3", "hits of a session's first request", ("governance/observability/tenant_counters.py",),
                   ("prefix_cache_first_requests_total", "prefix_cache_first_request_hits_total"), (_RECOUNT,)),
    RequirementRow("PRE-3", "time to first token, by hit and miss", ("governance/observability/serving_measures.py",),
                   ("time_to_first_token_seconds",), (_RECOUNT,)),
    RequirementRow("PRE-3", "confidence of a hit", ("governance/observability/tenant_counters.py",),
                   ("prefix_cache_hit_blocks_total",), (_RECOUNT, _STALE,
                   "engines/vllm/adapter/reuse/test_integrity.py::test_a_share_of_reuses_is_compared")),
    RequirementRow("EVI-1", "eviction policies, named by the policy document", ("allocator/prefix/eviction_policy.py",
                   "allocator/external/block_ranking.py"), (),
                   ("allocator/external/test_ranking.py::test_both_pools_give_up_the_same_blocks_in_the_same_order",
                    "engines/vllm/adapter/test_eviction.py::test_a_hot_prefix_survives_a_scan_where_the_policy_says_so")),
    RequirementRow("EVI-1", "preemption by recompute", ("allocator/manager/block_manager.py",), (),
                   ("allocator/pool/test_lifetime.py::test_preemption_by_recompute_keeps_what_was_computed",
                    "engines/vllm/adapter/test_scheduler.py::test_preempted_requests_resume_with_their_own_blocks")),
    RequirementRow("EVI-1", "preemption by swap", (), (), (), *("absent: there is nowhere to swap to",) * 3),
    RequirementRow("EVI-2", "kinds of content rank within a tenant's share", ("governance/decisions/eviction_order.py",
                   "policies/document/token_priorities.py"), (),
                   ("allocator/external/test_ranking.py::test_what_one_tenant_marks_moves_none_of_anothers_blocks",
                    "engines/vllm/adapter/test_eviction.py::test_what_a_caller_says_of_its_content_leaves_first"),
                   transformers="absent: a caller's kinds, which its requests cannot carry; kinds of segments act"),
    RequirementRow("EVI-2", "requests that say no kind of content", ("governance/observability/tenant_counters.py",),
                   ("requests_without_kinds_total",), (_RECOUNT, "governance/observability/test_worker_metrics.py"
                    "::test_requests_that_say_no_kind_are_counted_where_kinds_order",
                    "engines/vllm/adapter/test_first_tokens.py"
                    "::test_requests_that_say_no_kind_are_counted_where_kinds_order")),
    RequirementRow("EVI-2", "chat messages' roles say kinds of content",
                   ("integrations/content/message_spans.py", "integrations/vllm/message_kinds.py",
                    "integrations/sglang/message_kinds.py"), (),
                   ("integrations/vllm/test_message_kinds.py::test_a_message_reaches_to_the_content_of_the_next",
                    "engines/vllm/server/test_message_kinds.py"
                    "::test_a_system_prompt_outlasts_newer_prompts_because_of_its_role",
                    "engines/vllm/server/test_message_kinds.py"
                    "::test_instructions_and_results_of_tools_are_marked_in_responses",
                    "engines/sglang/server/test_message_kinds.py"
                    "::test_a_system_prompt_outlasts_newer_prompts_because_of_its_role"),
                   *("absent: it is given tokens; callers mark them in `Hints.kinds`",) * 2),
    RequirementRow("EVI-2", "eviction by signals that a policy names: next turn, scope, freshness, pressure, reuse, "
                   "position", ("allocator/prefix/eviction_policy.py", "allocator/prefix/think_times.py"), (),
                   ("allocator/prefix/test_block_value.py::test_next_turn",
                    "allocator/prefix/test_block_value.py"
                    "::test_one_tenants_pauses_do_not_move_anothers_order_in_strict",
                    "engines/vllm/adapter/test_eviction.py"
                    "::test_a_hot_prefix_survives_a_scan_where_the_policy_says_so")),
    RequirementRow("EVI-2", "transfer cost", (), (), (), *("absent: no eviction policy reads it",) * 3),
    RequirementRow("EVI-3", "evictions by reason", ("governance/observability/stats.py",),
                   ("kv_cache_evicted_blocks_total",), (_RECOUNT,)),
    RequirementRow("EVI-3", "thrash: who, and the pool that would do", ("governance/observability/thrash.py",
                   "allocator/prefix/evicted_keys.py", "allocator/external/evicted_blocks.py"),
                   ("kv_cache_recomputed_blocks_total", "kv_cache_advised_blocks",
                   "tenant_cache_thrashing", "tenant_recomputed_blocks"), (_CYCLE, _RECOUNT)),
    RequirementRow("ISO-1", "blocks by grant or segment, refused identities",
                   ("governance/observability/tenant_counters.py", "governance/observability/attempts.py"),
                   ("prefix_cache_granted_hit_blocks_total", "identities_refused_total", "policy_monitored",
                    "monitored_requests_total", "monitored_reused_tokens_total", "monitored_refused_tokens_total",
                    "monitored_forecast_tokens_total", "monitored_denials_total"),
                   (_RECOUNT, _MONITORED)),
    RequirementRow("LIF-1", "cancel to release", ("governance/observability/serving_measures.py",),
                   ("request_cancel_to_release_seconds",), (_CANCEL, _RECOUNT)),
    RequirementRow("LIF-1", "releases are idempotent", ("allocator/manager/block_manager.py",), (),
                   ("allocator/pool/test_lifetime.py::test_release_is_idempotent_in_every_order",)),
    RequirementRow("TIE-1", "sealed copies in host memory and files, restored to their own",
                   ("governance/tiers/tier.py", "governance/governor/offloading.py"),
                   ("tier_copies", "tier_used_bytes", "tier_capacity_bytes", "tier_waiting_copies"), (_TIERS,
                   "governance/offload/test_offload.py::"
                   "test_what_was_evicted_comes_back_to_its_own_and_to_nobody_else",
                   "engines/transformers/batching/test_tiers.py::test_no_output_changes_over_many_requests"),
                   vllm=_NO_TIER),
    RequirementRow("TIE-2", "moved only where it is faster than computing", ("governance/tiers/transfer_rates.py",
                   "governance/tiers/run_transfers.py"), ("tier_left_alone_total", "tier_prediction_error_ratio"),
                   (_TIERS, "governance/offload/test_transfer_or_recompute.py::"
                   "test_a_tier_that_is_always_slower_is_not_used_after_its_first_samples"), vllm=_NO_TIER),
    RequirementRow("TIE-3", "stored, restored, refused; how long it took", ("governance/tiers/run_transfers.py",),
                   ("tier_stored_blocks_total", "tier_restored_blocks_total", "tier_store_seconds_total",
                    "tier_restore_seconds_total", "tier_refused_total"), (_TIERS,), vllm=_NO_TIER),
    RequirementRow("LIF-2", "drift, orphans", ("governance/orphans/online_pool_scan.py",),
                   ("memory_drift_blocks", "orphan_findings"), (_RECOUNT,
                   "orphans/test_online.py::test_what_is_planted_is_found_while_the_process_serves")),
    RequirementRow("RET-1", "age of what is cached", ("governance/observability/stats.py",),
                   ("kv_cache_age_seconds", "kv_cache_age_seconds_max"), (_RECOUNT,)),
    RequirementRow("RET-1", "deadlines: held, overdue, lapsed", ("allocator/pool/hold_table.py",),
                   ("residencies", "residencies_overdue", "residencies_overdue_seconds_max",
                    "residencies_expired_total"), (_RECOUNT,)),
    RequirementRow("RET-2", "blocks overwritten on free", ("allocator/pool/pool.py",), ("scrubbed_blocks_total",),
                   (_RECOUNT, "allocator/pool/test_pool.py::test_every_shard_gives_a_receipt_before_a_block_is_clean")),
    RequirementRow("RET-4", "coverage of what was due to end", ("audit/counters/hourly_coverage.py",),
                   ("deletion_due_units", "deletion_covered_units", "deletion_overdue_units", "deletion_unproven_units",
                    "deletion_coverage_ratio", "deletion_lag_seconds_max"),
                   ("audit/counters/test_counters.py::test_verdicts_by_hour_are_those_of_coverage",)),
    RequirementRow("AUD-1", "a worker's evidence on its way", ("governance/control_plane/remote_ledger.py",
                   "governance/control_plane/kept_batches.py"), ("worker_ledger_backlog_events",
                   "worker_ledger_spilled_bytes", "worker_ledger_spill_seconds", "worker_ledger_replaying",
                   "worker_ledger_kept_bytes", "worker_ledger_kept_dropped_bytes", "worker_ledger_unverified",
                   "worker_received_sequence"),
                   ("service/fleet/test_ledger_writers.py::test_a_queue_over_its_capacity_goes_to_the_spill",
                    "service/fleet/test_restored_ledger.py::test_what_is_kept_is_bounded_and_said")),
    RequirementRow("FLE-3", "workers are heard, and which policy they enforce", ("governance/service/fleet/workers.py",
                   "governance/control_plane/agent.py"), ("worker_up", "worker_policy_revision",
                   "worker_status_age_seconds"), (_TOLD,
                   "service/fleet/test_agent.py::test_an_engine_that_stands_still_is_heard_with_the_age_of_its_counters")),
)  # fmt: skip


def requirements_table() -> str:
    """The table of docs/build/requirements.md."""
    rows = [
        "| requirement | | where | metrics | recounted by | own pool | transformers | vLLM |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in ROWS:
        places = (_listed(row.lives), _listed(row.metrics), _listed(row.tests))
        rows.append(
            f"| {row.requirement} | {row.what} | {' | '.join(places)} "
            f"| {row.own_pool} | {row.transformers} | {row.vllm} |"
        )
    return "\n".join(rows) + "\n"


def _listed(names: tuple[str, ...]) -> str:
    return "<br>".join(f"`{name}`" for name in names) or "–"
