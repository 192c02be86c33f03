"""A candidate beside the active revision sees what is decided and changes nothing; its disagreements are counted."""

from __future__ import annotations

from standins.redteam.two_worlds import BLOCK, World, table

GRANT = "grants: [{id: g, owner: victim, reader: attacker, at_most: low, until: 2027-01-01, reason: x}]"
FORBID = "  - {id: no-more, effect: forbid, action: reuse, when: {via: grant}}"


def serve(world):
    """The hits of a short day: the owner fills, both read, twice."""
    hits = []
    for turn in range(3):
        for tenant in ("victim", "attacker", "victim"):
            hits.append(world.hit(tenant, [turn] * 4 * BLOCK))
        world.governor.settle()
    return hits


def test_a_shadow_changes_nothing_and_tells_every_disagreement():
    active = table(sharing=GRANT)
    plain, shadowed = World(active), World(active)
    shadow = shadowed.governor.shadow(table(sharing=GRANT, rules=FORBID, revision=2))
    assert serve(plain) == serve(shadowed) and max(serve(shadowed)) > 0
    report = shadow.report()
    assert report.candidate_revision == 2 and report.decisions > 12
    (found,) = report.disagreements
    assert (found.reader, found.owner, found.via, found.source) == ("attacker", "victim", "grant", "g")
    assert (found.active, found.candidate, found.candidate_by) == ("permit", "deny", ("no-more",))
    assert found.requests == 6


def test_a_shadow_of_the_same_policy_never_disagrees():
    world = World(table(sharing=GRANT))
    shadow = world.governor.shadow(table(sharing=GRANT, revision=2))
    serve(world)
    assert shadow.report().disagreements == () and shadow.report().decisions > 0


def test_a_shadow_stays_over_an_activation_and_ends_when_told():
    world = World(table(sharing=GRANT))
    shadow = world.governor.shadow(table(rules=FORBID, revision=9))
    world.governor.activate(table(sharing=GRANT, revision=2), actor="test")
    serve(world)
    seen = shadow.report().decisions
    assert shadow.report().disagreements
    world.governor.shadow(None)
    serve(world)
    assert shadow.report().decisions == seen


def test_a_candidate_without_the_classification_denies():
    active = table(sharing=GRANT)
    world = World(active)
    candidate = table(sharing=GRANT, revision=2)
    shadow = world.governor.shadow(candidate)
    shadow._levels.pop("low")
    serve(world)
    assert {found.candidate for found in shadow.report().disagreements} == {"deny"}
