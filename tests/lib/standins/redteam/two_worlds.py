"""A small world to attack: one Governor on a virtual clock, tenants that ask it things, and what each of them sees.

Two-world non-interference is the oracle: two worlds that differ in nothing but what the victim does, with the same
attacker and the same seeds. Everything the attacker can see is written down; a byte of difference is a channel.

V1  Nothing here is a stand-in: the Governor, its keys, its policy and its pool are the real ones. Memory is unbacked,
    the clock is virtual, and the key store is a document in memory.
V2  A control is the same harness with one defence substituted, and must reach the stated failure.
V3  Cost is virtual: the tokens a prompt still has to compute. A wall clock is asked only where a test says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcustody.allocator.pool.memory_protocol import UnbackedMemory
from kvcustody.allocator.pool.options import PoolOptions
from kvcustody.audit.kinds import Event
from kvcustody.clock import VirtualClock
from kvcustody.deadline_clock import DeadlineClock
from kvcustody.governance.admission_outcome import Admission
from kvcustody.governance.governor.governor import Governor
from kvcustody.governance.governor.pools import Pools
from kvcustody.governance.identity.domain_spec import DomainSpec, ScopeKind, tenant_owner
from kvcustody.governance.identity.model_identity import ModelIdentity
from kvcustody.governance.identity.principal import Principal
from kvcustody.governance.keys.keyring import Keyring
from kvcustody.governance.ledger_protocol import CountingLedger
from kvcustody.governance.request import NO_HINTS, Hints
from kvcustody.ids import SessionId, SubjectId, TenantId
from kvcustody.policies.reading.load_policy import load_policy
from kvcustody.policies.table.compile import compile_policy
from kvcustody.policies.table.decision_table import DecisionTable
from standins.builders import keyring_in_memory

ISSUER = "idp"
BLOCK = 16

_POLICY = """\
schema: kvcustody/policy@1
name: world
profile: {profile}
scope: {scope}
classifications: [low, high, sealed]
labels: {{region: [eu, us]}}
classify:
  - {{tenant: "*", as: low}}
{classify}
tenants:
{tenants}
{sharing}
rules:
  - {{id: own, effect: permit, action: reuse, when: {{reader: owner}}}}
  - {{id: no-sealed, effect: forbid, action: reuse, when: {{classification: sealed}}}}
{rules}
retention:
  low:    {{idle: {idle}, absolute: 8h, active_max: 8h}}
  high:   {{idle: {idle}, absolute: 8h, active_max: 8h}}
  sealed: {{idle: {idle}, absolute: 8h, active_max: 8h}}
scrub:
  default: {{within: 1s, verify: 1/64}}
offload: {{low: never, high: never, sealed: never}}
audit:
  on_outage: {{decisions: deny, lifecycle: spill, own_hits: aggregate}}
eviction: {{policy: lru}}
"""

HALVES = """\
  victim:   {quota: {guaranteed: 50%, cap: 50%}}
  attacker: {quota: {guaranteed: 50%, cap: 50%}}"""
ROOMY = """\
  victim:   {quota: {guaranteed: 25%, cap: 100%, borrow: true}}
  attacker: {quota: {guaranteed: 25%, cap: 100%, borrow: true}}
  default:  {quota: {guaranteed: 0%, cap: 100%, borrow: true}}"""


def table(
    *,
    profile: str = "shared",
    scope: str = "tenant",
    tenants: str = ROOMY,
    classify: str = "",
    sharing: str = "",
    rules: str = "",
    idle: str = "30m",
    revision: int = 1,
    issuers: str = "",
) -> DecisionTable:
    """A compiled policy from pieces of YAML."""
    text = _POLICY.format(
        profile=profile,
        scope=scope,
        tenants=tenants,
        classify=classify,
        sharing=sharing,
        rules=rules,
        idle=idle,
    )
    if issuers:
        text += f"issuers: [{issuers}]\n"
    return compile_policy(load_policy(text, name="world.yaml"), revision=revision)


def strict(**pieces: Any) -> DecisionTable:
    """The strict profile, half of the pool each."""
    return table(profile="strict", tenants=HALVES, **pieces)


def model(**changes: Any) -> ModelIdentity:
    """The model that everybody is served with, with `changes`."""
    fields: dict[str, Any] = {
        "weights_digest": "sha256:w",
        "weights_epoch": 1,
        "tokenizer_digest": "sha256:t",
        "chat_template": "template-1",
        "quantization": "none",
        "kv_dtype": "bf16",
        "kv_layout": "nhd",
        "block_tokens": BLOCK,
        "rope": {"base": 10_000},
        "attention": {"heads": 8, "head_dim": 128},
    }
    return ModelIdentity(**(fields | changes))


MODEL = model()


class KeepingLedger(CountingLedger):
    """A counting ledger that also keeps events, to show a tenant its own log."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Event] = []

    def submit(self, events: Sequence[Event], /) -> int:
        """Count and keep them."""
        self.events += events
        return super().submit(events)


class World:
    """One deployment. `seen` is what the attacker has seen since it was last emptied."""

    def __init__(
        self,
        decisions: DecisionTable,
        *,
        blocks: int = 4096,
        block_tokens: int = BLOCK,
        shows_blocks: bool = False,
        keep_events: bool = False,
        keyring: Keyring | None = None,
        options: Mapping[str, int] = {},
        governor: type[Governor] = Governor,
        clock: VirtualClock | None = None,
        clock_path: Path | None = None,
    ) -> None:
        self.clock = clock or VirtualClock()
        self.time = DeadlineClock(self.clock, clock_path)
        self.ledger = KeepingLedger() if keep_events else CountingLedger()
        self.keyring = keyring or keyring_in_memory(self.clock)
        self.pools = Pools(
            lambda count: UnbackedMemory(count, 1, clock=self.clock),
            blocks,
            PoolOptions(block_tokens=block_tokens, evict_ahead=1, **options),
        )
        self.governor = governor(self.pools, decisions, self.keyring, self.ledger, clock=self.time)
        self.shows_blocks = shows_blocks
        self.seen: list[object] = []
        self._principals: dict[tuple[str, str | None, str | None], Principal] = {}

    def principal(self, tenant: str, subject: str | None = None, session: str | None = None) -> Principal:
        """An authenticated identity."""
        key = (tenant, subject, session)
        known = self._principals.get(key)
        if known is None:
            known = Principal(
                ISSUER,
                TenantId(tenant),
                None if subject is None else SubjectId(subject),
                None if session is None else SessionId(session),
            )
            if len(self._principals) < 10_000:
                self._principals[key] = known
        return known

    def admit(self, tenant: str, tokens: Any, **request: Any) -> Any:
        """Admit one request of `tenant`; `subject`, `session`, `model`, `salt`, `classification` as wanted."""
        principal = self.principal(tenant, request.pop("subject", None), request.pop("session", None))
        hints = NO_HINTS
        if "salt" in request or "classification" in request:
            hints = Hints(request.pop("classification", None), request.pop("salt", None))
        return self.governor.admit(principal, request.pop("model", MODEL), tokens, hints=hints, **request)

    def ask(self, tenant: str, tokens: Any, *, decode: int = 0, **request: Any) -> Any:
        """A whole request: admitted, computed, decoded, released. Returns what admission answered."""
        answer = self.admit(tenant, tokens, **request)
        if isinstance(answer, Admission):
            self.finish(answer, len(tokens), decode)
        return answer

    def finish(self, answer: Admission, tokens: int, decode: int = 0) -> None:
        """Compute, decode and release an admitted request."""
        governor = self.governor
        governor.commit([answer.request_id], [tokens])
        for token in range(decode):
            governor.extend_many([answer.request_id], [token + 1])
        governor.release(answer.request_id)

    def hit(self, tenant: str, tokens: Any, **request: Any) -> int:
        """Hit tokens of a whole request, which must be admitted."""
        answer = self.ask(tenant, tokens, **request)
        assert isinstance(answer, Admission), answer
        return answer.hit_tokens

    def observe(self, tenant: str, answer: Any, tokens: int) -> None:
        """Write down all that `tenant` can see of one answer: its kind, its words, its cost, its time."""
        if isinstance(answer, Admission):
            blocks = answer.blocks.tolist() if self.shows_blocks else len(answer.blocks)
            cost = tokens - answer.hit_tokens
            self.seen.append(("admitted", answer.request_id, answer.hit_tokens, cost, blocks))
        else:
            self.seen.append((type(answer).__name__, answer.request_id, answer.reason))

    def probe(self, tenant: str, tokens: Any, **request: Any) -> Any:
        """`ask`, observed."""
        answer = self.ask(tenant, tokens, **request)
        self.observe(tenant, answer, len(tokens))
        return answer

    def observe_standing(self, tenant: str) -> None:
        """Write down the tenant's own statistics and charge, and the time."""
        tally = self.governor.stats().tenants.get(tenant)
        counts = () if tally is None else tuple(getattr(tally, name) for name in tally.__slots__)
        charges = [
            (a.used_blocks, a.active_blocks, a.cached_blocks, len(manager.hold_table.of(a)))
            for manager in self.governor.managers
            if (a := manager.accounts.get(tenant))
        ]
        self.seen.append((repr(counts), charges, self.clock.now_us()))

    def step(self, microseconds: int = 1000) -> None:
        """Time passes and the engine steps."""
        self.clock.advance(microseconds)
        self.governor.step()


Act = Callable[[World, Random, int], None]


class Compared(NamedTuple):
    """How many rounds of two worlds looked different to the attacker, and the first that did."""

    rounds: int
    different: int
    first: tuple[int, list[object], list[object]] | None

    @property
    def share(self) -> float:
        """The share of rounds that looked different."""
        return self.different / self.rounds


def compare(
    build: Callable[[], World],
    attack: Act,
    victim: Act,
    rounds: int,
    *,
    seed: int = 1,
    other: Act | None = None,
    watch: str = "attacker",
    step_us: int = 1000,
    checked_every: int = 0,
) -> Compared:
    """Two worlds in lock-step: in one the victim acts, in the other it does `other` (nothing, if None)."""
    worlds = (build(), build())
    attackers = (Random(seed), Random(seed))
    victims = (Random(seed + 1), Random(seed + 1))
    different, first = 0, None
    for at in range(rounds):
        for world, attacker, victims_own, act in zip(worlds, attackers, victims, (other, victim), strict=True):
            world.seen.clear()
            if act is not None:
                act(world, victims_own, at)
            attack(world, attacker, at)
            world.step(step_us)
            world.observe_standing(watch)
            if checked_every and at % checked_every == 0:
                problems = world.governor.check()
                assert not problems, f"seed {seed} round {at}: {problems}"
        if repr(worlds[0].seen) != repr(worlds[1].seen):
            different += 1
            if first is None:
                first = (at, list(worlds[0].seen), list(worlds[1].seen))
    return Compared(rounds, different, first)


def tokens(random: Random, count: int, base: int = 0) -> NDArray[np.int32]:
    """`count` random token ids above `base`."""
    return np.frombuffer(random.randbytes(4 * count), dtype=np.uint32).astype(np.int32) % 30_000 + base


def auc(zeros: Sequence[float], ones: Sequence[float]) -> float:
    """max(AUC, 1 - AUC) of telling `ones` from `zeros` by one number; ties count half."""
    a, b = np.sort(np.asarray(zeros, dtype=float)), np.asarray(ones, dtype=float)
    below = np.searchsorted(a, b, side="left").sum() + np.searchsorted(a, b, side="right").sum()
    area = float(below) / (2 * len(a) * len(b))
    return max(area, 1 - area)


AUC_GATE = 0.535  # null 99.9 % quantile at 2000 per class is 0.530


def everyone(world: World, monkeypatch: Any) -> None:
    """A control: every request of every tenant is keyed and stored in one domain ("no salt")."""
    owner = tenant_owner(ISSUER, "everyone")

    def unscoped(principal: Principal, **fields: Any) -> DomainSpec:
        world.keyring.ensure([owner])
        return DomainSpec(
            scope=fields["scope"],
            issuer=ISSUER,
            tenant="everyone",
            subject="everyone" if fields["scope"] is ScopeKind.SUBJECT else None,
            classification=fields["classification"],
            model=fields["model"],
            key_epoch=1,
        )

    monkeypatch.setattr("kvcustody.governance.decisions.access_plan.own_domain", unscoped)
