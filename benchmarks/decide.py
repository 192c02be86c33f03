"""Time of one policy decision: the compiled table, against interpreting the rules, at several policy sizes.

    python benchmarks/decide.py [--json FILE]

Both sides answer the same requests in one process, interleaved; the figure is the median over repetitions,
the measuring loop included. The interpreted side walks the rules, grants and segments of the typed form.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from kvcustody.policies.document.model import Action, Policy, Relation, RuleEffect, Scope, Via
from kvcustody.policies.reading.load_policy import load_policy
from kvcustody.policies.table.compile import compile_policy
from kvcustody.policies.table.decision_table import DecisionTable
from kvcustody.policies.table.model import AccessColumns, AccessRequest

sys.path.insert(0, str(Path(__file__).resolve().parent / "harness"))

from bench import Bench, alternate

NOW = 1_790_000_000_000_000
REPETITIONS = 41
CALLS = 2_000

HEAD = """\
schema: kvcustody/policy@1
name: sized
profile: shared
classifications: [public, internal, confidential, restricted]
retention:
  public: {idle: 1d, absolute: 7d, active_max: 2h}
  internal: {idle: 30m, absolute: 8h, active_max: 2h}
  confidential: {idle: 5m, absolute: 1h, active_max: 1h}
  restricted: {idle: 0s, absolute: 0s, active_max: 15m}
scrub: {default: {within: 1s, verify: all}}
offload: {public: never, internal: never, confidential: never, restricted: never}
audit: {on_outage: {decisions: deny, lifecycle: spill, own_hits: aggregate}}
"""


def sized(rules: int, tenants: int) -> Policy:
    """A policy of this many rules and tenants, with a segment and a grant from each tenant to the next."""
    names = [f"tenant-{i}" for i in range(tenants)]
    lines = [HEAD, "tenants:\n", *(f"  {name}: {{}}\n" for name in names), "  default: {}\n", "grants:\n"]
    for i, name in enumerate(names):
        reader = names[(i + 1) % tenants]
        lines.append(f"  - {{id: g{i}, owner: {name}, reader: {reader}, at_most: internal,")
        lines.append(" until: 2027-03-31, reason: benchmark}\n")
    lines.append("segments:\n")
    for i, name in enumerate(names):
        lines.append(f"  - {{id: s{i}, owner: {name}, tenants: [{name}, {names[(i + 1) % tenants]}],")
        lines.append(f" digest: 'hmac:{'0' * 64}', tokens: 512, classification: public, expires: 2027-03-31}}\n")
    lines.append("rules:\n  - {id: own, effect: permit, action: reuse, when: {reader: owner}}\n")
    for i in range(rules - 1):
        reader = names[i % tenants]
        lines.append(f"  - {{id: r{i}, effect: forbid, action: [reuse, export],")
        lines.append(f" when: {{reader: {reader}, classification: restricted}}}}\n")
    return load_policy("".join(lines), name="sized.yaml")


def interpret(policy: Policy, request: AccessRequest) -> bool:
    """Whether a reuse request is permitted, by walking the policy."""
    action, reader, owner, level, scope, via, _ = request
    now = NOW
    if via is Via.OWN:
        opened = reader == owner and scope <= policy.scope
    elif via is Via.GRANT:
        opened = scope >= Scope.TENANT and any(
            grant.owner == owner
            and grant.reader == reader
            and level <= grant.at_most
            and (grant.from_us is None or grant.from_us <= now)
            and (grant.until_us is None or now < grant.until_us)
            for grant in policy.grants
        )
    else:
        opened = any(
            segment.owner == owner
            and (segment.tenants is None or reader in segment.tenants)
            and level == segment.level
            and Scope.TENANT <= scope <= segment.scope
            and (segment.expires_us is None or now < segment.expires_us)
            for segment in policy.segments
        )
    permitted = via is not Via.OWN
    for rule in policy.rules if opened else ():
        if (
            action in rule.actions
            and (rule.levels is None or level in rule.levels)
            and (rule.via is None or via in rule.via)
            and (rule.readers is None or reader in rule.readers)
            and (rule.owners is None or owner in rule.owners)
            and (rule.relation is not Relation.OWNER or reader == owner)
        ):
            if rule.effect is RuleEffect.FORBID:
                return False
            permitted = True
    return opened and permitted


def requests(kind: str, tenants: int, count: int) -> list[AccessRequest]:
    """Reuse requests of one kind; one in ten is denied."""
    rng = random.Random(5)
    asks: list[AccessRequest] = []
    for _ in range(count):
        i, off = rng.randrange(tenants), rng.random() < 0.1
        name, following = f"tenant-{i}", f"tenant-{(i + 1) % tenants}"
        if kind == "own":
            asks.append(AccessRequest(Action.REUSE, name, name, 3 if off else 1, Scope.SUBJECT, Via.OWN))
        elif kind == "unlisted":
            who = f"key-{rng.randrange(1_000)}"
            asks.append(AccessRequest(Action.REUSE, who, who, 1, Scope.TENANT if off else Scope.SUBJECT, Via.OWN))
        elif kind == "grant":
            asks.append(AccessRequest(Action.REUSE, following, name, 3 if off else 1, Scope.TENANT, Via.GRANT))
        else:
            asks.append(AccessRequest(Action.REUSE, following, name, 1 if off else 0, Scope.TENANT, Via.SEGMENT))
    return asks


def nanoseconds(call: Callable[[AccessRequest], object], asked: list[AccessRequest]) -> float:
    """Nanoseconds for one call, the loop around it included."""
    started = time.perf_counter_ns()
    for request in asked:
        call(request)
    return (time.perf_counter_ns() - started) / len(asked)


def measure(table: DecisionTable, kind: str, tenants: int) -> tuple[float, float]:
    """(compiled, interpreted) median nanoseconds for a decision, repetitions interleaved."""
    asked = requests(kind, tenants, CALLS)
    decide, policy = table.decide, table.policy
    for request in asked:
        assert decide(request, NOW).permitted == interpret(policy, request), request
    few = asked[: max(20, CALLS // max(1, len(policy.rules) // 10))]
    taken = alternate(
        {
            "compiled": lambda: nanoseconds(lambda request: decide(request, NOW), asked),
            "interpreted": lambda: nanoseconds(lambda request: interpret(policy, request), few),
        },
        REPETITIONS,
    )
    return statistics.median(taken["compiled"]), statistics.median(taken["interpreted"])


def measure_many(table: DecisionTable, tenants: int) -> float:
    """Nanoseconds a decision in one `permits` call over 10,000 mixed requests, tenants interned before."""
    asked = [r for kind in ("own", "grant", "segment", "unlisted") for r in requests(kind, tenants, 2_500)]
    batch = table.batch()
    readers, owners = batch.intern([r[1] for r in asked], [r[2] for r in asked])
    columns = [np.array([r[i] for r in asked], dtype=np.int64) for i in (0, 3, 4, 5)]
    taken = []
    for _ in range(REPETITIONS):
        started = time.perf_counter_ns()
        mask = batch.permits(AccessColumns(columns[0], readers, owners, *columns[1:]), NOW)
        taken.append((time.perf_counter_ns() - started) / len(asked))
    assert mask.tolist() == [table.decide(request, NOW).permitted for request in asked]
    return statistics.median(taken)


def main() -> None:
    """Measure and print a table."""
    bench = Bench(__doc__, "kvcustody", "numpy")
    bench.parse()
    rows = []
    print(f"{'rules':>6} {'tenants':>7} {'kind':>9} {'table ns':>9} {'walk ns':>10} {'ratio':>8}")
    for rules, tenants in ((10, 5), (100, 50), (1_000, 200)):
        started = time.perf_counter()
        table = compile_policy(sized(rules, tenants), revision=1)
        ready = time.perf_counter() - started
        for kind in ("own", "unlisted", "grant", "segment"):
            compiled, interpreted = measure(table, kind, tenants)
            rows.append(
                {
                    "rules": rules,
                    "tenants": tenants,
                    "kind": kind,
                    "table_ns": compiled,
                    "walk_ns": interpreted,
                }
            )
            ratio = compiled / interpreted
            print(f"{rules:>6} {tenants:>7} {kind:>9} {compiled:>9.0f} {interpreted:>10.0f} {ratio:>8.4f}")
        many = measure_many(table, tenants)
        rows.append({"rules": rules, "tenants": tenants, "kind": "many", "table_ns": many, "ready_s": ready})
        print(f"{rules:>6} {tenants:>7} {'many':>9} {many:>9.0f}   (load and compile {ready:.3f} s)")
    bench.keep({"rows": rows})


if __name__ == "__main__":
    main()
