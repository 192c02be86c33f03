"""Documents of many tenants and grants, as one author could write them."""

from __future__ import annotations

import datetime as dt
import random

LEVELS = ("public", "internal", "confidential")
_HEAD = """schema: kvcustody/policy@1
name: large
profile: shared
scope: tenant
classifications: [public, internal, confidential, restricted]
labels: {region: [eu, us]}
classify:
  - {tenant: "*", as: internal}
  - {tenant: "*", route: /v1/hr/*, as: confidential}
"""
_TAIL = """rules:
  - {id: own-scope, effect: permit, action: reuse, when: {reader: owner}}
  - {id: own-administration, effect: permit, action: [administer, export], when: {reader: owner}}
  - {id: no-restricted, effect: forbid, action: [reuse, offload, export], when: {classification: restricted}}
retention:
  public:       {idle: 24h, absolute: 7d, active_max: 2h}
  internal:     {idle: 30m, absolute: 8h, active_max: 2h}
  confidential: {idle: 5m,  absolute: 1h, active_max: 1h}
  restricted:   {idle: 0s,  absolute: 0s, active_max: 15m}
scrub:
  default:      {within: 1s, verify: 1/64}
offload:
  public:       never
  internal:     never
  confidential: never
  restricted:   never
audit:
  on_outage: {decisions: deny, lifecycle: spill, own_hits: aggregate}
"""


def large_policy(tenants: int, grants: int, *, group: bool = False, windows: bool = False, seed: int = 1) -> str:
    """A document of so many tenants, and grants between any two of them for 90 days.

    `group`: all tenants are one sharing group. `windows`: the grants begin in years of days, and last up to one.
    """
    rng = random.Random(seed)
    names = [f"tenant-{number:05d}" for number in range(tenants)]
    of = "group: family, " if group else ""
    quota = "quota: {guaranteed: 0.001%, cap: 20%}, labels: {region: eu}"
    lines = [f"  {name}: {{{of}{quota}}}" for name in names]
    if group:
        lines.append("groups:\n  family: {share: true, at_most: public, until: 2027-03-31, reason: test}")
    lines += ["grants:"] if grants else []
    for number in range(grants):
        owner, reader = rng.sample(names, 2)
        first = rng.randrange(3_000 if windows else 300)
        span = f"from: {_day(first)}, until: {_day(first + (rng.randrange(1, 360) if windows else 90))}"
        parties = f"id: g{number}, owner: {owner}, reader: {reader}, at_most: {rng.choice(LEVELS)}"
        lines.append(f"  - {{{parties}, {span}, reason: test}}")
    return "\n".join([_HEAD + "tenants:", *lines, _TAIL])


def nested_grants(grants: int) -> str:
    """A document of two tenants, and so many grants of one pair of which each begins before the first one ends."""
    lines = [
        "  tenant-00000: {quota: {guaranteed: 1%, cap: 20%}}",
        "  tenant-00001: {quota: {guaranteed: 1%, cap: 20%}}",
    ]
    lines.append("grants:")
    for number in range(grants):
        parties = f"id: g{number}, owner: tenant-00000, reader: tenant-00001, at_most: {LEVELS[number % 3]}"
        span = f"from: {_day(number)}, until: {_day(number + grants)}"
        lines.append(f"  - {{{parties}, {span}, reason: test}}")
    return "\n".join([_HEAD + "tenants:", *lines, _TAIL])


def _day(number: int) -> str:
    return (dt.date(2026, 1, 1) + dt.timedelta(days=number)).isoformat()
