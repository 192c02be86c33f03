"""Seven questions about a running cache, answered from what its workers last said, each with its evidence.

    for one in advise(seen, ledger):
        one.question, one.answer, one.evidence, one.unknown

1. Evidence is a metric as a worker said it, or arithmetic on such values; what the product itself does is named with
   the module that does it.
2. What nobody said is `unknown`, with the reason; nothing is assumed in its place.
3. Rates and bytes are of one shard: each shard moves its own part of a token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import NamedTuple

from kvcustody.governance.identity.domain_spec import DomainSpec
from kvcustody.governance.identity.model_identity import ModelIdentity
from kvcustody.governance.observability.metrics import MEASURES
from kvcustody.governance.observability.serving_summary import (
    SeenWorker,
    seconds_text,
    share_text,
    summary,
)

POSITIONS = (1024, 8192, 32_768)
_KEYS = {measure.key: measure.name for measure in MEASURES if measure.key}
_NOT_KEYED = {"tenant_name"}  # what policy and ledger call a tenant
_MADE_BY = {
    "the model": ("governance/identity/model_identity.py", ModelIdentity),
    "the domain": ("governance/identity/domain_spec.py", DomainSpec),
}


class AdviceEvidence(NamedTuple):
    """A value and what says it: a metric's name, and of whom."""

    metric: str
    value: float | str
    worker: str


class Advice(NamedTuple):
    """One question answered."""

    question: str
    answer: str
    evidence: tuple[AdviceEvidence, ...]
    unknown: tuple[str, ...]


def advise(
    seen: Sequence[SeenWorker], ledger: Mapping[str, float] | None = None, *, prefixes: str | None = None
) -> list[Advice]:
    """All seven; `ledger` has figures of custody by metric, `prefixes` is the command that lists prefixes."""
    made = (_bytes(seen), _budgets(seen), _prefixes(seen, prefixes), _key(), _offload(seen))
    return [*made, _locations(seen), _cleanup(seen, ledger)]


class _Found:
    """Evidence that is collected, and what is missing."""

    def __init__(self) -> None:
        self.rows: list[AdviceEvidence] = []
        self.unknown: list[str] = []

    def said(self, one: SeenWorker, key: str, why: str = "it has not told it") -> float | None:
        """What a worker said under a key; what it did not say is unknown (rule 2)."""
        value = one.status.get(key)
        if value is None:
            self.unknown.append(f"`{one.worker}`: no `{name_of(key)}`: {why}")
        else:
            self.rows.append(AdviceEvidence(name_of(key), value, one.worker))
        return value

    def also(self, one: SeenWorker, *keys: str) -> float:
        """The sum of what a worker said under these keys, where it did."""
        values = [(key, one.status[key]) for key in keys if key in one.status]
        self.rows += [AdviceEvidence(name_of(key), value, one.worker) for key, value in values]
        return sum(value for _, value in values)

    def derived(self, name: str, value: float | str, worker: str) -> None:
        self.rows.append(AdviceEvidence(name, value, worker))

    def answers(self, question: str, answer: str) -> Advice:
        return Advice(question, answer, tuple(self.rows), tuple(self.unknown))


def name_of(key: str) -> str:
    """The metric of a key of a worker's status, with its label's value."""
    if key in _KEYS:
        return f"kvcustody_{_KEYS[key]}"
    start, _, value = key.rpartition(".")
    for template, name in _KEYS.items():
        before, brace, label = template.partition("{")
        if brace and before == f"{start}.":
            return f'kvcustody_{name}{{{label.rstrip("}")}="{value}"}}'
    raise KeyError(key)


def _bytes_of(one: SeenWorker, found: _Found) -> float | None:
    """Bytes of a token on a shard."""
    of_block = found.said(one, "bytes_per_block", "its engine named no size of its tensors")
    tokens = found.said(one, "block_tokens")
    if of_block is None or not tokens:
        return None
    if "hit_tokens" not in one.status:
        found.unknown.append(
            f"`{one.worker}`: bytes per token: no `{name_of('hit_tokens')}`: with several layer groups a block "
            "holds tokens of one; `kvcustody size` computes them from the model's config"
        )
        return None
    return of_block / tokens


def _bytes(seen: Sequence[SeenWorker]) -> Advice:
    found, parts = _Found(), []
    for one in seen:
        of_token = _bytes_of(one, found)
        if of_token is not None:
            shards = sum(1 for key in one.status if key.startswith("scrubbed."))
            found.derived("bytes per token of a shard", of_token, one.worker)
            told = f" on each of {shards} shards" if shards > 1 else " of a shard"
            parts.append(f"`{one.worker}` {of_token:,.0f} bytes{told}")
    return found.answers("How many bytes does a token take?", _joined(seen, parts))


def _budgets(seen: Sequence[SeenWorker]) -> Advice:
    found, parts = _Found(), []
    charged: Counter[str] = Counter()
    thrashing: set[str] = set()
    for one in seen:
        blocks = found.said(one, "blocks.total")
        used = found.said(one, "usage_ratio")
        advised = found.also(one, "advised_blocks")
        stalls = found.also(one, "stalled")
        waits = found.also(one, "clean_waits")
        deferred = found.also(one, *sorted(key for key in one.status if key.startswith("deferred.")))
        queue = summary(one.status).queue
        if queue is not None:
            found.derived("kvcustody_request_queue_seconds, nine in ten at most", queue, one.worker)
        for tenant, number in sorted(one.charged.items()):
            found.derived(f'kvcustody_kv_cache_charged_blocks{{tenant="{tenant}"}}', number, one.worker)
        for tenant, is_so in sorted(one.tenants.get("thrashing", {}).items()):
            found.derived(f'kvcustody_tenant_cache_thrashing{{tenant="{tenant}"}}', is_so, one.worker)
            thrashing |= {tenant} if is_so else set()
        charged.update(one.charged)
        if blocks is not None:
            told = f"`{one.worker}` {blocks:,.0f} blocks, {share_text(used)} in use or cached"
            told += f", {advised:,.0f} would have kept what was evicted" if advised else ""
            told += f", {stalls:,.0f} stalls" if stalls else ""
            told += f", {waits:,.0f} waits for clean blocks" if waits else ""
            parts.append(told + (f", {deferred:,.0f} times told to wait" if deferred else ""))
    if charged:
        parts.append(f"charged to tenants ({len(charged)}): {charged.total():,} blocks")
    if thrashing:
        parts.append("thrashing: " + ", ".join(f"`{name}`" for name in sorted(thrashing)))
    return found.answers("What are the budgets, and do they hold?", _joined(seen, parts))


def _prefixes(seen: Sequence[SeenWorker], command: str | None) -> Advice:
    found, parts = _Found(), []
    for one in seen:
        said = summary(one.status)
        prompts = found.said(one, "prompt_tokens")
        found.said(one, "hit_tokens", "with several layer groups hits are not made tokens")
        granted = found.also(one, "granted_hit_blocks")
        for confidence in ("present", "unverified", "stale"):
            found.also(one, f"hit_blocks.{confidence}")
        ages = one.status.get("hit_age.le.inf")
        if ages and "hit_age.sum" in one.status:
            found.derived(
                "kvcustody_prefix_cache_hit_age_seconds, mean", one.status["hit_age.sum"] / ages, one.worker
            )
        avoided = found.said(one, "prefill_avoided_seconds", "too few prefills were measured")
        error = one.status.get("prefill_cost_error")
        if avoided is not None:
            found.said(one, "prefill_cost_error", "no prediction was checked yet")
        if prompts:
            told = f"`{one.worker}` {share_text(said.hit_share)} of prompt tokens hit"
            told += "" if avoided is None else f", {seconds_text(avoided)} of prefill avoided"
            told += "" if error is None or avoided is None else f" ± {error:.0%}"
            parts.append(told + (f", {granted:,.0f} blocks through grants and segments" if granted else ""))
    rule = "safe is what policy lets the reader have: others' blocks attach through a grant or segment alone"
    parts.append(rule + (f"; which are worth most: `{command}`" if command else ""))
    if not command:
        found.unknown.append("which prefix is worth how much: workers say sums, not prefixes")
    return found.answers("Which prefixes are safe and valuable?", _joined(seen, parts))


def key_parts() -> Iterator[tuple[str, str]]:
    """Everything that a block's key is made of, and the module that puts it in."""
    for what, (module, made) in _MADE_BY.items():
        for spec in fields(made):
            if spec.init and spec.name not in _NOT_KEYED:
                yield f"{what}: {spec.name}", module
    yield "the secret of the owner's epoch", "governance/keys/keyring.py"
    yield "all tokens up to the block's end", "allocator/prefix/key_chain.py"
    yield "extras: images, embeddings, positions", "governance/identity/extra_content.py"


def _key() -> Advice:
    found = _Found()
    for part, module in key_parts():
        found.derived(part, module, "every worker")
    return found.answers(
        "What is in the key?",
        "The model as it was loaded (weights, adapter, tokenizer, template, KV format), who may read (tenant, scope, "
        "classification, labels), the secret of the owner's key epoch, every token before, and extras. A difference in "
        "any is a miss.",
    )


def _offload(seen: Sequence[SeenWorker]) -> Advice:
    found, parts = _Found(), []
    for one in seen:
        of_token = _bytes_of(one, found)
        why = "too few prefills were measured"
        token, pair = (found.said(one, f"prefill_cost.{term}", why) for term in ("token", "pair"))
        if of_token is None or token is None or pair is None:
            continue
        error = found.said(one, "prefill_cost_error", "no prediction was checked yet")
        rates = []
        for position in POSITIONS:
            seconds = token + pair * position
            if seconds > 0:
                rate = of_token / seconds / 1e9
                found.derived(f"break-even GB/s of a shard at position {position:,}", rate, one.worker)
                rates.append(f"{rate:.3g} GB/s at {position:,}")
        if not rates:
            found.unknown.append(
                f"`{one.worker}`: break-even rate: its prefills were too few or alike to cost a token"
            )
            continue
        within = "" if error is None else f", ± {error:.0%}"
        parts.append(f"`{one.worker}` above {', '.join(rates)} tokens{within}")
    told = (
        "this build has no tiers, so nothing is offloaded; moving a token beats computing it again where a shard's "
        f"link is faster: {'; '.join(parts) or 'unknown'}"
    )
    return found.answers("When would offload pay?", told)


def _locations(seen: Sequence[SeenWorker]) -> Advice:
    found = _Found()
    for one in seen:
        found.derived("kvcustody_worker_up", 0.0 if one.silent else 1.0, one.worker)
        found.unknown.append(
            f"`{one.worker}`: whether it publishes (`kv_events_endpoint`) is not in what it says of itself"
        )
    silent = [f"`{one.worker}`" for one in seen if one.silent]
    told = (
        "by events: a worker with `kv_events_endpoint` tells every stored and removed block with its scope, numbered, "
        "so that a router sees gaps (docs/build/kv-events.md)"
    )
    if silent:
        told += f"; {', '.join(silent)} silent for a minute: what routers know of their blocks is stale"
    return found.answers("How are locations coordinated?", told)


def _cleanup(seen: Sequence[SeenWorker], ledger: Mapping[str, float] | None) -> Advice:
    found, parts = _Found(), []
    for one in seen:
        told = [
            f"{what}: {value:,.0f}"
            for value, what in (
                (found.said(one, "overdue"), "residencies overdue"),
                (found.said(one, "drift"), "blocks that nothing accounts for"),
                (found.also(one, "blocks.quarantined"), "quarantined blocks"),
                (found.also(one, "integrity_mismatched"), "blocks that had changed"),
                (found.also(one, "ledger.backlog"), "events not handed in"),
            )
            if value
        ]
        found.also(one, "overdue_seconds")
        parts.append(f"`{one.worker}` " + (", ".join(told) or "nothing of what it told"))
    if ledger is None:
        found.unknown.append("orphans: a ledger's figure; `kvcustody scan findings`")
        found.unknown.append("deletion coverage: a ledger's figure; `kvcustody coverage show`")
    else:
        for name, value in sorted(ledger.items()):
            found.derived(f"kvcustody_{name}", value, "the ledger")
        if not any(name.startswith("deletion_due_units") for name in ledger):
            found.unknown.append("deletion coverage: no hour was judged yet; `kvcustody coverage show`")
        orphans = sum(value for name, value in ledger.items() if name.startswith("orphan_findings"))
        parts += [f"orphans on record: {orphans:,.0f}"] if orphans else []
        late = ledger.get("deletion_overdue_units", 0) + ledger.get("deletion_unproven_units", 0)
        parts += [f"custody without evidence of its end: {late:,.0f} units"] if late else []
    return found.answers("What cleanup is required?", _joined(seen, parts))


def _joined(seen: Sequence[SeenWorker], parts: list[str]) -> str:
    if not seen:
        return "unknown: no worker has said anything of itself"
    return "; ".join(parts) if parts else "unknown"
