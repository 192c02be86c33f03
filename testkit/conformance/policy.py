"""The policy for the cases: short times, four tenants, and one grant that can be given and revoked."""

from __future__ import annotations

SECOND_US = 1_000_000
IDLE_US = 20 * SECOND_US
ABSOLUTE_US = 60 * SECOND_US
WITHIN_US = SECOND_US
ONCE = "/v1/once"  # the route whose classification is never cached

_TEXT = """\
schema: kvcustody/policy@1
name: conformance
profile: shared
scope: {scope}
classifications: [low, once]
classify:
  - {{tenant: "*", as: low}}
  - {{tenant: "*", route: /v1/once, as: once}}
tenants:
  alpha: {{quota: {{guaranteed: 25%, cap: 75%, borrow: true}}}}
  beta:  {{quota: {{guaranteed: 25%, cap: 75%, borrow: true}}}}
  gamma: {{quota: {{guaranteed: 0%, cap: 25%}}}}
  delta: {{quota: {{guaranteed: 0%, cap: 25%}}}}
{grants}
rules:
  - {{id: own, effect: permit, action: [reuse, export], when: {{reader: owner}}}}
retention:
  low:  {{idle: {idle}, absolute: 60s, active_max: 10m}}
  once: {{idle: 0s, absolute: 0s, active_max: 10m}}
scrub:
  default: {{within: 1s, verify: all}}
offload: {{low: {offload}, once: never}}
audit:
  on_outage: {{decisions: deny, lifecycle: spill, own_hits: aggregate}}
eviction: {{policy: lru}}
"""
_GRANT = """\
grants:
  - {id: beta-reads-alpha, owner: alpha, reader: beta, at_most: low, until: 2099-01-01, reason: "conformance"}
"""


def policy(*, scope: str = "subject", grant: bool = False, idle: str = "20s", tier: bool = False) -> str:
    """Return the policy's YAML. `scope`: subject or tenant. `grant`: beta may read alpha's tenant-level blocks. `tier`:
    blocks may go to the host tier.
    """
    offload = "{tiers: [host], encrypt: none}" if tier else "never"
    return _TEXT.format(scope=scope, grants=_GRANT if grant else "", idle=idle, offload=offload)
