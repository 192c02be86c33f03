"""The prover: finds every planted leak, accepts every safe edit, agrees with an SMT solver, and is quick.

A planted leak counts only when the governor, with two real tenants, serves across the boundary what the declared policy
does not open; z3 decides the same question with tenants as an uninterpreted sort.
"""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from dataclasses import replace

import pytest

from kvcustody.clock import VirtualClock
from kvcustody.governance.admission_outcome import Admission
from kvcustody.governance.decisions.segment_matcher import declare
from kvcustody.governance.identity.domain_spec import tenant_owner
from kvcustody.policies import library
from kvcustody.policies.document.model import Action, Grant, Scope, Tier, Via
from kvcustody.policies.reading.load_policy import load_policy
from kvcustody.policies.table import compile as compiler
from kvcustody.policies.table import decision_table
from kvcustody.policies.table.compile import compile_policy
from kvcustody.policies.table.decision_table import places
from kvcustody.policies.table.model import AccessRequest
from kvcustody.policies.table.obligations import Obligations
from kvcustody.policies.workbench.diff.semantic_diff import diff
from kvcustody.policies.workbench.prove import specification
from kvcustody.policies.workbench.prove.model import PROPERTIES
from kvcustody.policies.workbench.prove.prove import Never, prove
from kvcustody.policies.workbench.request import Request
from standins.builders import keyring_in_memory
from standins.policies.decide_reference import random_document
from standins.policies.large_policies import large_policy, nested_grants
from standins.policies.mutants import HIGH, LEVELS, LOW, SEGMENT_TOKENS, Probe, cast, leaks, safe
from standins.redteam.two_worlds import BLOCK, ISSUER, MODEL, World

pytestmark = pytest.mark.system

DAY = 86_400_000_000


class Deployment:
    """One keyring under which segments are declared and worlds are made."""

    def __init__(self):
        self.ring = keyring_in_memory(VirtualClock())
        rng = random.Random(1)
        self.texts = {name: [rng.randrange(30_000) for _ in range(SEGMENT_TOKENS)] for name in ("s1", "s2")}

    def declare(self, tenant, segment):
        owner = tenant_owner(ISSUER, tenant)
        self.ring.ensure([owner])
        text = self.texts[segment]
        return declare(self.ring, owner, text, model=MODEL.digest, block_tokens=BLOCK).digest

    def crossed_tokens(self, policy, probe: Probe) -> int:
        """Return how many of the owner's cached tokens the real governor serves to the reader."""
        clock = VirtualClock(utc_us=probe.at_us)
        world = World(compile_policy(policy, revision=1), keyring=self.ring, blocks=512, clock=clock)
        hints = {"classification": probe.level} if probe.level != LOW else {}
        filled = {"route": probe.route} if probe.route else hints  # the route alone raises it
        start = self.texts[probe.segment] if probe.segment else []
        crossed = 0
        for _ in range(2):  # the first use of a grant is a miss until it is durable (class A)
            text = start or [7_000] * 4 * BLOCK
            world.ask(probe.owner, [*text, *[1_000] * BLOCK], **filled)
            answer = world.ask(probe.reader, [*text, *[2_000] * BLOCK], **hints)
            crossed = answer.hit_tokens if isinstance(answer, Admission) else 0
            world.governor.settle()
            self.forget(world)
        return crossed

    def forget(self, world):
        """Let an hour pass, so that everything lapses and no hit of the next turn is the reader's own."""
        for _ in range(4):
            world.step(900 * 1_000_000)


@pytest.fixture(scope="module")
def deployment():
    return Deployment()


def plant(deployment, rng, count):
    """Return `count` leaks confirmed by the governor, each with its base policy; and the unconfirmed ones."""
    confirmed, unconfirmed = [], Counter()
    while len(confirmed) < count:
        base = cast(rng, deployment.declare)
        for mutant in leaks(rng, base):
            served = deployment.crossed_tokens(mutant.policy, mutant.probe)
            before = deployment.crossed_tokens(base.policy, mutant.probe)
            if served > 0 and before == 0:
                confirmed.append((base.policy, mutant))
            else:
                unconfirmed[mutant.kind] += 1
    return confirmed[:count], unconfirmed


def proof_of(base, policy):
    return prove(compile_policy(policy, revision=1), declared=base)


def check_leaks(deployment, seed, count):
    confirmed, unconfirmed = plant(deployment, random.Random(seed), count)
    assert not unconfirmed, unconfirmed
    missed = [mutant.kind for base, mutant in confirmed if proof_of(base, mutant.policy).holds]
    assert missed == []
    return Counter(mutant.kind for _, mutant in confirmed)


def check_safe(deployment, seed, count):
    rng = random.Random(seed)
    refused, seen = [], 0
    while seen < count:
        base = cast(rng, deployment.declare)
        for mutant in safe(rng, base)[: count - seen]:
            proof = proof_of(base.policy, mutant.policy)
            seen += 1
            if not proof.holds:
                refused.append((mutant.kind, [p.counterexample.text for p in proof.broken]))
    assert refused == [] and seen == count


def test_finds_planted_leaks_of_every_kind(deployment):
    kinds = check_leaks(deployment, seed=1, count=28)
    assert len(kinds) == 28


@pytest.mark.soak
def test_finds_two_hundred_planted_leaks(deployment):
    kinds = check_leaks(deployment, seed=2, count=200)
    assert sum(kinds.values()) == 200 and len(kinds) == 28


def test_accepts_safe_edits(deployment):
    check_safe(deployment, seed=3, count=44)


@pytest.mark.soak
def test_accepts_two_hundred_safe_edits(deployment):
    check_safe(deployment, seed=4, count=200)


def test_what_is_accepted_is_no_leak_in_the_governor(deployment):
    """Every probe of the leaks is repeated for every safe edit: none is served more than under the base policy."""
    rng = random.Random(5)
    base = cast(rng, deployment.declare)
    probes = rng.sample([mutant.probe for mutant in leaks(rng, base)], 8)
    for mutant in rng.sample(safe(rng, base), 8):
        for probe in probes:
            assert deployment.crossed_tokens(mutant.policy, probe) == 0, (mutant.kind, probe)


def test_positive_control_the_base_serves_what_it_opens(deployment):
    base = cast(random.Random(6), deployment.declare)
    may = 1_778_803_200_000_000
    assert deployment.crossed_tokens(base.policy, Probe(base.a, base.d, LOW, may)) > 0
    assert deployment.crossed_tokens(base.policy, Probe(base.a, base.b, LOW, may, None, "s1")) > 0
    assert deployment.crossed_tokens(base.policy, Probe(base.c, base.f, HIGH, may)) == 0


def test_counterexamples_are_requests_that_the_table_permits(deployment):
    rng = random.Random(7)
    base = cast(rng, deployment.declare)
    for mutant in leaks(rng, base):
        table = compile_policy(mutant.policy, revision=1)
        for found in prove(table, declared=base.policy).broken:
            example = found.counterexample
            assert found.id == "ISO-8" or example.request.decide(table).permitted
            assert example.text and found.broken >= 1


# Faults of the table itself: the compiler, the look-up, the obligations


def broken(table, **parts):
    return {found.id for found in prove(table, **parts).broken}


def test_a_table_that_lies_is_found(compiled):
    table = compiled()
    assert broken(table) == set()
    table._grants["globex", "acme"] = table._grants["labs", "acme"]
    assert broken(table) == {"ISO-1"}


def test_an_own_row_that_is_too_wide_is_found(compiled):
    table = compiled()
    row, reuse = list(table._own["globex"]), places(3)[Action.REUSE]
    inside = row[reuse[0][Scope.SESSION]]
    for scopes in reuse.values():
        for place in scopes.values():
            row[place] = inside
    table._own["globex"] = tuple(row)
    assert broken(table) == {"ISO-4", "ISO-7"}


def test_a_way_in_for_unlisted_tenants_is_found(compiled):
    table = compiled(("  default: {quota: {guaranteed: 1%, cap: 10%}, tenants_max: 20}\n", ""))
    assert broken(table) == set()
    table._unlisted = table._own["labs"]
    assert "ISO-6" in broken(table)


@pytest.mark.parametrize("call", ["_opened", "_own_decision"])
def test_a_compiler_that_forgets_forbids_is_found(compiled, monkeypatch, call):
    policy = compiled(
        ("labels: {region: [eu, us]}", "labels: {region: [eu, us]}"), ("at_most: mid", "at_most: high")
    ).policy
    real = compiler.RuleIndex.rulings

    def blind(self, *args, **kwargs):
        return {cell: r._replace(forbids=()) for cell, r in real(self, *args, **kwargs).items()}

    monkeypatch.setattr(compiler.RuleIndex, "rulings", blind)
    assert "ISO-4" in broken(compile_policy(policy, revision=1))


def test_a_strict_policy_that_shares_is_found(compiled):
    """No document says this (KVP604): an isolating profile whose table nevertheless has a grant."""
    table = compiled()
    strict = replace(table.policy, profile=type(table.policy.profile).STRICT)
    assert "ISO-5" in broken(table, declared=strict)


def test_looser_obligations_and_a_lowered_level_are_found(compiled):
    table = compiled()
    assert broken(compiled(("idle: 30m", "idle: 31m")), declared=table.policy) == {"ISO-9"}
    assert broken(compiled(("verify: 1/64", "verify: 1/65")), declared=table.policy) == {"ISO-9"}
    assert broken(compiled(('"*", as: mid', '"*", as: low')), declared=table.policy) == {"ISO-8"}
    assert broken(compiled(("idle: 30m", "idle: 29m")), declared=table.policy) == set()


LIMITED = (
    "low: {tiers: [host, nvme], encrypt: required}",
    "low: {tiers: [host, nvme], encrypt: required, absolute: 2h, within: 5m}",
)
OF_A_TENANT = ("globex: {scope", "globex: {offload: {low: {tiers: [host], encrypt: required}}, scope")
SOMEWHERE = (LIMITED[0], "low: {tiers: [remote], encrypt: required}")
PLAIN_HOST = ("mid: {tiers: [host], encrypt: none}", "mid: {tiers: [host], encrypt: required}")


@pytest.mark.parametrize(
    ("declared", "edits", "why"),
    [
        ([], [("high: never", "high: {tiers: [nvme], encrypt: required}")], "running"),
        ([], [("mid: {tiers: [host], encrypt: none}", "mid: {tiers: [host, nvme], encrypt: required}")], "absolute"),
        ([LIMITED], [("absolute: 2h", "absolute: 3h")], "absolute is `3h`, declared `2h`"),
        ([LIMITED], [("within: 5m", "within: 6m")], "within is `6m`, declared `5m`"),
        ([PLAIN_HOST], [tuple(reversed(PLAIN_HOST))], "in clear"),
        ([OF_A_TENANT], [("tiers: [host], encrypt: required}}", "tiers: [nvme], encrypt: required}}")], "absolute"),
        ([SOMEWHERE], [("encrypt: required}\n  mid", "encrypt: required, match: none}\n  mid")], "match `region`"),
    ],
)  # fmt: skip
def test_copies_that_may_not_be_where_they_are_are_found(compiled, declared, edits, why):
    """The counterexample names tenant, classification and tier; the declared policy itself is proved."""
    base = compiled(*declared)
    assert prove(base).holds
    found = {one.id: one for one in prove(compiled(*declared, *edits), declared=base.policy).broken}
    example = found["ISO-12"].counterexample
    assert why in example.text and set(example.data) == {"tenant", "classification", "tier"}
    assert prove(base, declared=compiled(*declared, *edits).policy).holds or "nvme" in example.text, "the stricter one"


@pytest.mark.parametrize(
    "fault",
    [
        lambda duty: duty._replace(absolute_us=duty.absolute_us + 1),
        lambda duty: duty._replace(within_us=duty.within_us + 1),
        lambda duty: duty._replace(running_us=duty.running_us + 1),
        lambda duty: duty._replace(encrypt=False),
        lambda duty: duty._replace(match=()),
    ],
    ids=["absolute", "within", "running", "encrypt", "match"],
)
def test_a_fault_in_what_workers_ask_is_found(compiled, monkeypatch, fault):
    """Obligations and decisions are right: only what a tier is told is wrong, and nothing else sees it."""
    table = compiled(LIMITED, ("mid: {tiers: [host], encrypt: none}", "mid: {tiers: remote, encrypt: required}"))
    assert broken(table) == set()
    real = Obligations.in_tier
    monkeypatch.setattr(Obligations, "in_tier", lambda self, tier: fault(real(self, tier)))
    assert broken(table) == {"ISO-12"}


def test_every_tenant_classification_and_tier_is_asked(compiled):
    table = compiled()
    (tiers,) = (one for one in prove(table).properties if one.id == "ISO-12")
    assert tiers.cells == (len(table.policy.tenants) + 2) * 3 * 4, "with two fresh tenants, and a tier of no name"
    assert tiers.permits == 15, "low on host and nvme, mid on host, for each of five tenants"


def test_what_the_authors_say_never_goes_to_a_tier(compiled):
    table = compiled()
    assert broken(table, never=[Never(level=2, tier=Tier.HOST), Never(tier=Tier.REMOTE)]) == set()
    assert broken(table, never=[Never(tier=Tier.NVME)]) == {"ISO-11"}
    assert broken(table, never=[Never("acme", level=1, tier=Tier.NVME)]) == set()
    (found,) = prove(table, never=[Never(owner="labs", level=1, tier=Tier.HOST)]).broken
    assert found.counterexample.data == {"tenant": "labs", "classification": "mid", "tier": "host"}


def test_what_the_authors_say_never(compiled):
    table = compiled()
    assert broken(table, never=[Never("globex", "acme")]) == set()
    assert broken(table, never=[Never("labs", "acme")]) == {"ISO-11"}
    assert broken(table, never=[Never(None, "acme", via=Via.SEGMENT)]) == {"ISO-11"}


def test_revoked_ids_open_nothing_and_are_proved_to(compiled):
    table = compiled(revoked=frozenset({"labs-reads-acme", "family", "agent"}))
    proof = prove(table)
    assert proof.holds and proof.revoked == ("agent", "family", "labs-reads-acme")
    assert broken(compiled(), declared=table.policy) == set()
    late = compiled()
    late.revoked = table.revoked
    assert broken(late) == {"ISO-1"}


@pytest.mark.parametrize("name", library.names())
def test_the_library_is_proved_and_the_proof_is_repeatable(name):
    proofs = [prove(compile_policy(library.load(name), revision=1)) for _ in range(2)]
    assert proofs[0].holds and json.dumps(proofs[0].data()) == json.dumps(proofs[1].data())
    data = proofs[0].data()
    assert [p["id"] for p in data["properties"]] == [name for name in PROPERTIES if name not in ("ISO-11", "ISO-14")]
    assert data["digest"] == data["table_digest"] and data["versions"]["kvcustody"]


def sized(tenants, grants, seed=1):
    """The library's policy with many tenants and random grants among them."""
    rng = random.Random(seed)
    base = library.load("regulated-saas")
    names = [f"t{i}" for i in range(tenants)]
    shares = []
    for i in range(grants):
        owner, reader = rng.sample(names, 2)
        start = rng.randint(20_400, 20_700)
        shares.append(Grant(f"g{i}", owner, reader, rng.randint(0, 3), start * DAY, (start + 90) * DAY, "x"))
    entries = tuple(replace(base.tenants[0], id=name) for name in names)
    return replace(base, tenants=entries, grants=tuple(shares), segments=(), classify=base.classify[:1])


def test_a_million_cells_of_forty_tenants_and_two_hundred_grants_cost_four_calls_each():
    table = compile_policy(sized(40, 200), revision=1)
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        proof = prove(table)
    finally:
        sys.setprofile(None)
    assert proof.holds and proof.searched.cells > 1_000_000 and proof.searched.absent_pairs == "each asked"
    assert calls < 4 * proof.searched.cells, f"{calls / proof.searched.cells:.1f} calls a cell"


def calls_of(document):
    """Return how many calls a proof and an empty difference take."""
    policy = load_policy(document, name="large.yaml")
    table = compile_policy(policy, revision=2)
    nothing = compile_policy(replace(policy, grants=()), revision=1)
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        assert prove(table).holds
        assert len(diff(nothing, table).openings) == len(policy.grants)
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.parametrize("tenants", [2, 40])
def test_what_grants_cost_grows_with_their_number(tenants):
    """Between two tenants each grant was asked at the edges of every other: sixteen times as much for four times."""
    few, many = (calls_of(large_policy(tenants, grants, windows=True)) for grants in (60, 240))
    assert many < 6 * few, f"{many / few:.1f} times as many calls for four times as many grants"


def test_grants_of_one_pair_that_overlap_are_looked_at_once_between_two_edges(monkeypatch):
    """Each was looked at for every level, scope and instant: a thousand took 13 s."""
    grants, seen = 60, []
    looked_at = specification._is_live

    def looked(grant, now_us):
        seen.append(grant)
        return looked_at(grant, now_us)

    monkeypatch.setattr(specification, "_is_live", looked)
    proof = prove(compile_policy(load_policy(nested_grants(grants), name="nested.yaml"), revision=1))
    between, by_name = (2 * grants + 1) * grants, 5 * 3 * len(LEVELS) * grants
    assert proof.holds and len(seen) <= between + by_name, len(seen)


@pytest.mark.parametrize("shift", [0, 1], ids=["sound", "control: an interval off"])
def test_a_long_timeline_is_searched_as_a_short_one_is_looked_through(monkeypatch, shift):
    table = compile_policy(load_policy(nested_grants(40), name="nested.yaml"), revision=1)
    asked = AccessRequest(Action.REUSE, "tenant-00001", "tenant-00000", 0, Scope.TENANT, Via.GRANT)
    named = [asked._replace(source=source) for source in (None, "g0", "g20", "g39", "nobody", "")]
    edges = {edge for start, end, *_ in table.timeline(asked) for edge in (start - 1, start, end - 1, end)}
    instants = [-1, *sorted(edges)]

    def answers():
        return [table.decide(request, at) for request in named for at in instants]

    searched = answers()
    monkeypatch.setattr(decision_table, "_SCANNED_MAX", 10**6)
    if shift:
        monkeypatch.setattr(
            table,
            "_grants",
            {pair: tuple(line[1:] for line in lines) for pair, lines in table._grants.items()},
        )
    assert (answers() == searched) is not bool(shift)


@pytest.mark.parametrize(("each", "bulk", "said"), [(0, 10**6, "in bulk"), (0, 0, "not each")])
def test_many_tenants_are_searched_another_way_with_the_same_verdict(compiled, monkeypatch, each, bulk, said):
    monkeypatch.setattr("kvcustody.policies.workbench.prove.prove.ABSENT_EACH_MAX", each)
    monkeypatch.setattr("kvcustody.policies.workbench.prove.prove.ABSENT_BULK_MAX", bulk)
    declared = compiled()
    assert prove(declared).holds and said in prove(declared).searched.absent_pairs
    for edit in (("reader: labs", "reader: globex"), ("tenants: [acme, labs]", 'tenants: "*"')):
        assert broken(compiled(edit), declared=declared.policy)
    gone = compiled(("until: 2027-03-31", "until: 2027-04-01"))
    assert broken(gone, declared=declared.policy) == {"ISO-1"}


def test_random_documents_are_proved():
    rng = random.Random(9)
    for _ in range(12):
        policy = load_policy(json.dumps(random_document(rng)), name="random.yaml")
        proof = prove(compile_policy(policy, revision=1))
        assert proof.holds, [found.counterexample.text for found in proof.broken]


# z3: the same question, tenants an uninterpreted sort, time and levels integers


def smt_leak(declared, running):
    """A cross-tenant request that `running` permits and `declared` does not, or None."""
    z3 = pytest.importorskip("z3")
    tenant = z3.DeclareSort("Tenant")
    names = {t.id: z3.Const(t.id, tenant) for p in (declared, running) for t in p.tenants}
    reader, owner = z3.Const("reader", tenant), z3.Const("owner", tenant)
    level, scope, action, via, now = z3.Ints("level scope action via now")
    solver = z3.Solver()
    solver.add(z3.Distinct(*names.values()), reader != owner, level >= 0, level < len(LEVELS), scope >= 0, scope <= 4)
    solver.add(action >= 0, action <= 6, via >= 1, via <= 2)

    def one_of(value, members):
        return z3.Or([value == member for member in members])

    def permits(policy):
        groups = {t.id: t.group for t in policy.tenants}
        admitted = one_of(reader, [names[t.id] for t in policy.tenants])
        opened = []
        for g in (*policy.grants, *policy.group_grants()):
            terms = [
                via == 1,
                action == 1,
                scope >= 2,
                level <= g.at_most,
                reader == names[g.reader],
                owner == names[g.owner],
            ]
            terms += [] if g.from_us is None else [now >= g.from_us]
            terms += [] if g.until_us is None else [now < g.until_us]
            opened.append(z3.And(terms))
        for s in policy.segments:
            who = admitted if s.tenants is None else one_of(reader, [names[t] for t in s.tenants])
            terms = [via == 2, one_of(action, (1, 2, 3)), scope >= 2, scope <= int(s.scope), level == s.level]
            terms += [owner == names[s.owner], who] + ([] if s.expires_us is None else [now < s.expires_us])
            opened.append(z3.And(terms))
        forbidden = []
        for r in policy.rules:
            if r.effect.value != "forbid":
                continue
            terms = [one_of(action, [int(a) for a in r.actions])]
            terms += [] if r.readers is None else [one_of(reader, [names[t] for t in r.readers])]
            terms += [] if r.owners is None else [one_of(owner, [names[t] for t in r.owners])]
            terms += [] if r.levels is None else [one_of(level, r.levels)]
            terms += [] if r.via is None else [one_of(via, [int(v) for v in r.via])]
            if r.relation is not None and r.relation.value == "owner":
                terms.append(z3.BoolVal(False))
            elif r.relation is not None:
                same = [(a, b) for a in groups for b in groups if a != b and groups[a] and groups[a] == groups[b]]
                terms.append(z3.Or([z3.And(reader == names[a], owner == names[b]) for a, b in same]))
            forbidden.append(z3.And(terms))
        return z3.And(z3.Or(opened), z3.Not(z3.Or(forbidden)))

    solver.add(permits(running), z3.Not(permits(declared)))
    verdict = solver.check()
    assert verdict in (z3.sat, z3.unsat)
    return solver.model() if verdict == z3.sat else None


def decides(kind):
    """z3 is only asked who may reach whose blocks, not how a request is classified."""
    return not kind.startswith("classify")


def check_smt(deployment, seed, bases):
    rng, compared = random.Random(seed), Counter()
    for _ in range(bases):
        base = cast(rng, deployment.declare)
        for mutant in (*leaks(rng, base), *safe(rng, base)):
            if decides(mutant.kind):
                ours = {found.id for found in proof_of(base.policy, mutant.policy).broken} - {
                    "ISO-8",
                    "ISO-9",
                }
                theirs = smt_leak(base.policy, mutant.policy)
                assert bool(ours) == (theirs is not None), (mutant.kind, ours, theirs)
                compared["leak" if ours else "safe"] += 1
    return compared


def test_z3_agrees(deployment):
    compared = check_smt(deployment, seed=11, bases=1)
    assert compared["leak"] >= 20 and compared["safe"] >= 15


@pytest.mark.soak
def test_z3_agrees_everywhere(deployment):
    compared = check_smt(deployment, seed=12, bases=10)
    assert sum(compared.values()) >= 400


def test_request_speaks_in_words():
    request = Request(Action.REUSE, "a", "b", 9, Scope.TENANT, Via.GRANT, 0, "g")
    assert request.text(("low",)) == "a: reuse b's 9 tenant blocks via grant through g at 1970-01-01"
