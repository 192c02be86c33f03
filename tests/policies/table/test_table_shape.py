"""Deciding costs the same whatever the policy's size: shown by counting executed steps, not by timing."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from kvcustody.policies.document.model import Action, Scope, Via
from kvcustody.policies.reading.load_policy import load_policy
from kvcustody.policies.table.compile import compile_policy
from kvcustody.policies.table.decision_table import places
from kvcustody.policies.table.model import AccessColumns, AccessRequest
from kvcustody.times import iso
from standins import builders

NOW = 1_790_000_000_000_000


def sized(base, rules, tenants):
    """The base policy with more tenants, more rules that name them, and a grant to each."""
    names = [f"x{i}" for i in range(tenants)]
    text = base.replace("tenants:\n", "tenants:\n" + "".join(f"  {name}: {{}}\n" for name in names), 1)
    more = "".join(
        f"  - {{id: rule{i}, effect: forbid, action: export, when: {{reader: {names[i % tenants]}}}}}\n"
        for i in range(rules)
    )
    grants = "".join(
        f"  - {{id: to-{name}, owner: acme, reader: {name}, at_most: low, until: 2027-01-01, reason: x}}\n"
        for name in names
    )
    text = text.replace("rules:\n", "rules:\n" + more, 1).replace("grants:\n", "grants:\n" + grants, 1)
    return compile_policy(load_policy(text, name="sized.yaml"), revision=1)


def steps(table, request):
    """Return the number of bytecodes executed in our own frames for one decision."""
    count = 0

    def trace(frame, event, arg):
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        table.decide(request, NOW)
    finally:
        sys.settrace(before)
    return count


REQUESTS = {
    "own": AccessRequest(Action.REUSE, "acme", "acme", 0, Scope.SUBJECT, Via.OWN),
    "grant": AccessRequest(Action.REUSE, "labs", "acme", 1, Scope.TENANT, Via.GRANT),
    "segment": AccessRequest(Action.REUSE, "labs", "acme", 0, Scope.TENANT, Via.SEGMENT),
    "unlisted": AccessRequest(Action.REUSE, "stranger", "stranger", 0, Scope.SUBJECT, Via.OWN),
    "denied": AccessRequest(Action.REUSE, "globex", "acme", 0, Scope.TENANT, Via.GRANT),
}


@pytest.fixture(scope="module")
def small(base):
    return sized(base, rules=1, tenants=1)


@pytest.fixture(scope="module")
def large(base):
    return sized(base, rules=1_000, tenants=200)


@pytest.mark.parametrize("request_", REQUESTS.values(), ids=REQUESTS)
def test_steps_do_not_depend_on_the_number_of_rules(small, large, request_):
    taken = steps(small, request_)
    assert 0 < taken == steps(large, request_) < 120
    assert small.decide(request_, NOW).effect is large.decide(request_, NOW).effect


def test_equal_cells_are_shared(large):
    """200 tenants are not 200 times the decisions: rows differ only where a rule or admission names the tenant."""
    acme, labs = (dict(enumerate(large._own[name])) for name in ("acme", "labs"))
    admission = len(large.policy.classifications) * len(Scope)
    assert all(acme[place] is labs[place] for place in acme if place >= admission)
    assert len({id(cell) for row in large._own.values() for cell in row}) < 2 * (1_000 + 200)


def test_places_are_every_cell_once(large):
    levels = range(len(large.policy.classifications))
    cells = [places(len(levels))[a][level][s] for a in Action for level in levels for s in Scope]
    assert cells == list(range(len(large._own["acme"])))


@pytest.mark.parametrize("grants", [1, 2, 16, 17, 40])
def test_a_grant_among_many_of_one_pair_answers_while_it_is_open(grants):
    """Windows overlap: a piece of time has up to `grants` live sources, in a dict or searched (`ManySources`)."""
    day, first = 86_400_000_000, 1_767_225_600_000_000  # 2026-01-01
    windows = {f"g{i:02}": (first + i * day, first + (i + grants) * day) for i in range(grants)}
    sections = ", ".join(
        f"{{id: {name}, owner: holder, reader: reader, at_most: low, reason: x, "
        f"from: {iso(start)[:10]}, until: {iso(end)[:10]}}}"
        for name, (start, end) in windows.items()
    )
    table = compile_policy(load_policy(builders.policy(more=f"grants: [{sections}]"), name="many.yaml"), revision=1)
    [timeline, *_] = table.timelines("reader", "holder")
    assert max(len(list(piece.sources)) for piece in timeline) == grants
    for now in sorted({edge + off for window in windows.values() for edge in window for off in (-1, 0)}):
        for source in (*windows, "g", "zz"):
            start, end = windows.get(source, (0, 0))
            asked = AccessRequest(Action.REUSE, "reader", "holder", 0, Scope.TENANT, Via.GRANT, source)
            decision = table.decide(asked, now)
            is_open = start <= now < end
            assert (decision.permitted, decision.reasons, decision.errors) == (
                is_open,
                (source,) if is_open else ("default-deny",),
                (),
            )


@pytest.mark.parametrize("name", ["", "x" * 300, 7])
def test_a_name_that_no_tenant_has_is_denied_in_bulk_as_alone(base, name) -> None:
    """The same reader by a name of the policy is permitted: the control."""
    table = compile_policy(load_policy(base, name="base.yaml"), revision=1)
    owners = ["acme", "acme"]
    asked = AccessColumns(
        np.array([Action.REUSE] * 2), ["acme", name], owners, np.array([0, 0]), np.array([Scope.SESSION] * 2),
        np.array([Via.OWN] * 2),
    )  # fmt: skip
    assert table.decide_many(asked, NOW).tolist() == [True, False]
