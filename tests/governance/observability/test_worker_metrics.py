"""Every metric that a worker says of its engine, against a recount by hand: idle and busy, on both kinds of engine.

1. The recount asks neither `stats` nor a tally: it is made of what the test did and was answered, of the engine's own
   books, the pool's rows, the ledger's leaves and the device's calls.
2. A metric that is not known here fails: whoever adds one says how it is counted, or that an engine has none of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import builders
import numpy as np
import pytest

from kvcustody.allocator.pool.block_state import BlockState
from kvcustody.audit.events import CustodyEnded
from kvcustody.clock import VirtualClock
from kvcustody.governance.admission_outcome import Deferred
from kvcustody.governance.erasure.selector import Selector
from kvcustody.governance.identity.principal import Principal, identify
from kvcustody.governance.observability.metrics import MEASURES, worker_status
from kvcustody.governance.observability.tenant_counters import SESSIONS_MAX, TenantCounters
from kvcustody.testkit.conformance.deployment import toy_model
from kvcustody.testkit.conformance.engine_protocol import RequestSpec, Setup
from kvcustody.testkit.conformance.engines.native_engine import NativeEngine
from kvcustody.testkit.conformance.engines.reference_engine import ReferenceEngine
from kvcustody.testkit.conformance.engines.toy_engine import BLOCK_TOKENS, ToyRequest
from kvcustody.testkit.conformance.policy import policy

BLOCKS, IDLE_SECONDS = 48, 20
FORBIDS = "rules:\n  - {id: no-delta, effect: forbid, action: admit, when: {owner: delta}}\n"
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
OURS_ALONE = {"nodes", "active_tokens"}
EVICTIONS = ("quota", "pressure", "evicted")


class Counted:
    """One engine and what the test saw of it."""

    def __init__(self, kind: type[NativeEngine] | type[ReferenceEngine]) -> None:
        self.clock = VirtualClock()
        document = policy(scope="tenant", grant=True, idle=f"{IDLE_SECONDS}s").replace("rules:\n", FORBIDS)
        self.engine: Any = kind(Setup(document, self.clock, BLOCKS))
        self.is_native = kind is NativeEngine
        self.facade = self.engine.governor if self.is_native else self.engine.port
        self.pool = self.engine.governor.managers[0].pool if self.is_native else self.engine.pool
        self.holds = self.engine.governor.managers[0].hold_table if self.is_native else self.pool.hold_table
        self.starts: list[ToyRequest] = []
        self.cached: list[int] = []
        self.told: Counter[str] = Counter()
        self.forbidden = self.strangers = self.lapsed = self.crossed = 0
        self.scrubbed = BLOCKS if self.is_native else 0  # a Governor zeroes its pool as it is made
        self._watch()

    def _watch(self) -> None:
        start, scrub = self.engine.start, self.engine.device.memory.scrub
        asked = "admit" if self.is_native else "may_start"
        ask = getattr(self.facade, asked)

        def started(request: ToyRequest) -> bool:
            did: bool = start(request)
            if did:
                self.starts.append(request)
                self.cached.append(request.cached_tokens)
                hit = request.table[: request.cached_tokens // BLOCK_TOKENS]
                owners = self._owners()
                self.crossed += sum(
                    owners[block] != request.principal.tenant for block in hit if request.principal
                )
            return did

        def answered(*what: Any, **how: Any) -> Any:
            answer = ask(*what, **how)
            reason = answer.reason if isinstance(answer, Deferred) else answer
            if isinstance(reason, str):
                self.told[reason] += 1
            return answer

        def zeroed(shard: int, blocks: Any, *what: Any, **how: Any) -> Any:
            self.scrubbed += len(blocks)
            return scrub(shard, blocks, *what, **how)

        self.engine.start = started
        self.engine.device.memory.scrub = zeroed
        setattr(self.facade, asked, answered)

    # -- what the test does ----------------------------------------------------------------------------------

    def ask(self, who: Principal | None, tokens: list[int], outputs: int = 1) -> object:
        return self.engine.submit(RequestSpec(who, tuple(tokens), outputs))

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
        found: dict[str, float] = {f"blocks.{state.name.lower()}": states[state] for state in BlockState}
        found |= {
            "blocks.total": BLOCKS,
            "usage_ratio": (states[BlockState.ACTIVE] + states[BlockState.CACHED]) / BLOCKS,
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
            "scrubbed.0": self.scrubbed,
            "drift": len(self.facade.scan()),
            "refused.no-delta": self.forbidden,
            "identity.unknown-tenant": self.strangers,
        }
        found |= {f"deferred.{reason}": count for reason, count in self.told.items()}
        for event in self.engine.ledger():
            if isinstance(event, CustodyEnded) and event.cause in EVICTIONS:
                key = f"evicted.{event.cause}"
                found[key] = found.get(key, 0) + sum(len(run.blocks) for run in event.runs)
        if self.is_native:
            tree = self.engine.governor.managers[0].tree
            found["nodes"] = sum(1 for _ in tree.nodes())
            found["active_tokens"] = sum(len(one.tokens) for one in self.engine.running)
        return {key: value for key, value in found.items() if value or key in ALWAYS}

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
    said = {key: value for key, value in world.said().items() if value or key in ALWAYS}
    hand = world.recount()
    keys = (said.keys() | hand.keys()) - {"overdue_seconds"}
    assert said["overdue_seconds"] == pytest.approx(hand["overdue_seconds"], abs=0.2)
    return {
        key: (said.get(key, 0), hand.get(key, 0)) for key in keys if said.get(key, -1) != hand.get(key, -1)
    }


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
    said = world.said()
    for key in (
        "first_request_hits",
        "granted_hit_blocks",
        "hit_tokens",
        "deferred.over-quota",
        "refused.no-delta",
    ):
        assert said[key] > 0, f"void: nothing of {key} happened"
    assert any(said.get(f"evicted.{cause}") for cause in EVICTIONS)
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
    said, hand = world.said(), world.recount()
    for key in keys - absent:
        assert any(_names(key, name) for name in hand), f"`{key}` has no recount here"
        assert any(_names(key, name) for name in said), f"`{key}` is not said"
    for name in said:
        assert any(_names(key, name) for key in keys - absent), f"no metric of this engine shows `{name}`"


def _names(key: str, name: str) -> bool:
    start, braces, _ = key.partition("{")
    return name.startswith(start) if braces else name == key


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
