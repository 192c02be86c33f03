# ruff: noqa: E501 (one mutant a line reads as the table it is)
"""Single-edit mutants of a random policy: those that open something across tenants, and those that do not.

An operator gives the edited policy and the probe that should show the leak; the governor says whether it is one.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import NamedTuple

from kvcustody.policies.document.model import Grant, Policy, Relation, Rule, RuleEffect, Via
from kvcustody.policies.reading.fields import DATE
from kvcustody.policies.reading.load_policy import load_policy

DAY = 86_400_000_000
LOW, MID, HIGH = "low", "mid", "high"
LEVELS = (LOW, MID, HIGH)
SEGMENT_TOKENS = 72

_BASE = """\
schema: kvcustody/policy@1
name: family
profile: shared
scope: tenant
classifications: [low, mid, high]
classify:
  - {{tenant: "*", as: low}}
  - {{tenant: {c}, as: mid}}
  - {{tenant: {a}, route: /v1/hr/*, as: high}}
tenants:
  {a}: {{group: fam, quota: {{guaranteed: 10%, cap: 100%, borrow: true}}}}
  {b}: {{group: fam}}
  {c}: {{}}
  {d}: {{group: pair}}
  {e}: {{group: fam}}
  {f}: {{group: pair}}
groups:
  fam: {{share: true, at_most: low, from: 2026-02-01, until: 2026-09-01}}
  pair: {{share: false}}
segments:
  - id: s1
    owner: {a}
    tenants: [{a}, {b}]
    digest: "hmac:{s1}"
    tokens: 72
    classification: low
    expires: 2026-08-01
  - id: s2
    owner: {c}
    tenants: [{c}, {d}]
    digest: "hmac:{s2}"
    tokens: 72
    classification: high
    expires: 2026-08-01
grants:
  - {{id: g1, owner: {a}, reader: {d}, at_most: low, from: 2026-02-01, until: 2026-06-01, reason: test}}
  - {{id: g2, owner: {c}, reader: {f}, at_most: high, from: 2026-02-01, until: 2026-06-01, reason: test}}
  - {{id: g3, owner: {a}, reader: {b}, at_most: mid, from: 2026-02-01, until: 2026-10-01, reason: test}}
  - {{id: g4, owner: {c}, reader: {e}, at_most: mid, from: 2026-02-01, until: 2026-10-01, reason: test}}
rules:
  - {{id: own, effect: permit, action: reuse, when: {{reader: owner}}}}
  - {{id: no-high, effect: forbid, action: reuse, when: {{via: [grant, segment], classification: {{at_least: high}}}}}}
  - id: no-family-mid
    effect: forbid
    action: reuse
    when: {{reader: same-group, owner: {a}, via: grant, classification: mid}}
  - {{id: not-e, effect: forbid, action: [reuse, publish], when: {{reader: {e}, owner: {c}}}}}
retention:
  low:  {{idle: 30m, absolute: 8h, active_max: 8h}}
  mid:  {{idle: 30m, absolute: 8h, active_max: 8h}}
  high: {{idle: 30m, absolute: 8h, active_max: 8h}}
scrub: {{default: {{within: 1s, verify: 1/64}}}}
offload: {{low: never, mid: never, high: never}}
audit: {{on_outage: {{decisions: deny, lifecycle: spill, own_hits: aggregate}}}}
"""


class Probe(NamedTuple):
    """Who fills, who reads, at which classification, when, by which route, and after which segment."""

    owner: str
    reader: str
    level: str
    at_us: int
    route: str | None = None
    segment: str | None = None


class Mutant(NamedTuple):
    kind: str
    policy: Policy
    probe: Probe | None


class Cast(NamedTuple):
    """The six tenants of a base, by their part, and the base."""

    policy: Policy
    a: str
    b: str
    c: str
    d: str
    e: str
    f: str

    def grant(self, name):
        return next(grant for grant in self.policy.grants if grant.id == name)

    def edit(self, section, name, **changes):
        entries = getattr(self.policy, section)
        return replace(
            self.policy,
            **{section: tuple(replace(x, **changes) if x.id == name else x for x in entries)},
        )

    def without(self, section, name):
        return replace(self.policy, **{section: tuple(x for x in getattr(self.policy, section) if x.id != name)})


def cast(rng: random.Random, declare) -> Cast:
    """A base with its names shuffled; `declare(owner, segment)` gives a segment's digest."""
    names = dict(zip("abcdef", rng.sample([f"t{i}" for i in range(6)], 6), strict=True))
    digests = {"s1": declare(names["a"], "s1"), "s2": declare(names["c"], "s2")}
    return Cast(load_policy(_BASE.format(**names, **digests), name="family.yaml"), **names)


def date(text):
    return DATE.read(text)


MAY, JULY, FEBRUARY = (date(f"2026-0{m}-15") for m in (5, 7, 1))


def leaks(rng: random.Random, k: Cast) -> list[Mutant]:
    """Every way in which one edit opens something, with random targets and lengths."""
    later, earlier = rng.randint(1, 400) * DAY, rng.randint(1, 20) * DAY
    g1 = k.grant("g1")
    rule = {rule.id: rule for rule in k.policy.rules}
    pairs = [(o, r) for o in (k.a, k.b, k.d, k.f) for r in (k.f, k.d) if o != r and (o, r) != (k.a, k.d)]
    owner, reader = rng.choice(pairs)
    new = Grant("g9", owner, reader, rng.randint(0, 1), None, None, "planted")
    widened = rng.choice([{"levels": (0, 1)}, {"via": (Via.SEGMENT,)}, {"readers": (k.a,)}, {"owners": (k.d,)}])
    return [
        Mutant("grant-reader", k.edit("grants", "g1", reader=k.f), Probe(k.a, k.f, LOW, MAY)),
        Mutant("grant-owner", k.edit("grants", "g1", owner=k.f), Probe(k.f, k.d, LOW, MAY)),
        Mutant("grant-level", k.edit("grants", "g1", at_most=rng.choice([1, 2])), Probe(k.a, k.d, MID, MAY)),
        Mutant("grant-until", k.edit("grants", "g1", until_us=g1.until_us + later), Probe(k.a, k.d, LOW, g1.until_us)),
        Mutant("grant-until-none", k.edit("grants", "g1", until_us=None), Probe(k.a, k.d, LOW, g1.until_us)),
        Mutant("grant-from", k.edit("grants", "g1", from_us=g1.from_us - earlier), Probe(k.a, k.d, LOW, g1.from_us - 1)),
        Mutant("grant-from-none", k.edit("grants", "g1", from_us=None), Probe(k.a, k.d, LOW, g1.from_us - 1)),
        Mutant("grant-new", replace(k.policy, grants=(*k.policy.grants, new)), Probe(owner, reader, LOW, MAY)),
        Mutant("group-share", k.edit("groups", "pair", at_most=1), Probe(k.d, k.f, LOW, MAY)),
        Mutant("group-level", k.edit("groups", "fam", at_most=1), Probe(k.b, k.e, MID, MAY)),
        Mutant("group-until", k.edit("groups", "fam", until_us=None), Probe(k.b, k.e, LOW, date("2026-09-01"))),
        Mutant("group-from", k.edit("groups", "fam", from_us=None), Probe(k.b, k.e, LOW, FEBRUARY)),
        Mutant("group-join", k.edit("tenants", k.f, group="fam"), Probe(k.b, k.f, LOW, MAY)),
        Mutant("group-leave", k.edit("tenants", k.b, group=None), Probe(k.a, k.b, MID, MAY)),
        Mutant("segment-reader", k.edit("segments", "s1", tenants=(k.a, k.b, k.f)), Probe(k.a, k.f, LOW, MAY, None, "s1")),
        Mutant("segment-everyone", k.edit("segments", "s1", tenants=None), Probe(k.a, k.f, LOW, MAY, None, "s1")),
        Mutant("segment-expires", k.edit("segments", "s1", expires_us=None), Probe(k.a, k.b, LOW, date("2026-10-01"), None, "s1")),
        Mutant("segment-level", k.edit("segments", "s2", level=rng.choice([0, 1])), Probe(k.c, k.d, MID, MAY, None, "s2")),
        Mutant("rule-gone", k.without("rules", "no-high"), Probe(k.c, k.f, HIGH, MAY)),
        Mutant("rule-narrowed", k.edit("rules", "no-high", **widened), Probe(k.c, k.f, HIGH, MAY)),
        Mutant("rule-segment", k.edit("rules", "no-high", via=(Via.GRANT,)), Probe(k.c, k.d, HIGH, MAY, None, "s2")),
        Mutant("rule-relation", k.edit("rules", "no-family-mid", relation=Relation.OWNER), Probe(k.a, k.b, MID, MAY)),
        Mutant("rule-action", k.edit("rules", "not-e", actions=rule["not-e"].actions[1:]), Probe(k.c, k.e, MID, MAY)),
        Mutant("rule-reader", k.edit("rules", "not-e", readers=(rng.choice([k.a, k.b]),)), Probe(k.c, k.e, MID, MAY)),
        Mutant("rule-effect", k.edit("rules", "not-e", effect=RuleEffect.PERMIT), Probe(k.c, k.e, MID, MAY)),
        Mutant("classify-route", replace(k.policy, classify=k.policy.classify[:2]), Probe(k.a, k.d, LOW, MAY, "/v1/hr/x")),
        Mutant("classify-lower", _route_level(k, 0), Probe(k.a, k.d, LOW, MAY, "/v1/hr/x")),
        Mutant("classify-pattern", _route_pattern(k, "/v1/hr/*/*"), Probe(k.a, k.d, LOW, MAY, "/v1/hr")),
    ]  # fmt: skip


def _route_level(k, level):
    *rest, route = k.policy.classify
    return replace(k.policy, classify=(*rest, replace(route, level=level)))


def _route_pattern(k, pattern):
    *rest, route = k.policy.classify
    return replace(k.policy, classify=(*rest, replace(route, route=pattern)))


def safe(rng: random.Random, k: Cast) -> list[Mutant]:
    """Every way in which one edit opens nothing."""
    g1 = k.grant("g1")
    cut = rng.randint(1, 60) * DAY
    forbid = Rule("r9", RuleEffect.FORBID, (rng.choice(list(k.policy.rules[1].actions)),), (k.d,), None, None, None,
                  rng.choice([None, (Via.GRANT,)]), "")  # fmt: skip
    own = replace(k.policy.rules[0], id="own", actions=(*k.policy.rules[0].actions, 5))
    retention = tuple(replace(r, idle_us=r.idle_us // 2) for r in k.policy.retention)
    shuffled = {name: tuple(rng.sample(getattr(k.policy, name), len(getattr(k.policy, name))))
                for name in ("rules", "grants", "segments", "tenants", "groups")}  # fmt: skip
    policies = {
        "grant-gone": k.without("grants", rng.choice(["g1", "g2", "g3", "g4"])),
        "grant-until": k.edit("grants", "g1", until_us=g1.until_us - cut),
        "grant-from": k.edit("grants", "g1", from_us=g1.from_us + cut),
        "grant-level": k.edit("grants", "g3", at_most=0),
        "grant-reason": k.edit("grants", "g1", reason=f"renewed {rng.random()}"),
        "group-closed": k.edit("groups", "fam", at_most=None),
        "group-until": k.edit("groups", "fam", until_us=date("2026-09-01") - cut),
        "group-leave": k.edit("tenants", k.e, group=None),
        "segment-gone": k.without("segments", rng.choice(["s1", "s2"])),
        "segment-reader": k.edit("segments", "s1", tenants=(k.a,)),
        "segment-expires": k.edit("segments", "s1", expires_us=date("2026-08-01") - cut),
        "rule-forbid": replace(k.policy, rules=(*k.policy.rules, forbid)),
        "rule-wider": k.edit("rules", "no-high", levels=(1, 2)),
        "rule-all-ways": k.edit("rules", "no-high", via=None),
        "rule-own": replace(k.policy, rules=(own, *k.policy.rules[1:])),
        "rule-permit-gone": k.without("rules", "own"),
        "classify-higher": replace(k.policy, classify=(replace(k.policy.classify[0], level=1), *k.policy.classify[1:])),
        "classify-route": _route_pattern(k, "/v1/*"),
        "retention": replace(k.policy, retention=retention),
        "quota": k.edit("tenants", k.a, cap=k.policy.tenants[0].guaranteed),
        "order": replace(k.policy, **shuffled),
        "texts": replace(k.policy, name="renamed", description=f"edition {rng.random()}"),
    }
    return [Mutant(kind, policy, None) for kind, policy in policies.items()]
