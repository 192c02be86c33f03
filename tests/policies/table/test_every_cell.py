"""All of B1: every cell of a compiled table, at both sides of every date, against the reference.

The random requests of `test_decide_reference.py` find unexpected cases; this test leaves out nothing that a table
holds. Cells are counted where they are stored (own rows, timelines of grants and segments). So a cell that is never
reached fails the test. So does a kind of rule, or a threshold, that decides nothing in the run.
"""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter

import pytest

from kvcustody.policies.document.model import Action, Scope
from kvcustody.policies.reading.load_policy import load_policy
from kvcustody.policies.table.compile import compile_policy
from kvcustody.policies.table.decision_table import places
from kvcustody.policies.table.model import UNLISTED
from standins.policies.decide_reference import SCOPES, VIAS, WORDS, call, random_document, reference

NOON = 1_780_000_000_000_000
OPEN = {"own": WORDS, "grant": ["reuse"], "segment": WORDS[1:5]}
"""The actions that a way may permit at all."""
WIDTHS = {"own": SCOPES[:3], "grant": SCOPES[2:], "segment": SCOPES[2:]}
"""The scopes that it may permit."""


def instants(timelines):
    """Return both sides of every edge."""
    edges = {edge for timeline in timelines for piece in timeline for edge in piece[:2]}
    return sorted({max(0, edge - side) for edge in edges if edge < 1 << 60 for side in (0, 1)} | {NOON})


def questions(table, doc):
    """Return every distinguishable request."""
    names = [*(name for name in doc["tenants"] if name != "default"), "stranger"]
    levels = range(len(doc["classifications"]))
    for reader, owner in itertools.product(names, names):
        timelines = table.timelines(reader, owner)
        live = sorted({id_ for timeline in timelines for piece in timeline for id_ in piece[3]})
        for action, level, scope in itertools.product(WORDS, levels, SCOPES):
            yield action, reader, owner, level, scope, "own", NOON, None
            for via in VIAS[1:] if live or reader != owner else ():
                for now in instants(timelines):
                    for source in [None, *live, "g0"] if live and action in OPEN[via] else [None]:
                        yield action, reader, owner, level, scope, via, now, source


def stored(table):
    """Return every cell that the table stores: places of own rows, intervals of timelines."""
    cells = {("own", who, place) for who, row in table._own.items() for place in range(len(row))}
    if table._unlisted is not None:
        cells |= {("own", UNLISTED, place) for place in range(len(table._unlisted))}
    for pair, levels in table._grants.items():
        for level, timeline in enumerate(levels):
            cells |= {("grant", pair, level, piece[:2]) for piece in timeline}
    for pair, row in table._segments.items():
        for key, timeline in row.items():
            cells |= {("segment", pair, key, piece[:2]) for piece in timeline}
    return cells


def reached(table, request):
    """Return the stored cell that answers this request, if there is one."""
    action, reader, owner, level, scope, via, now, source = request
    place, width = Action[action.upper()], Scope[scope.upper()]
    if via == "own":
        who = reader if reader in table._own else UNLISTED
        return ("own", who, places(len(table.policy.classifications))[place][level][width])
    if via == "grant":
        pair, key = (reader, owner), level
        timeline = table._grants[pair][level] if pair in table._grants else ()
    else:
        pair = (reader if reader in table._own else UNLISTED, owner)
        key = (place, level, width, source)
        timeline = table._segments.get(pair, {}).get(key, ())
    found = (piece for piece in timeline if piece[0] <= now < piece[1])
    return next(((via, pair, key, piece[:2]) for piece in found), None)


def rule_kind(rule):
    """The terms of a rule, by how each is written."""
    when = rule["when"]
    shapes = [when.get("reader"), when.get("owner"), when.get("classification"), when.get("via")]
    words = [
        shape if isinstance(shape, str) else next(iter(shape)) if isinstance(shape, dict) else bool(shape)
        for shape in shapes
    ]
    return rule["effect"], *words


LEVEL_TERMS = [False, True, "at_most", "at_least"]
READERS = [False, "owner", "same-group", True]
RULE_KINDS = {
    *itertools.product(["permit"], [False, "owner", True], [False], LEVEL_TERMS, [False, True]),
    *itertools.product(["forbid"], READERS, [False, True], LEVEL_TERMS, [False, True]),
}


def sweep(seed, policies, default=False):
    """(counts of what decided, disagreements, cells never reached) over every cell of random policies."""
    rng, seen = random.Random(seed), Counter()
    wrong, missed = [], 0
    for _ in range(policies):
        doc = random_document(rng)
        revoked = frozenset(rng.sample(["g0", "g1", "s0", "red"], rng.randint(0, 1)))
        table = compile_policy(load_policy(json.dumps(doc), name="r.yaml"), revision=1, revoked=revoked)
        cells, rules = stored(table), {rule["id"]: rule_kind(rule) for rule in doc["rules"]}
        seen["cells"] += len(cells)
        for request in questions(table, doc):
            got = call(table, request)
            if (got.permitted, got.reasons) != reference(doc, revoked, *request, default=default):
                wrong.append((request, got))
            cells.discard(reached(table, request))
            seen["total"] += 1
            seen[got.permitted, request[5], request[0], request[3], request[4]] += 1
            seen.update(rules[reason] for reason in got.reasons if reason in rules)
        missed += len(cells)
        seen.update(thresholds(table, doc, revoked))
    return seen, wrong, missed


def thresholds(table, doc, revoked):
    """Return which limits of grants and segments separated a permit from a deny."""
    top = len(doc["classifications"]) - 1
    for grant in table.policy.grants:
        if grant.id in revoked or any(rule["effect"] == "forbid" for rule in doc["rules"]):
            continue
        last, asked = grant.until_us - 1, ("reuse", grant.reader, grant.owner)
        at_end = [call(table, (*asked, grant.at_most, "tenant", "grant", last + i, grant.id)) for i in (0, 1)]
        if [decision.permitted for decision in at_end] == [True, False]:
            yield "threshold", "until"
        if grant.at_most < top:
            above = call(table, (*asked, grant.at_most + 1, "tenant", "grant", last, grant.id))
            yield "threshold", "at_most", grant.at_most, above.permitted
        if grant.from_us is not None:
            at_start = [
                call(table, (*asked, grant.at_most, "tenant", "grant", grant.from_us - i, grant.id)) for i in (1, 0)
            ]  # fmt: skip
            if [decision.permitted for decision in at_start] == [False, True]:
                yield "threshold", "from"


def check_thresholds(seen):
    assert seen["threshold", "until"] and seen["threshold", "from"]
    for level in range(3):
        assert seen["threshold", "at_most", level, False] and not seen["threshold", "at_most", level, True]


def kinds_and_cells(seen):
    """Return what the run did not reach: kinds of rules, and (effect, way, action, level, scope)."""
    lacking = RULE_KINDS - set(seen)
    for via, action, level, scope in itertools.product(VIAS, WORDS, range(4), SCOPES):
        may = action in OPEN[via] and scope in WIDTHS[via]
        if bool(seen[True, via, action, level, scope]) != may:
            lacking.add((True, via, action, level, scope))
        if not seen[False, via, action, level, scope]:
            lacking.add((False, via, action, level, scope))
    return lacking


def test_every_cell_of_a_few_tables():
    seen, wrong, missed = sweep(seed=4, policies=4)
    assert not wrong, wrong[:3]
    assert missed == 0 < seen["cells"]


def test_positive_control_a_flipped_default_disagrees():
    assert sweep(seed=4, policies=2, default=True)[1]


def test_positive_control_a_cell_that_nobody_asks_for_is_noticed():
    rng = random.Random(7)
    table = compile_policy(load_policy(json.dumps(random_document(rng)), name="r.yaml"), revision=1)
    cells = stored(table)
    assert cells and cells - {reached(table, ("reuse", "t0", "t0", 0, "tenant", "own", NOON, None))}


@pytest.mark.soak
def test_every_cell_kind_and_threshold_in_a_million_requests():
    seen, wrong, missed = sweep(seed=5, policies=300)
    assert seen["total"] >= 1_000_000
    assert not wrong, wrong[:3]
    assert missed == 0
    check_thresholds(seen)
    assert kinds_and_cells(seen) == set()
    print(f"{seen['total']:,} requests, {seen['cells']:,} cells")
