"""Every metric that a worker reports about its engine, against a manual recount: idle and busy, on both kinds of
engine.

1. The recount uses neither `stats` nor a tally. It counts the test's own calls and their answers, the engine's own
   books, the pool's rows, the ledger's leaves and the device's calls.
2. A metric that is not known here fails. A new metric needs a rule here for counting it, or a note that an engine does
   not have it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvcustody.allocator.pool.block_state import BlockState
from kvcustody.audit.kinds import CustodyEnded
from kvcustody.clock import VirtualClock
from kvcustody.governance.admission_outcome import Deferred
from kvcustody.governance.erasure.selector import Selector
from kvcustody.governance.identity.principal import Principal, identify
from kvcustody.governance.observability.first_asked import WAITING_MAX, FirstAsked
from kvcustody.governance.observability.histogram import AGES, SECONDS, TOKENS
from kvcustody.governance.observability.metrics import MEASURES, worker_status
from kvcustody.governance.observability.prefill_cost import LEARNED_MIN
from kvcustody.governance.observability.serving_measures import ServingMeasures
from kvcustody.governance.observability.tenant_counters import SESSIONS_MAX, TenantCounters
from kvcustody.governance.request import Hints
from kvcustody.policies.document.token_priorities import KindRange
from kvcustody.testkit.conformance.deployment import toy_model
from kvcustody.testkit.conformance.engine_protocol import RequestSpec, Setup
from kvcustody.testkit.conformance.engines.native_engine import NativeEngine
from kvcustody.testkit.conformance.engines.reference_engine import ReferenceEngine
from kvcustody.testkit.conformance.engines.toy_engine import BLOCK_TOKENS, ToyRequest
from kvcustody.testkit.conformance.policy import policy
from standins import builders

BLOCKS, IDLE_SECONDS = 48, 20
FORBIDS = "rules:\n  - {id: no-delta, effect: forbid, action: admit, when: {owner: delta}}\n"
LRU, BY_KIND = "{policy: lru}", "{policy: priority, priority: 40, kinds: {pasted_log: 0}}"
SHARED = [*range(3, 3 + 3 * BLOCK_TOKENS + 1)]
# What no engine counts: said by the agent or by the service, and tested in tests/service.
OF_THE_AGENT = {
    *(
        "ledger.backlog",
        "ledger.spilled_bytes",
        "ledger.spill_seconds",
        "ledger.replaying",
        "ledger.kept_bytes",
    ),
    *("ledger.kept_dropped_bytes", "ledger.kept_unverified", "status_age_seconds"),
}
OF_THE_SERVICE = {"worker_up", "worker_policy_revision", "worker_received_sequence"}
OURS_ALONE = {"nodes", "depth_blocks", "shared_tokens"}
# Of tiers, which these engines do not have: recounted in tests/governance/offload/test_tier_metrics.py.
OF_TIERS = {measure.key for measure in MEASURES if "tier" in measure.labels}
# Of requests that are monitored: recounted in tests/governance/monitoring/test_monitored_metrics.py.
OF_MONITORED = {
    *("monitors", "monitored_requests", "monitored_tokens", "would_refuse_tokens", "forecast_tokens"),
    "would_deny.{reason}",
}
# Of what is heard from a control plane: recounted in tests/governance/decisions/test_door_epochs.py.
OF_LEASES = {"lease.{lease}", "lease_denied.{rule}"}
# Of KV events: recounted in tests/integrations/fleet_worker/test_fleet_worker.py.
OF_EVENTS = {measure.key for measure in MEASURES if "place" in measure.labels}
# Of real time, or derived from what is recounted here; each has a test of its own below.
UNSURE = {
    "overdue_seconds",
    "look_up_seconds",
    "prefill_avoided_seconds",
    "prefill_cost_error",
    "prefill_cost.{term}",
    "prefill_cost.start",
    "prefill_cost.token",
    "prefill_cost.pair",
    "advised_blocks",
}
EVICTIONS = ("quota", "pressure", "evicted")


class Counted:
    """One engine and what the test saw of it."""

    def __init__(
        self, kind: type[NativeEngine] | type[ReferenceEngine], blocks: int = BLOCKS, eviction: str = LRU
    ) -> None:
        self.clock = VirtualClock()
        self.orders_kinds = eviction != LRU
        document = policy(scope="tenant", grant=True, idle=f"{IDLE_SECONDS}s").replace("rules:\n", FORBIDS)
        document = document.replace(LRU, eviction)
        self.engine: Any = kind(Setup(document, self.clock, blocks))
        self.is_native = kind is NativeEngine
        self.facade = self.engine.governor if self.is_native else self.engine.port
        self.pool = self.engine.governor.managers[0].pool if self.is_native else self.engine.pool
        self.holds = self.engine.governor.managers[0].hold_table if self.is_native else self.pool.hold_table
        self.starts: list[ToyRequest] = []
        self.asked_us: dict[int, int] = {}
        self.waited_us: list[int] = []
        self.ages_us: list[int] = []
        self.spoke: dict[int, tuple[bool, int]] = {}
        self.cancelled = self.clean_waits = self.stalled = 0
        self.written_us: dict[int, int] = {}
        self.content: dict[tuple[int, int], tuple[str, tuple[int, ...]]] = {}
        self.lost: set[tuple[str, tuple[int, ...]]] = set()
        self.computed_again = self.events_seen = 0
        self.cached: list[int] = []
        self.told: Counter[str] = Counter()
        self.waiting_for: set[tuple[int, str]] = set()  # a request that asks again is counted once
        self.forbidden = self.strangers = self.lapsed = self.crossed = 0
        self.scrubbed = BLOCKS if self.is_native else 0  # a Governor zeroes its pool as it is made
        self._watch()

    def _watch(self) -> None:
        start, scrub = self.engine.start, self.engine.device.memory.scrub
        asked = "admit" if self.is_native else "may_start"
        ask = getattr(self.facade, asked)

        asking: list[int] = []

        def started(request: ToyRequest) -> bool:
            asking[:] = [request.number]
            did: bool = start(request)
            if did:
                self.waiting_for = {pair for pair in self.waiting_for if pair[0] != request.number}
                self._note_content(request)
                now_us = self.clock.now_us()
                self.waited_us.append(now_us - self.asked_us[request.number])
                reused = request.table[: request.cached_tokens // BLOCK_TOKENS]
                if reused:
                    self.ages_us.append(now_us - max(self.written_us[block] for block in reused))
                self.starts.append(request)
                self.cached.append(request.cached_tokens)
                hit = request.table[: request.cached_tokens // BLOCK_TOKENS]
                owners = self._owners()
                self.crossed += sum(owners[block] != request.principal.tenant for block in hit if request.principal)
            return did

        def answered(*what: Any, **how: Any) -> Any:
            answer = ask(*what, **how)
            reason = answer.reason if isinstance(answer, Deferred) else answer
            if isinstance(reason, str) and (asking[0], reason) not in self.waiting_for:
                self.waiting_for.add((asking[0], reason))
                self.told[reason] += 1
            return answer

        def zeroed(shard: int, blocks: Any, *what: Any, **how: Any) -> Any:
            self.scrubbed += len(blocks)
            return scrub(shard, blocks, *what, **how)

        self._watch_times()
        self.engine.start = started
        self.engine.device.memory.scrub = zeroed
        setattr(self.facade, asked, answered)

    def _note_content(self, request: ToyRequest) -> None:
        """Which prefixes were evicted before this request came, and which of them it computes again."""
        for event in self.engine.ledger()[self.events_seen :]:
            self.events_seen += 1
            if isinstance(event, CustodyEnded) and event.cause in EVICTIONS:
                gone = [(int(block), run.generation + at) for run in event.runs for at, block in enumerate(run.blocks)]
                self.lost.update(self.content[one] for one in gone if one in self.content)
        if request.principal is None:
            return
        first = request.cached_tokens // BLOCK_TOKENS
        for at in range(len(request.tokens) // BLOCK_TOKENS):
            known = (request.principal.tenant, tuple(request.tokens[: (at + 1) * BLOCK_TOKENS]))
            if at >= first:
                self.computed_again += known in self.lost
                self.lost.discard(known)
                block = request.table[at]
                self.content[block, int(self.pool.generation[block])] = known

    def _watch_times(self) -> None:
        """When blocks were written, first tokens came, and too few blocks were clean."""
        computed, emitted, end = self.engine.computed, self.engine._said, self.engine.end

        def landed(request: ToyRequest) -> None:
            if self.is_native:
                for block in request.table[: request.landed // BLOCK_TOKENS]:
                    self.written_us.setdefault(block, self.clock.now_us())
            computed(request)

        def spoke(request: ToyRequest, epoch: int, token: int) -> None:
            if request.state == "running" and request.epoch == epoch:
                took_us = self.clock.now_us() - self.asked_us[request.number]
                self.spoke.setdefault(request.number, (request.cached_tokens > 0, took_us))
            emitted(request, epoch, token)

        def ended(request: ToyRequest, state: str, cause: str) -> None:
            self.cancelled += cause == "aborted" and request.state == "running"
            end(request, state, cause)

        self.engine.computed, self.engine._said, self.engine.end = landed, spoke, ended
        handed_out = self.engine.device.handed_out

        def handed(block: int, owner: object) -> None:
            self.written_us.pop(block, None)
            if not self.is_native:
                self.written_us[block] = self.clock.now_us()
            handed_out(block, owner)

        self.engine.device.handed_out = handed
        if self.is_native:
            reclaimer = self.engine.governor.managers[0].reclaimer
            make_clean = reclaimer._make_clean

            def made(*what: Any) -> None:
                self.clean_waits += 1
                make_clean(*what)

            reclaimer._make_clean = made
            return
        hand_out = self.pool.hand_out

        def given(residency: Any, blocks: Any, *rest: Any) -> None:
            self.clean_waits += bool((self.pool.state[blocks] != BlockState.CLEAN).any())
            hand_out(residency, blocks, *rest)

        self.pool.hand_out = given

    # -- what the test does ----------------------------------------------------------------------------------

    def ask(self, who: Principal | None, tokens: list[int], outputs: int = 1) -> object:
        number = self.engine.submit(RequestSpec(who, tuple(tokens), outputs))
        self.asked_us[number] = self.clock.now_us()
        return number

    def run(self) -> None:
        while self.engine.step():
            pass
        self.engine.idle(250_000)

    def expire(self) -> None:
        before = self.holds.scheduled()
        self.engine.idle((IDLE_SECONDS + 1) * 1_000_000)
        self.lapsed += before - self.holds.scheduled()

    def work(self) -> None:
        """Hits of one's own, through a grant and of nobody; sessions; refusals; a full quota and evictions."""
        ada = person("alpha", "ada", "s1")
        for who in (ada, ada, person("alpha", "bob", "s2"), person("alpha", "bob")):
            self.ask(who, SHARED)
            self.run()
        for tokens in ([*range(200, 210)], SHARED):  # a grant serves once its first use is on record
            self.ask(person("beta"), tokens)
            self.run()
            self.facade._first_uses.settle(30)
        self.ask(person("omega"), SHARED)
        self.strangers += 1
        self.ask(person("delta"), SHARED)
        self.forbidden += 1
        self.ask(None, SHARED)
        for at in range(2):
            self.ask(person("gamma"), [*range(50 + 30 * at, 74 + 30 * at)], 4)
        self.run()
        for gone in (person("alpha", "bob"), person("beta")):
            number = self.ask(gone, [*range(300, 320)], 8)
            for _ in range(4):
                self.engine.step()
            self.engine.abort(number)
            self.run()
        for at in range(14):
            self.ask(person("alpha", "ada", f"many-{at}"), [*range(30 + at, 30 + at + 3 * BLOCK_TOKENS + 1)])
            self.run()

    # -- the recount -----------------------------------------------------------------------------------------

    def said(self) -> dict[str, float]:
        return worker_status(self.facade.stats(), BLOCK_TOKENS, self.engine.device.memory.bytes_per_block)

    def recount(self) -> dict[str, float]:
        """Every key of a metric, by hand."""
        now_us = self.facade.clock.now_us()
        known = [at for at, one in enumerate(self.starts) if one.principal is not None]
        hits = [at for at in known if self.cached[at]]
        sessions: dict[object, int] = {}
        for at in known:
            who = self.starts[at].principal
            assert who is not None
            if who.session is not None:
                sessions.setdefault((who.tenant, who.subject, who.session), at)
        states = np.bincount(self.pool.state, minlength=len(BlockState)).tolist()
        dues = [hold.deadline_us for hold in self._holds()]
        overdue = [due for due in dues if due <= now_us]
        figures: dict[str, float] = {f"blocks.{state.name.lower()}": states[state] for state in BlockState}
        figures |= {
            "blocks.total": BLOCKS,
            "usage_ratio": (states[BlockState.ACTIVE] + states[BlockState.CACHED]) / BLOCKS,
            "block_tokens": BLOCK_TOKENS,
            "allocated": self.engine.device.hand_outs,
            "bytes_per_block": len(self.engine.device.get(0)),
            "running": len(self.engine.running),
            "prompt_tokens": sum(len(self.starts[at].ask.tokens) for at in known),
            "hit_tokens": sum(self.cached[at] for at in hits),
            "hit_requests": len(hits),
            "requests": len(known),
            "first_requests": len(sessions),
            "first_request_hits": sum(self.cached[at] > 0 for at in sessions.values()),
            "granted_hit_blocks": self.crossed,
            "residencies": len(dues),
            "overdue": len(overdue),
            "overdue_seconds": max((now_us - due for due in overdue), default=0) / 1_000_000,
            "expired": self.lapsed,
            "integrity_checked": 0,  # its policy asks for no checksums; a recount of them is in test_integrity
            "integrity_mismatched": 0,
            "without_kinds": len(known) if self.orders_kinds else 0,  # none of these says what its content is
            "scrubbed.0": self.scrubbed,
            "drift": len(self.facade.scan()),
            "refused.no-delta": self.forbidden,
            "identity.unknown-tenant": self.strangers,
        }
        figures |= {f"deferred.{reason}": count for reason, count in self.told.items()}
        figures |= self._waits_by_hand()
        slots = sum(len(one.table) for one in self.engine.running) * BLOCK_TOKENS
        tokens = sum(len(one.tokens) for one in self.engine.running)
        figures |= {"active_tokens": tokens, "waste_tokens": slots - tokens, "clean_waits": self.clean_waits}
        figures |= {"stalled": self.stalled, "recomputed": self.computed_again}
        figures["absent_stores"] = 0  # this policy offloads nothing
        figures["fragmentation"] = (slots - tokens) / slots if slots else 0
        ages = self._cached_ages()
        figures["cached_age_seconds"] = sum(ages) / len(ages) if ages else 0
        figures["cached_age_seconds_max"] = max(ages, default=0)
        for event in self.engine.ledger():
            if isinstance(event, CustodyEnded) and event.cause in EVICTIONS:
                key = f"evicted.{event.cause}"
                figures[key] = figures.get(key, 0) + sum(len(run.blocks) for run in event.runs)
        if self.is_native:
            tree = self.engine.governor.managers[0].tree
            figures["nodes"] = sum(1 for _ in tree.nodes())
            figures["depth_blocks"] = max((depth_of(node) for node in tree.nodes()), default=0)
            used = Counter(block for one in self.engine.running for block in one.table)
            figures["shared_tokens"] = sum(count - 1 for count in used.values()) * BLOCK_TOKENS
        return {key: value for key, value in figures.items() if value or key in ALWAYS}

    def _waits_by_hand(self) -> dict[str, float]:
        hits = [blocks for blocks in self.cached if blocks]
        spoke = list(self.spoke.values())
        figures = {"hit_blocks.unverified": sum(hits) / BLOCK_TOKENS}
        for name, bounds, values in (
            ("queue", SECONDS, [us / 1e6 for us in self.waited_us]),
            ("hit_age", AGES, [us / 1e6 for us in self.ages_us]),
            ("hit_length", TOKENS, hits),
            ("ttft.hit", SECONDS, [us / 1e6 for hit, us in spoke if hit]),
            ("ttft.miss", SECONDS, [us / 1e6 for hit, us in spoke if not hit]),
            ("cancel", SECONDS, [0.0] * self.cancelled),
        ):
            if values:
                figures |= {f"{name}.le.{bound:g}": sum(one <= bound for one in values) for bound in bounds}
                figures |= {f"{name}.le.inf": len(values), f"{name}.sum": sum(values)}
        return figures

    def _cached_ages(self) -> list[float]:
        """Of blocks that nobody uses and that can be found: since when they are."""
        now_us = self.clock.now_us()
        cached = np.flatnonzero(self.pool.state == BlockState.CACHED).tolist()
        return [(now_us - self.written_us[block]) / 1e6 for block in cached]

    def _owners(self) -> dict[int, str]:
        """Whose the blocks are that can be found."""
        if self.is_native:
            nodes = self.engine.governor.managers[0].tree.nodes()
            return {block: node.domain.owner.name for node in nodes for block in node.blocks.tolist()}
        tags = self.pool.tag.tolist()
        return {block: self.pool.domains[tag].owner.name for block, tag in enumerate(tags) if tag}

    def _holds(self) -> Iterator[Any]:
        accounts = self.engine.governor.managers[0].accounts if self.is_native else self.pool.accounts
        for account in accounts.values():
            hold = self.holds.of(account).oldest
            while hold is not None:
                yield hold
                hold = hold.newer


ALWAYS = frozenset(measure.key for measure in MEASURES if "{" not in measure.key)


def person(tenant: str, subject: str | None = None, session: str | None = None) -> Principal:
    return identify(issuer="idp", tenant=tenant, verified={"subject": subject, "session": session})


def differing(world: Counted) -> dict[str, tuple[float, float]]:
    """Keys whose values differ, and both values. A wheel's tick is what `overdue_seconds` may be off by."""
    shown = {key: value for key, value in world.said().items() if value or key in ALWAYS}
    hand = world.recount()
    keys = (shown.keys() | hand.keys()) - UNSURE
    assert shown["overdue_seconds"] == pytest.approx(hand["overdue_seconds"], abs=0.2)
    return {
        key: (shown.get(key, 0), hand.get(key, 0))
        for key in keys
        if shown.get(key, 0) != pytest.approx(hand.get(key, 0), rel=1e-6, abs=1e-5)
    }


def depth_of(node: Any) -> int:
    depth = 0
    while node is not None:
        depth, node = depth + node.length, node.parent
    return depth


@pytest.fixture(params=[NativeEngine, ReferenceEngine])
def world(request: pytest.FixtureRequest) -> Iterator[Counted]:
    made = Counted(request.param)
    yield made
    assert made.engine.check() == []
    made.engine.close()


def test_every_metric_of_an_engine_is_what_a_recount_says(world: Counted) -> None:
    assert differing(world) == {}, "at boot"
    world.work()
    assert differing(world) == {}, "idle"
    shown = world.said()
    for key in (
        "first_request_hits",
        "granted_hit_blocks",
        "hit_tokens",
        "deferred.over-quota",
        "refused.no-delta",
    ):
        assert shown[key] > 0, f"void: nothing of {key} happened"
    assert any(shown.get(f"evicted.{cause}") for cause in EVICTIONS)
    for at in range(2):
        world.ask(person("beta", "eve", "s3"), [*range(100 + 40 * at, 120 + 40 * at)], 6)
    for _ in range(4):
        world.engine.step()
    assert world.engine.running
    assert differing(world) == {}, "busy"
    world.run()
    world.clock.advance((IDLE_SECONDS + 1) * 1_000_000)
    assert world.said()["overdue"] > 0
    assert differing(world) == {}, "nobody sweeps"
    world.expire()
    assert differing(world) == {} and world.said()["expired"] > 0
    world.ask(person("alpha"), SHARED)
    world.run()
    world.engine.erase(Selector("alpha"))
    world.run()
    assert differing(world) == {}, "erased"


def test_every_metric_of_a_worker_has_a_recount(world: Counted) -> None:
    """Or it is of the agent or the service; and what an engine cannot have is not said of it."""
    world.work()
    of_workers = {measure.name: measure.key for measure in MEASURES if "worker" in measure.labels}
    assert {name for name, key in of_workers.items() if not key} == OF_THE_SERVICE
    absent = OF_THE_AGENT if world.is_native else OF_THE_AGENT | OURS_ALONE
    keys = set(of_workers.values()) - {""}
    assert keys >= OF_THE_AGENT | OURS_ALONE
    shown, hand = world.said(), world.recount()
    world.ask(person("beta"), [*range(400, 420)], 6)
    for _ in range(4):
        world.engine.step()
    shown |= world.said()
    hand |= world.recount()
    for key in keys - absent - UNSURE - OF_TIERS - OF_MONITORED - OF_LEASES - OF_EVENTS:
        assert any(_names(key, name) for name in hand), f"`{key}` has no recount here"
        assert any(_names(key, name) for name in shown), f"`{key}` is not said"
    for name in shown:
        assert any(_names(key, name) for key in keys - absent), f"no metric of this engine shows `{name}`"


def _names(key: str, name: str) -> bool:
    start, braces, _ = key.partition("{")
    return name.startswith(start if braces else f"{key}.") or name == key


def test_a_cycle_that_does_not_fit_is_named_with_the_pool_that_would_hold_it(world: Counted) -> None:
    """Prompts of 1.25 times the pool, over and over: no hit, and the tenant and the size are said."""
    prompt_blocks = 6
    prompts = [[*range(1000 * at, 1000 * at + prompt_blocks * BLOCK_TOKENS + 1)] for at in range(1, 11)]
    assert len(prompts) * prompt_blocks == 1.25 * BLOCKS
    for prompt in prompts * 4:
        world.ask(person("alpha", "ada"), prompt)
        world.run()
    said, stats = world.said(), world.facade.stats()
    assert not said.get("hit_tokens") and said["recomputed"] >= 2 * BLOCKS
    assert stats.thrashing == {"alpha": True}
    assert 1.25 * BLOCKS <= said["advised_blocks"] <= 2.5 * BLOCKS
    again = Counted(type(world.engine), blocks=int(said["advised_blocks"]))
    for prompt in prompts * 4:
        again.ask(person("alpha", "ada"), prompt)
        again.run()
    assert again.said()["hit_requests"] == 30 and not any(again.facade.stats().thrashing.values())
    again.engine.close()


def test_an_erasure_forgets_the_keys_of_what_was_evicted_before(world: Counted) -> None:
    """Keys of evicted blocks are kept to count what is computed again: a tenant's go with its erasure, no other's."""
    prompts = [[*range(1000 * at, 1000 * at + 6 * BLOCK_TOKENS + 1)] for at in range(1, 11)]

    def ask(tenant: str) -> float:
        before = world.said()["recomputed"]
        for prompt in prompts:
            world.ask(person(tenant, "ada"), prompt)
            world.run()
        return world.said()["recomputed"] - before

    for tenant in ("alpha", "beta"):
        ask(tenant)
    assert ask("alpha") > 0, "void: nothing is counted where nobody erased"
    ask("beta")
    world.engine.erase(Selector("alpha"))
    world.run()
    assert ask("alpha") == 0
    assert ask("beta") > 0


def test_prefill_time_avoided_is_what_the_prefills_cost() -> None:
    """A simulated engine whose prefills take a known time: what hits saved is what it says, and the error is stated."""
    measures, rng = ServingMeasures(BLOCK_TOKENS), np.random.default_rng(5)
    start, token, pair = 0.004, 2e-5, 3e-9
    saved = 0.0
    for at in range(3000):
        prompt, hit = int(rng.integers(100, 20_000)), 0
        if at % 3:
            hit = int(rng.integers(0, prompt))
        computed = prompt - hit
        seconds = start + token * computed + pair * (computed * hit + computed**2 / 2)
        if at >= 1024:  # a batch of them has been learned from
            saved += token * hit + pair * hit**2 / 2
        noisy = int(seconds * 1e6 * rng.normal(1, 0.05))
        measures.first_token(computed, hit, noisy, noisy)
        if at == 1023:
            measures.figures()
            measures.avoided_seconds = 0.0
    said = measures.figures()
    assert said["prefill_avoided_seconds"] == pytest.approx(saved, rel=0.02)
    assert 0.02 < said["prefill_cost_error"] < 0.06, "five per cent of noise: four on average"
    assert said["prefill_cost.token"] == pytest.approx(token, rel=0.05)
    assert said["prefill_cost.pair"] == pytest.approx(pair, rel=0.05)


def test_nothing_is_said_to_be_avoided_before_a_prefill_was_measured() -> None:
    measures = ServingMeasures(BLOCK_TOKENS)
    for at in range(LEARNED_MIN - 1):
        measures.first_token(100 + 10 * at, 50, 1000 + 100 * at, 1000 + 100 * at)
        assert not measures.figures().keys() & {"prefill_avoided_seconds", "prefill_cost_error"}
    measures.first_token(100, 50, 1000, 1000)
    assert measures.figures()["prefill_avoided_seconds"] > 0


def test_time_of_look_ups_is_said_of_our_own_pools(world: Counted) -> None:
    assert not world.said().get("look_up_seconds")
    world.ask(person("alpha"), SHARED)
    world.run()
    assert (world.said().get("look_up_seconds", 0) > 0) == world.is_native


@pytest.mark.parametrize("kind", [NativeEngine, ReferenceEngine])
def test_requests_that_say_no_kind_are_counted_where_kinds_order(
    kind: type[NativeEngine] | type[ReferenceEngine],
) -> None:
    world = Counted(kind, eviction=BY_KIND)
    world.work()
    assert world.said()["without_kinds"] > 0 and differing(world) == {}
    world.engine.close()


def test_a_request_that_says_its_kind_is_not_counted_as_without() -> None:
    world = Counted(NativeEngine, eviction=BY_KIND)
    for name, kinds in (("with", (KindRange(0, 9, "pasted_log"),)), ("without", ())):
        asked = {"request_id": name, "hints": Hints(kinds=kinds)}
        world.facade.admit(person("alpha", "ada"), toy_model(BLOCK_TOKENS), SHARED, **asked)
        assert world.said()["without_kinds"] == (name == "without")
        world.facade.release(("alpha", name))
    world.engine.close()


def test_a_hit_past_its_time_is_stale_and_no_hit() -> None:
    """Found under its key before anybody swept: looked up, not attached, counted."""
    world = Counted(NativeEngine)
    world.ask(person("alpha", "ada"), SHARED)
    world.run()
    world.clock.advance((IDLE_SECONDS + 1) * 1_000_000)
    world.facade.admit(person("alpha", "ada"), toy_model(BLOCK_TOKENS), SHARED, request_id="late")
    said = world.said()
    assert said["hit_blocks.stale"] == 3 and not said["hit_blocks.unverified"]
    world.facade.release(("alpha", "late"))
    world.engine.close()


def test_what_is_cancelled_is_timed_from_the_cancel() -> None:
    world = Counted(NativeEngine)
    world.ask(person("alpha", "ada"), SHARED, 4)
    world.engine.step()
    asked_us = world.clock.now_us()
    world.clock.advance(30_000)
    (handle,) = world.facade.running
    world.facade.release(handle, "aborted", asked_us=asked_us)
    said = world.said()
    assert (said["cancel.le.0.025"], said["cancel.le.0.05"], said["cancel.sum"]) == (
        0,
        1,
        pytest.approx(0.03),
    )
    world.facade.close()


def test_a_request_that_could_never_run_is_refused_and_counted(world: Counted) -> None:
    """What would be an OOM elsewhere: refused at once, with what it needs and what it may have."""
    number = world.ask(person("alpha"), [*range(3, 3 + (BLOCKS + 1) * BLOCK_TOKENS)])
    world.run()
    assert world.engine.outcome(number).state == "refused"
    assert world.said()["refused.too-large"] == 1
    world.ask(person("alpha"), SHARED)
    world.run()
    assert world.said()["requests"] == 1, "control: one that fits runs"


def test_room_behind_the_last_token_is_what_is_lost() -> None:
    """Eight requests of a block and two tokens: a quarter of what they have is waste."""
    world = Counted(ReferenceEngine)
    for at in range(8):
        world.ask(person("alpha", "ada"), [*range(100 * at, 100 * at + BLOCK_TOKENS + 1)], 9)
    world.engine.step()
    said = world.said()
    assert (said["running"], said["active_tokens"], said["waste_tokens"]) == (8, 8 * 6, 8 * 2)
    assert said["fragmentation"] == pytest.approx(2 / 8)
    world.run()
    assert world.said()["waste_tokens"] == 0 and not world.said().get("fragmentation")
    world.engine.close()


def test_who_waits_for_room_waits_from_when_it_first_came() -> None:
    asked = FirstAsked()
    assert asked.note("one", 10, "pool-full") and not asked.note("one", 20, "pool-full")
    assert asked.note("one", 30, "over-quota"), "another reason is counted too"
    for at in range(WAITING_MAX):
        asked.note(at, 30, "ledger")
    assert asked.take("one", 99) == 99, "the oldest was forgotten"
    assert (asked.take(5, 99), asked.take(5, 99)) == (30, 99)
    assert asked.note(5, 100, "ledger"), "it had begun: it waits anew"


def test_who_is_charged(world: Counted) -> None:
    world.work()
    owners = world._owners()
    cached = np.flatnonzero(world.pool.state == BlockState.CACHED).tolist()
    assert cached and dict(world.facade.stats().charged) == Counter(owners[block] for block in cached)


def test_hits_in_several_layer_groups_are_not_made_tokens() -> None:
    clock = VirtualClock()
    model = toy_model(16)
    one, several = (builders.port(builders.table(builders.policy()), clock) for _ in range(2))
    for port, groups in ((one, 1), (several, 2)):
        port.admit(person("holder"), model, [*range(3, 40)], request_id="a", groups=groups)
    assert "hit_tokens" in worker_status(one.stats(), 16), "control"
    assert "hit_tokens" not in worker_status(several.stats(), 16)


def test_what_a_tenant_counted_stays_when_it_leaves() -> None:
    world = Counted(NativeEngine)
    world.ask(person("alpha", "ada", "s1"), SHARED)
    world.ask(person("delta"), SHARED)
    world.run()
    before = world.said()
    for tenant in ("alpha", "delta"):
        world.facade._forget_tenant(tenant)
    assert not world.facade.stats().tenants and world.said() == before and before["refused.no-delta"]
    world.engine.close()


def test_what_waits_and_holds_nothing_does_not_run(world: Counted) -> None:
    for at in range(2):
        world.ask(person("gamma"), [*range(50 + 30 * at, 74 + 30 * at)], 4)
    world.engine.step()
    assert len(world.engine.waiting) == 1 and world.said()["running"] == 1


def test_a_session_is_known_until_many_others_came() -> None:
    counters = TenantCounters()
    for session in range(SESSIONS_MAX):
        counters.count_session(session, hit=False)
    counters.count_session(0, hit=True)
    assert (counters.first_requests, counters.first_request_hits) == (SESSIONS_MAX, 0)
    counters.count_session("new", hit=True)
    counters.count_session(0, hit=True)
    assert (counters.first_requests, counters.first_request_hits) == (SESSIONS_MAX + 1, 1)
    counters.count_session(1, hit=True)  # it made room
    assert counters.first_requests == SESSIONS_MAX + 2 and len(counters.sessions) == SESSIONS_MAX


def test_an_idle_governor_says_what_is_so_without_a_step() -> None:
    world = Counted(NativeEngine)
    governor = world.engine.governor
    governor.count()
    while world.engine.step():
        pass
    world.ask(person("alpha", "ada", "s1"), SHARED)
    while world.engine.step():
        pass
    assert governor.counted is not None and not governor.running
    kept = worker_status(governor.counted.stats, BLOCK_TOKENS)
    assert kept == worker_status(governor.stats(), BLOCK_TOKENS) and kept["allocated"] == 4
    world.engine.close()


def test_an_idle_engine_behind_the_port_is_woken_to_count() -> None:
    world = Counted(ReferenceEngine)
    port = world.engine.port
    world.ask(person("alpha", "ada", "s1"), SHARED)
    world.run()
    done = port.call(lambda facade: facade.count())
    assert port.has_work() and port.counted is None
    world.engine.idle(1_000_000)
    assert done.done() and worker_status(port.counted.stats, BLOCK_TOKENS)["allocated"] == 4
    world.engine.close()
