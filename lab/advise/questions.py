"""Seven questions about a cache, answered with evidence from its workers' last status or from a replay.

    for one in advise(seen, ledger):
        one.question, one.answer, one.evidence, one.unknown
    advise([as_a_worker], figures, trace=TraceFindings(...))     # of a trace that was replayed

1. Evidence is a metric as a worker reported it, a value found in a trace or given with it, or arithmetic on such
   values. The product's own behaviour is named with the module that implements it.
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
    """A value and its source: the metric's name, and the worker that reported it."""

    metric: str
    value: float | str
    worker: str


class TraceFindings(NamedTuple):
    """What is known about a trace besides its replay's status, which has no times and no tensor sizes."""

    lineages: Sequence[tuple[str, float]]  # what the trace calls a lineage, and the tokens found of it; best first
    denials: Mapping[str, int]  # requests to which a rule denied reuse
    room: Mapping[str, tuple[int, int]]  # of tenants that thrash: blocks that they may have, and would need
    model: tuple[str, float] | None = None  # a model's name, and bytes of its tokens on a device
    prefill_tokens_per_second: float | None = None


class Advice(NamedTuple):
    """The answer to one question."""

    question: str
    answer: str
    evidence: tuple[AdviceEvidence, ...]
    unknown: tuple[str, ...]


def advise(
    seen: Sequence[SeenWorker],
    ledger: Mapping[str, float] | None = None,
    *,
    prefixes: str | None = None,
    trace: TraceFindings | None = None,
) -> list[Advice]:
    """Answer all seven questions.

    Args:
        ledger: custody figures by metric name.
        prefixes: the command that lists prefixes.

    With `trace` the one that is `seen` is a replay of it.
    """
    made = (_bytes(seen, trace), _budgets(seen, trace), _prefixes(seen, prefixes, trace), _key())
    return [*made, _offload(seen, trace), _locations(seen, trace), _cleanup(seen, ledger)]


_TIER = "tier_stored_blocks."
_NOT_OF_TRACES = {
    "prefill_": "a replay writes patterns where an engine computes, and says no time of it",
    "bytes_per_block": "a replay's tensors are no model's: name one with --model",
}


class _Found:
    """The evidence collected so far, and what is missing."""

    def __init__(self, trace: TraceFindings | None = None) -> None:
        self._trace = trace
        self.rows: list[AdviceEvidence] = []
        self.unknown: list[str] = []

    def said(self, seen_worker: SeenWorker, key: str, why: str = "the worker has not reported it") -> float | None:
        """Return the value that a worker reported under a key; a value that it did not report is unknown (rule 2)."""
        value = seen_worker.status.get(key)
        if value is None:
            if self._trace is not None:
                of_traces = (text for start, text in _NOT_OF_TRACES.items() if key.startswith(start))
                why = next(of_traces, why)
            self.unknown.append(f"`{seen_worker.worker}`: no `{name_of(key)}`: {why}")
        else:
            self.rows.append(AdviceEvidence(name_of(key), value, seen_worker.worker))
        return value

    def also(self, one: SeenWorker, *keys: str) -> float:
        """Return the sum of the values that a worker reported under these keys; None where it reported none of them."""
        values = [(key, one.status[key]) for key in keys if key in one.status]
        self.rows += [AdviceEvidence(name_of(key), value, one.worker) for key, value in values]
        return sum(value for _, value in values)

    def derived(self, name: str, value: float | str, worker: str) -> None:
        self.rows.append(AdviceEvidence(name, value, worker))

    def answers(self, question: str, answer: str) -> Advice:
        return Advice(question, answer, tuple(self.rows), tuple(self.unknown))


def name_of(key: str) -> str:
    """Return the metric of a key of a worker's status, with its label's value."""
    if key in _KEYS:
        return f"kvcustody_{_KEYS[key]}"
    start, _, value = key.rpartition(".")
    for template, name in _KEYS.items():
        before, brace, label = template.partition("{")
        if brace and before == f"{start}.":
            return f'kvcustody_{name}{{{label.rstrip("}")}="{value}"}}'
    raise KeyError(key)


def _bytes_of(seen_worker: SeenWorker, evidence: _Found, trace: TraceFindings | None) -> float | None:
    """Return the bytes that a token takes on one shard."""
    if trace is not None and trace.model is not None:
        name, size = trace.model
        evidence.derived(f"bytes per token of `{name}`, worked out (lab/sizing/hf_config.py)", size, seen_worker.worker)
        return size
    of_block = evidence.said(seen_worker, "bytes_per_block", "its engine reported no tensor size")
    tokens = evidence.said(seen_worker, "block_tokens")
    if of_block is None or not tokens:
        return None
    if "hit_tokens" not in seen_worker.status:
        evidence.unknown.append(
            f"`{seen_worker.worker}`: bytes per token: no `{name_of('hit_tokens')}`: with several layer groups a block "
            "holds tokens of one; `kvcustody size` computes them from the model's config"
        )
        return None
    return of_block / tokens


def _bytes(seen: Sequence[SeenWorker], trace: TraceFindings | None) -> Advice:
    evidence, parts = _Found(trace), []
    for one in seen:
        of_token = _bytes_of(one, evidence, trace)
        if of_token is not None:
            shards = sum(1 for key in one.status if key.startswith("scrubbed."))
            evidence.derived("bytes per token of a shard", of_token, one.worker)
            told = f" on each of {shards} shards" if shards > 1 else " of a shard"
            parts.append(f"`{one.worker}` {of_token:,.0f} bytes{told}")
    return evidence.answers("How many bytes does a token take?", _joined(seen, parts))


def _budgets(seen: Sequence[SeenWorker], trace: TraceFindings | None) -> Advice:
    evidence, parts = _Found(trace), []
    charged: Counter[str] = Counter()
    thrashing: set[str] = set()
    for one in seen:
        blocks = evidence.said(one, "blocks.total")
        used = evidence.said(one, "usage_ratio")
        advised = evidence.also(one, "advised_blocks")
        stalls = evidence.also(one, "stalled")
        waits = evidence.also(one, "clean_waits")
        deferred = evidence.also(one, *sorted(key for key in one.status if key.startswith("deferred.")))
        queue = summary(one.status).queue
        if queue is not None:
            evidence.derived("kvcustody_request_queue_seconds, nine in ten at most", queue, one.worker)
        for tenant, number in sorted(one.charged.items()):
            evidence.derived(f'kvcustody_kv_cache_charged_blocks{{tenant="{tenant}"}}', number, one.worker)
        for tenant, is_so in sorted(one.tenants.get("thrashing", {}).items()):
            evidence.derived(f'kvcustody_tenant_cache_thrashing{{tenant="{tenant}"}}', is_so, one.worker)
            thrashing |= {tenant} if is_so else set()
        charged.update(one.charged)
        if blocks is not None:
            told = f"`{one.worker}` {blocks:,.0f} blocks, {share_text(used)} in use or cached"
            told += f", {advised:,.0f} would have kept what was evicted" if advised else ""
            told += f", {stalls:,.0f} stalls" if stalls else ""
            told += f", {waits:,.0f} waits for clean blocks" if waits else ""
            parts.append(told + (f", {deferred:,.0f} requests waited" if deferred else ""))
    if charged:
        parts.append(f"charged to tenants ({len(charged)}): {charged.total():,} blocks")
    if thrashing:
        parts.append("thrashing: " + ", ".join(f"`{name}`" for name in sorted(thrashing)))
    for name, (room, needed) in sorted(trace.room.items() if trace is not None else ()):
        evidence.derived(f"blocks that `{name}` may have", room, seen[0].worker)
        evidence.derived(f"blocks that would have kept what `{name}` computed again", needed, seen[0].worker)
        parts.append(f"`{name}` may have {room:,} blocks, and {needed:,} would have kept what it computed again")
    return evidence.answers("What are the budgets, and do they hold?", _joined(seen, parts))


def _prefixes(seen: Sequence[SeenWorker], command: str | None, trace: TraceFindings | None) -> Advice:
    evidence, parts = _Found(trace), []
    for one in seen:
        serving = summary(one.status)
        prompts = evidence.said(one, "prompt_tokens")
        evidence.said(one, "hit_tokens", "with several layer groups, hits cannot be converted to tokens")
        granted = evidence.also(one, "granted_hit_blocks")
        for confidence in ("present", "unverified", "stale"):
            evidence.also(one, f"hit_blocks.{confidence}")
        ages = one.status.get("hit_age.le.inf")
        if ages and "hit_age.sum" in one.status:
            evidence.derived(
                "kvcustody_prefix_cache_hit_age_seconds, mean", one.status["hit_age.sum"] / ages, one.worker
            )
        avoided = evidence.said(one, "prefill_avoided_seconds", "too few prefills were measured")
        error = one.status.get("prefill_cost_error")
        if avoided is not None:
            evidence.said(one, "prefill_cost_error", "no prediction was checked yet")
        if prompts:
            told = f"`{one.worker}` {share_text(serving.hit_share)} of prompt tokens hit"
            told += "" if avoided is None else f", {seconds_text(avoided)} of prefill avoided"
            told += "" if error is None or avoided is None else f" ± {error:.0%}"
            parts.append(told + (f", {granted:,.0f} blocks through grants and segments" if granted else ""))
    if trace is not None:
        for lineage, tokens in trace.lineages:
            evidence.derived(f"tokens found of {lineage}", tokens, seen[0].worker)
        for denied, number in sorted(trace.denials.items()):
            evidence.derived(f"requests to which `{denied}` denied reuse", number, seen[0].worker)
        best = [f"{lineage}: {tokens:,.0f} tokens" for lineage, tokens in trace.lineages[:3]]
        parts += [f"found most: {'; '.join(best)}"] if best else ["nothing was reused"]
    rule = (
        "a prefix is safe if policy lets the reader have it: other tenants' blocks are reused only "
        "through a grant or segment"
    )
    parts.append(rule + (f"; which are worth most: `{command}`" if command else ""))
    if not command and trace is None:
        evidence.unknown.append("the value of single prefixes: workers report sums only")
    return evidence.answers("Which prefixes are safe and valuable?", _joined(seen, parts))


def key_parts() -> Iterator[tuple[str, str]]:
    """Yield each part of a block's key, with the module that adds it."""
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


def _offload(seen: Sequence[SeenWorker], trace: TraceFindings | None) -> Advice:
    evidence, parts, returned = _Found(trace), [], []
    for one in seen:
        prompts, again = one.status.get("prompt_tokens"), one.status.get("recomputed")
        if prompts and again is not None and "hit_tokens" in one.status:
            tokens = again * one.status.get("block_tokens", 0)
            evidence.also(one, "recomputed")
            evidence.derived("tokens computed again after their eviction", tokens, one.worker)
            returned.append(f"`{one.worker}` {tokens:,.0f} tokens, {share_text(tokens / prompts)} of its prompts")
        of_token = _bytes_of(one, evidence, trace)
        token, pair, error = _cost(one, evidence, trace)
        if of_token is None or token is None or pair is None:
            continue
        rates = []
        for position in POSITIONS:
            seconds = token + pair * position
            if seconds > 0:
                rate = of_token / seconds / 1e9
                evidence.derived(f"break-even GB/s of a shard at position {position:,}", rate, one.worker)
                rates.append(f"{rate:.3g} GB/s at {position:,}")
        if not rates:
            evidence.unknown.append(
                f"`{one.worker}`: break-even rate: its prefills were too few or alike to cost a token"
            )
            continue
        within = "" if error is None else f", ± {error:.0%}"
        parts.append(f"`{one.worker}` above {', '.join(rates)} tokens{within}")
    if returned:
        parts_of = "; ".join(returned)
        returned = [f"; a tier would have had at most what was evicted and computed again: {parts_of}"]
    break_even = (
        f"moving a token beats computing it again where a shard's link is faster: {'; '.join(parts) or 'unknown'}"
    )
    return evidence.answers("When would offload pay?", f"{_tiers(seen, evidence)}; {break_even}{''.join(returned)}")


def _tiers(seen: Sequence[SeenWorker], evidence: _Found) -> str:
    """Return what the workers' tiers stored and restored, and how long both took."""
    used = []
    for worker in seen:
        names = sorted(key.removeprefix(_TIER) for key in worker.status if key.startswith(_TIER))
        for name in names:
            stored, restored, store_seconds, restore_seconds = (
                evidence.also(worker, f"tier_{figure}.{name}")
                for figure in ("stored_blocks", "restored_blocks", "store_seconds", "restore_seconds")
            )
            used.append(
                f"tier `{name}` of `{worker.worker}` stored {stored:,.0f} blocks in {store_seconds:.1f} s and restored "
                f"{restored:,.0f} in {restore_seconds:.1f} s"
            )
    return "; ".join(used) or "no worker has a tier, so nothing is offloaded"


def _cost(
    seen_worker: SeenWorker, evidence: _Found, trace: TraceFindings | None
) -> tuple[float | None, float | None, float | None]:
    """Return the seconds for a token and for a pair of tokens, and the error of predictions made with them."""
    if trace is not None and trace.prefill_tokens_per_second is not None:
        rate = trace.prefill_tokens_per_second
        evidence.derived("tokens a second of prefill, as given", rate, seen_worker.worker)
        return 1 / rate, 0.0, None
    why = "too few prefills were measured"
    token, pair = (evidence.said(seen_worker, f"prefill_cost.{term}", why) for term in ("token", "pair"))
    error = None
    if token is not None and pair is not None:
        error = evidence.said(seen_worker, "prefill_cost_error", "no prediction was checked yet")
    return token, pair, error


def _locations(seen: Sequence[SeenWorker], trace: TraceFindings | None) -> Advice:
    evidence = _Found()
    if trace is not None:
        stored = [evidence.also(one, "allocated") for one in seen]
        removed = [evidence.also(one, *(key for key in one.status if key.startswith("evicted."))) for one in seen]
        evidence.unknown.append("where its requests ran: a trace names no workers, and here one pool served it")
        return evidence.answers(
            "How are locations coordinated?",
            "by events (docs/reference/formats/kv-events.md): a router that follows such a worker hears of at most "
            f"{sum(stored):,.0f} stored blocks, and of {sum(removed):,.0f} evicted to make room",
        )
    for one in seen:
        evidence.derived("kvcustody_worker_up", 0.0 if one.silent else 1.0, one.worker)
        evidence.unknown.append(
            f"`{one.worker}`: whether it publishes (`kv_events_endpoint`) is not in what it says of itself"
        )
    silent = [f"`{one.worker}`" for one in seen if one.silent]
    summary_text = (
        "by events: a worker with `kv_events_endpoint` tells every stored and removed block with its scope, numbered, "
        "so that a router sees gaps (docs/reference/formats/kv-events.md)"
    )
    if silent:
        summary_text += f"; {', '.join(silent)} silent for a minute: routers' knowledge of their blocks is stale"
    return evidence.answers("How are locations coordinated?", summary_text)


def _cleanup(seen: Sequence[SeenWorker], ledger: Mapping[str, float] | None) -> Advice:
    evidence, parts = _Found(), []
    for one in seen:
        cleanup_parts = [
            f"{what}: {value:,.0f}"
            for value, what in (
                (evidence.said(one, "overdue"), "residencies overdue"),
                (evidence.said(one, "drift"), "blocks that nothing accounts for"),
                (evidence.also(one, "blocks.quarantined"), "quarantined blocks"),
                (evidence.also(one, "integrity_mismatched"), "blocks that had changed"),
                (evidence.also(one, "ledger.backlog"), "events not sent to the control plane"),
            )
            if value
        ]
        evidence.also(one, "overdue_seconds")
        parts.append(f"`{one.worker}` " + (", ".join(cleanup_parts) or "all of its figures"))
    if ledger is None:
        evidence.unknown.append("orphans: see the ledger with `kvcustody scan findings`")
        evidence.unknown.append("deletion coverage: see the ledger with `kvcustody coverage show`")
    else:
        for name, value in sorted(ledger.items()):
            evidence.derived(f"kvcustody_{name}", value, "the ledger")
        if not any(name.startswith("deletion_due_units") for name in ledger):
            evidence.unknown.append("deletion coverage: no hour was judged yet; `kvcustody coverage show`")
        orphans = sum(value for name, value in ledger.items() if name.startswith("orphan_findings"))
        parts += [f"orphans on record: {orphans:,.0f}"] if orphans else []
        late = ledger.get("deletion_overdue_units", 0) + ledger.get("deletion_unproven_units", 0)
        parts += [f"custody without evidence of its end: {late:,.0f} units"] if late else []
    return evidence.answers("What cleanup is required?", _joined(seen, parts))


def _joined(seen: Sequence[SeenWorker], parts: list[str]) -> str:
    if not seen:
        return "unknown: no worker has reported yet"
    return "; ".join(parts) if parts else "unknown"
