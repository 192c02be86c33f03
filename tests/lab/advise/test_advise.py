"""Seven answers of a status: arithmetic by hand, and what was not said is unknown and never guessed."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from kvcustody.governance.identity.domain_spec import DomainSpec, ScopeKind
from kvcustody.governance.identity.model_identity import ModelIdentity
from kvcustody.governance.observability.metrics import MEASURES
from kvcustody.governance.observability.serving_summary import SeenWorker
from kvcustody.lab.advise.questions import Advice, advise, key_parts, name_of

ROOT = Path(__file__).resolve().parents[3]
STATUS: dict[str, float] = {
    **{"block_tokens": 16, "bytes_per_block": 2_097_152, "blocks.total": 1000, "usage_ratio": 0.5},
    **{"blocks.quarantined": 2, "scrubbed.0": 7, "scrubbed.1": 7, "stalled": 3, "clean_waits": 0},
    **{"advised_blocks": 2048, "recomputed": 500, "deferred.over-quota": 4},
    **{"prompt_tokens": 1000, "hit_tokens": 250, "granted_hit_blocks": 6, "hit_blocks.present": 5},
    **{"hit_blocks.unverified": 10, "hit_blocks.stale": 1, "hit_age.sum": 30.0, "hit_age.le.inf": 3},
    **{"prefill_avoided_seconds": 12.0, "prefill_cost_error": 0.1},
    **{"prefill_cost.start": 0.01, "prefill_cost.token": 1e-4, "prefill_cost.pair": 1e-8},
    **{"overdue": 1, "overdue_seconds": 5.0, "drift": 0, "integrity_mismatched": 0},
}


def seen(status: dict[str, float], *, silent: bool = False) -> SeenWorker:
    return SeenWorker("gpu-0", 3, silent, status, {"acme": 400}, {"thrashing": {"acme": 1.0}})


def values(one: Advice) -> dict[str, float | str]:
    return {row.metric: row.value for row in one.evidence}


def test_every_answer_is_what_the_figures_say() -> None:
    size, budgets, prefixes, key, offload, locations, cleanup = advise([seen(STATUS)])
    assert "131,072 bytes on each of 2 shards" in size.answer and not size.unknown
    assert values(size)["bytes per token of a shard"] == 131_072
    for told in (
        "1,000 blocks, 50%",
        "2,048 would have kept",
        "3 stalls",
        "4 requests waited",
        "thrashing: `acme`",
    ):
        assert told in budgets.answer
    assert values(budgets)['kvcustody_kv_cache_charged_blocks{tenant="acme"}'] == 400
    assert values(budgets)['kvcustody_requests_deferred_total{reason="over-quota"}'] == 4
    assert "25% of prompt tokens hit, 12.0 s of prefill avoided ± 10%, 6 blocks through" in prefixes.answer
    assert values(prefixes)["kvcustody_prefix_cache_hit_age_seconds, mean"] == 10
    assert "tenant" in key.answer
    for position in (1024, 8192, 32_768):
        rate = values(offload)[f"break-even GB/s of a shard at position {position:,}"]
        assert rate == pytest.approx(131_072 / (1e-4 + 1e-8 * position) / 1e9)
    assert values(offload)["tokens computed again after their eviction"] == 500 * 16
    assert offload.answer.startswith("no worker has a tier") and "± 10%" in offload.answer
    assert values(locations) == {"kvcustody_worker_up": 1.0} and "kv_events_endpoint" in locations.unknown[0]
    assert "residencies overdue: 1, quarantined blocks: 2" in cleanup.answer and len(cleanup.unknown) == 2


def test_a_tier_is_told_by_what_it_moved() -> None:
    of_tier = {
        "tier_stored_blocks.nvme": 120,
        "tier_restored_blocks.nvme": 40,
        "tier_store_seconds.nvme": 1.5,
    }
    offload = advise([seen(STATUS | of_tier)])[4]
    assert "tier `nvme` of `gpu-0` stored 120 blocks in 1.5 s and restored 40 in 0.0 s" in offload.answer
    assert values(offload)['kvcustody_tier_stored_blocks_total{tier="nvme"}'] == 120
    assert "no worker has a tier" not in offload.answer


@pytest.mark.parametrize(
    ("missing", "at", "named"),
    [
        ("bytes_per_block", (0, 4), "kvcustody_kv_cache_bytes_per_block"),
        ("hit_tokens", (0, 2, 4), "kvcustody_prefix_cache_hits_tokens_total"),
        ("prefill_cost.pair", (4,), 'kvcustody_prefill_cost_seconds{term="pair"}'),
        ("blocks.total", (1,), "kvcustody_kv_cache_capacity_blocks"),
        ("overdue", (6,), "kvcustody_residencies_overdue"),
    ],
)
def test_what_was_not_said_is_unknown(missing: str, at: tuple[int, ...], named: str) -> None:
    whole, advice = advise([seen(STATUS)]), advise([seen({k: v for k, v in STATUS.items() if k != missing})])
    for number, (one, control) in enumerate(zip(advice, whole, strict=True)):
        assert any(named in why for why in one.unknown) == (number in at), one.question
        assert not any(named in why for why in control.unknown)
        assert named not in values(one)
    if 4 in at:
        assert ("tokens computed again after their eviction" in values(advice[4])) == (missing != "hit_tokens")
        assert "faster: unknown" in advice[4].answer and not any("GB/s" in name for name in values(advice[4]))


def test_a_cost_of_nothing_gives_no_rate() -> None:
    offload = advise([seen(STATUS | {"prefill_cost.token": 0.0, "prefill_cost.pair": 0.0})])[4]
    assert "faster: unknown" in offload.answer and "break-even rate" in offload.unknown[0]


def test_nobody_said_anything() -> None:
    for one in advise([]):
        assert one.question == "What is in the key?" or not one.evidence
    assert advise([])[0].answer == "unknown: no worker has reported yet"


def test_a_silent_workers_locations_are_stale() -> None:
    assert "`gpu-0` silent" in advise([seen(STATUS, silent=True)])[5].answer


def test_a_ledger_answers_for_custody() -> None:
    figures = {
        'orphan_findings{orphan="lost finish"}': 2.0,
        "deletion_due_units": 9.0,
        "deletion_overdue_units": 1.0,
    }
    cleanup = advise([seen(STATUS)], figures)[6]
    assert "orphans on record: 2" in cleanup.answer and "its end: 1 units" in cleanup.answer
    assert not cleanup.unknown and values(cleanup)["kvcustody_deletion_due_units"] == 9
    assert advise([seen(STATUS)], {})[6].unknown[0].startswith("deletion coverage")


def test_the_command_that_lists_prefixes_is_named_where_there_is_one() -> None:
    assert "`kvcustody x`" in advise([seen(STATUS)], prefixes="kvcustody x")[2].answer
    assert "sums only" in advise([seen(STATUS)])[2].unknown[-1]


def test_the_keys_parts_are_the_fields_that_are_encoded() -> None:
    parts = dict(key_parts())
    model = {spec.name for spec in fields(ModelIdentity) if spec.init}
    assert {name.removeprefix("the model: ") for name in parts if name.startswith("the model: ")} == model
    names = [name.removeprefix("the domain: ") for name in parts if name.startswith("the domain: ")]
    domain = DomainSpec(
        scope=ScopeKind.TENANT,
        classification="internal",
        model=bytes(32),
        key_epoch=1,
        issuer="idp",
        tenant="acme",
        tenant_name="called",
    )
    assert {"tenant", "classification", "subject", "key_epoch", "salt"} <= set(names)
    assert len(names) == len(domain.encoded_fields()) and "called" not in str(domain.encoded_fields())
    assert [module for module in parts.values() if not (ROOT / module).is_file()] == []


def test_names_are_those_of_the_metrics() -> None:
    for measure in MEASURES:
        if measure.key:
            assert name_of(measure.key.replace("{", "").replace("}", "")).startswith(f"kvcustody_{measure.name}")
    with pytest.raises(KeyError):
        name_of("nothing.of-this")
