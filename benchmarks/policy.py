"""What the policy workbench costs, and whether a decision costs more under a longer policy.

    python benchmarks/policy.py [--json FILE]

Sizes are in CPU seconds of this process: validate, compile and lint of 1,000 rules and 200 tenants; loading 10,000
tenants and 2,500 grants; the proof of 40 tenants and 200 grants, and of up to 5,000 grants of one pair, of which 60 or
all are live at a time. Decisions under 10 and under 1,000 rules take turns
over the same requests of the same tenants, and the median of the ratios of each pair of turns is the figure: what else
runs on the machine slows both alike.
"""

from __future__ import annotations

import itertools
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from kvcustody.policies import library
from kvcustody.policies.document.model import Grant, Policy, Scope
from kvcustody.policies.reading.load_policy import load_policy
from kvcustody.policies.table.compile import compile_policy
from kvcustody.policies.table.model import AccessRequest
from kvcustody.policies.workbench.lint.lint import lint
from kvcustody.policies.workbench.prove.prove import prove

sys.path.insert(0, str(Path(__file__).resolve().parent / "harness"))

from bench import Bench, alternate
from decide import HEAD, NOW, requests, sized

RULES, TENANTS, TURNS, CALLS = 1_000, 200, 301, 2_000
TENANTS_MAX = 10_000  # as many as a policy may list
DAY_US = 86_400_000_000


def mixed(rules: int, tenants: int) -> str:
    """A policy text whose rules differ in effect, actions, readers, owners, levels and ways."""
    rng = random.Random(1)
    names = [f"tenant-{i:03d}" for i in range(tenants)]
    lines = [HEAD, "classify:", '  - {tenant: "*", as: internal}', "tenants:"]
    lines += [f"  {name}: {{quota: {{guaranteed: 0.4%, cap: 20%}}}}" for name in names]
    lines.append("grants:")
    for i in range(tenants):
        owner, reader = rng.sample(names, 2)
        parties = f"id: g{i}, owner: {owner}, reader: {reader}"
        lines.append(f"  - {{{parties}, at_most: internal, until: 2027-03-31, reason: benchmark}}")
    lines += ["rules:", "  - {id: own, effect: permit, action: reuse, when: {reader: owner}}"]
    for i in range(rules - 1):
        a, b, c = rng.sample(names, 3)
        kinds = (
            f"permit, action: [reuse, export], when: {{reader: [{a}, {b}, {c}], classification: internal}}",
            f"forbid, action: reuse, when: {{reader: {a}, owner: {b}, via: grant}}",
            f"forbid, action: [offload, export], when: {{owner: [{a}, {b}], classification: restricted}}",
        )
        lines.append(f"  - {{id: r{i}, effect: {kinds[i % 3]}}}")
    return "\n".join(lines) + "\n"


def many(tenants: int) -> str:
    """A policy text of many tenants, with a quota each and a grant for every fourth."""
    names = [f"tenant-{i:05d}" for i in range(tenants)]
    lines = [HEAD, "classify:", '  - {tenant: "*", as: internal}', "tenants:"]
    lines += [f"  {name}: {{quota: {{guaranteed: 0.001%, cap: 20%}}}}" for name in names]
    lines.append("grants:")
    for owner, reader in list(itertools.pairwise(names))[::4]:
        parties = f"id: g-{owner}, owner: {owner}, reader: {reader}"
        lines.append(f"  - {{{parties}, at_most: internal, until: 2027-03-31, reason: benchmark}}")
    return "\n".join(lines) + "\n"


def of_one_pair(grants: int, days: int) -> Policy:
    """The library's policy with two tenants and so many grants between them, one begun each day, of so many days."""
    base = library.load("regulated-saas")
    made = tuple(
        Grant(f"g{i}", "tenant-a", "tenant-b", i % 3, (20_400 + i) * DAY_US, (20_400 + i + days) * DAY_US, "x")
        for i in range(grants)
    )
    entries = tuple(replace(base.tenants[0], id=name, scope=Scope.TENANT) for name in ("tenant-a", "tenant-b"))
    return replace(base, tenants=entries, grants=made, segments=(), classify=base.classify[:1])


def shared(tenants: int, grants: int) -> Policy:
    """The library's policy with many tenants and random dated grants among them."""
    rng = random.Random(2)
    base = library.load("regulated-saas")
    names = [f"tenant-{i:03d}" for i in range(tenants)]
    new_grants = []
    for i in range(grants):
        owner, reader = rng.sample(names, 2)
        start = rng.randint(20_400, 20_700)
        new_grants.append(Grant(f"g{i}", owner, reader, rng.randint(0, 3), start * DAY_US, (start + 90) * DAY_US, "x"))
    entries = tuple(replace(base.tenants[0], id=name) for name in names)
    return replace(base, tenants=entries, grants=tuple(new_grants), segments=(), classify=base.classify[:1])


def cpu_seconds(call: Callable[[], Any], repetitions: int) -> tuple[float, Any]:
    """(median CPU seconds, the last result)."""
    taken = []
    for _ in range(repetitions):
        started = time.process_time()
        result = call()
        taken.append(time.process_time() - started)
    return statistics.median(taken), result


def workbench() -> dict[str, float]:
    """CPU seconds of each step."""
    text = mixed(RULES, TENANTS)
    validate_s, policy = cpu_seconds(lambda: load_policy(text, name="mixed.yaml"), 5)
    largest = many(TENANTS_MAX)
    largest_s, _ = cpu_seconds(lambda: load_policy(largest, name="largest.yaml"), 5)
    compile_s, table = cpu_seconds(lambda: compile_policy(policy, revision=1), 5)
    lint_s, findings = cpu_seconds(lambda: lint(table, now_us=NOW), 5)
    proved = compile_policy(shared(40, 200), revision=1)
    prove_s, proof = cpu_seconds(lambda: prove(proved), 3)
    assert proof.holds and findings
    pairs = {
        f"prove_{grants}_of_one_pair_{days}_days_s": cpu_seconds(
            partial(prove, compile_policy(of_one_pair(grants, days), revision=1)), 1
        )
        for grants, days in ((1_000, 60), (1_000, 1_000), (5_000, 60))
    }
    assert all(of_pair.holds for _, of_pair in pairs.values())
    return {
        "validate_s": validate_s,
        "largest_s": largest_s,
        "compile_s": compile_s,
        "lint_s": lint_s,
        "together_s": validate_s + compile_s + lint_s,
        "prove_s": prove_s,
        "prove_cells": proof.searched.cells,
        **{name: seconds for name, (seconds, _) in pairs.items()},
    }


def cpu_nanoseconds(decide: Callable[..., object], asked: list[AccessRequest]) -> float:
    """CPU nanoseconds for one decision, the loop around it included."""
    started = time.process_time_ns()
    for request in asked:
        decide(request, NOW)
    return (time.process_time_ns() - started) / len(asked)


def decisions() -> dict[str, dict[str, float]]:
    """By kind of request: nanoseconds under few and many rules, and the median ratio of pairs of turns."""
    few, many = (compile_policy(sized(rules, TENANTS), revision=1).decide for rules in (10, RULES))
    by_kind = {}
    for kind in ("own", "unlisted", "grant", "segment"):
        asked = requests(kind, TENANTS, CALLS)
        sides = {"few": partial(cpu_nanoseconds, few, asked), "many": partial(cpu_nanoseconds, many, asked)}
        taken = alternate(sides, TURNS)
        by_kind[kind] = {
            "few_ns": statistics.median(taken["few"]),
            "many_ns": statistics.median(taken["many"]),
            "ratio": statistics.median(two / one for one, two in zip(*taken.values(), strict=True)),
        }
    return by_kind


def main() -> None:
    """Measure, print, and write the figures."""
    bench = Bench(__doc__, "kvcustody", "PyYAML")
    bench.parse()
    costs, asked = workbench(), decisions()
    for name, value in costs.items():
        print(f"{name:>12} {value:.3f}" if name.endswith("_s") else f"{name:>12} {value:,}")
    for kind, row in asked.items():
        print(f"{kind:>12} {row['few_ns']:.0f} ns under 10 rules, {row['many_ns']:.0f} under 1,000: {row['ratio']:.3f}")
    settings = {"rules": RULES, "tenants": TENANTS, "turns": TURNS, "calls": CALLS}
    bench.keep({"benchmark": "policy", "settings": settings, "workbench": costs, "decisions": asked})


if __name__ == "__main__":
    main()
