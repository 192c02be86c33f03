"""Obligations for copies in a tier: the minimum over every source, and nothing if one source refuses."""

from __future__ import annotations

import pytest

from kvcustody.errors import PolicyError
from kvcustody.governance.decisions.staged_table import StagedTable
from kvcustody.policies.document.model import Tier
from kvcustody.policies.workbench.prove.prove import prove

SECOND, MINUTE, HOUR, DAY = 10**6, 60 * 10**6, 3600 * 10**6, 86400 * 10**6
LOW, MID, HIGH = range(3)
SEALED = "low: {tiers: [host, nvme], encrypt: required"
GLOBEX = "globex: {scope"


def limited(said):
    return (SEALED, f"{SEALED}, {said}")


def own(said):
    return (GLOBEX, f"globex: {{offload: {{low: {said}}}, scope")


def times(table, tenant="acme", level=LOW):
    """Return for each tier how long copies may stay and how soon they are gone."""
    return {
        tier.value: (duty.absolute_us, duty.within_us)
        for tier in Tier
        if (duty := table.tier_duty(tenant, level, tier)).absolute_us
    }


def test_without_limits_a_copy_ends_as_its_block_would_have(compiled):
    table = compiled()
    assert times(table) == {"host": (7 * DAY, 7 * DAY // 16), "nvme": (7 * DAY, 7 * DAY // 16)}
    assert times(table, level=MID) == {"host": (8 * HOUR, 30 * MINUTE)}
    assert times(table, level=HIGH) == {} == times(table, tenant="")
    assert times(table, tenant="globex")["nvme"] == (DAY, DAY // 16), "by its own retention"


def test_a_tier_may_be_shorter_each_by_itself(compiled):
    table = compiled(limited("absolute: 2h, within: 1m"))
    assert times(table) == {"host": (2 * HOUR, MINUTE), "nvme": (2 * HOUR, MINUTE)}
    each = ("tiers: [host, nvme]", "tiers: {host: {}, nvme: {absolute: 10m, within: 5s}}")
    table = compiled(limited("absolute: 2h"), each)
    assert times(table) == {"host": (2 * HOUR, 2 * HOUR // 16), "nvme": (10 * MINUTE, 5 * SECOND)}
    assert table.tier_duty("acme", LOW, "nvme").bucket_us == 5 * SECOND
    assert table.tier_duty("acme", LOW, "host").bucket_us == 2 * HOUR // 16
    assert compiled(limited("absolute: 4s")).tier_duty("acme", LOW, "host").within_us == SECOND, "at least"


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ("never", {}),
        ("{tiers: [nvme], encrypt: required}", {"nvme": (2 * HOUR, MINUTE)}),
        ("{tiers: [host], encrypt: required, absolute: 32m}", {"host": (32 * MINUTE, MINUTE)}),
        ("{tiers: [host], encrypt: required, absolute: 8m}", {"host": (8 * MINUTE, 30 * SECOND)}),
        ("{tiers: host, encrypt: required, within: 9s}", {"host": (2 * HOUR, 9 * SECOND)}),
    ],
)
def test_a_tenants_own_entry_goes_on_from_the_policys(compiled, entry, expected):
    table = compiled(limited("absolute: 2h, within: 1m"), own(entry))
    assert times(table, "globex") == expected
    assert times(table) == {"host": (2 * HOUR, MINUTE), "nvme": (2 * HOUR, MINUTE)}
    assert prove(table).holds


def test_media_are_encrypted_whatever_is_said_of_the_host(compiled):
    table = compiled()
    assert table.tier_duty("acme", MID, "host").encrypt is False
    assert all(table.tier_duty("acme", LOW, tier).encrypt for tier in Tier)


@pytest.mark.parametrize("tier", ["", "tape", "HOST", "Tier.HOST"])
def test_a_tier_that_is_not_known_holds_nothing(compiled, tier):
    duty = compiled().tier_duty("acme", LOW, tier)
    assert (duty.absolute_us, duty.running_us, duty.reasons) == (0, 0, ("default-deny",))


def test_a_level_that_does_not_exist_is_refused(compiled):
    with pytest.raises(PolicyError, match="level `3`"):
        compiled().tier_duty("acme", 3, "host")


@pytest.mark.parametrize(
    ("action", "absolute", "running"), [("offload", 0, 0), ("publish", 0, 2 * HOUR), ("retain", 0, 2 * HOUR)]
)
def test_a_rule_that_forbids_leaves_no_copy(compiled, action, absolute, running):
    """The control is the same rule about another action."""
    rule = "  - {{id: no-copy, effect: forbid, action: {}, when: {{owner: acme}}}}\nretention:\n"
    duty = compiled(("retention:\n", rule.format(action))).tier_duty("acme", LOW, "host")
    assert (duty.absolute_us, duty.running_us, duty.reasons) == (absolute, running, ("no-copy",))
    duty = compiled(("retention:\n", rule.format("export"))).tier_duty("acme", LOW, "host")
    assert (duty.absolute_us, duty.running_us, duty.reasons) == (7 * DAY, 2 * HOUR, ("offload:low",))


def test_what_is_never_kept_may_still_leave_while_it_runs(compiled):
    table = compiled(("high: never", "high: {tiers: [host], encrypt: required}"))
    duty = table.tier_duty("acme", HIGH, "host")
    assert (duty.absolute_us, duty.running_us) == (0, 15 * MINUTE)
    assert table.tier_duty("acme", HIGH, "nvme").running_us == 0
    short = compiled(limited("absolute: 1h")).tier_duty("acme", LOW, "host")
    assert short.running_us == HOUR, "no longer than the tier's own"


REMOTE = (SEALED, "low: {tiers: [remote], encrypt: required")
TWO = ("labels: {region: [eu, us]}", "labels: {region: [eu, us], purpose: [chat, files]}")
EU, FILES = ("region", "eu"), ("purpose", "files")


def test_a_remote_store_agrees_with_the_domains_labels(compiled):
    """Without a statement, a remote store must match every declared label."""
    duty = compiled(REMOTE, TWO).tier_duty("acme", LOW, "remote")
    assert duty.match == ("purpose", "region")
    assert duty.allows((EU,), {"region": ["eu"]}) and duty.allows((EU,), {"region": ["us", "eu"]})
    assert not duty.allows((EU,), {"region": ["us"]}) and not duty.allows((EU,), {})
    assert not duty.allows((EU, FILES), {"region": ["eu"]})
    assert duty.allows((EU, FILES), {"region": ["eu"], "purpose": ["files"]})
    assert duty.allows((), {}), "a domain without labels is bound to no place"
    host = compiled(REMOTE, TWO).tier_duty("acme", LOW, "host")
    assert host.match == () and host.allows((EU,), {}), "it is where the worker is"


@pytest.mark.parametrize(
    ("said", "match"), [("region", ("region",)), ("[region, purpose]", ("purpose", "region")), ("none", ())]
)
def test_labels_that_bind_are_named(compiled, said, match):
    table = compiled(
        REMOTE,
        TWO,
        ("tiers: [remote], encrypt: required", f"tiers: [remote], encrypt: required, match: {said}"),
    )
    duty = table.tier_duty("acme", LOW, "remote")
    assert duty.match == match
    assert duty.allows((EU, FILES), {}) is (match == ())
    assert prove(table).holds


def test_a_tenant_may_bind_more_labels_and_not_fewer(compiled):
    bound = ("tiers: [remote], encrypt: required", "tiers: [remote], encrypt: required, match: region")
    more = own("{tiers: remote, encrypt: required, match: [region, purpose]}")
    assert compiled(REMOTE, TWO, bound, more).tier_duty("globex", LOW, "remote").match == (
        "purpose",
        "region",
    )
    left_out = own("{tiers: remote, encrypt: required}")
    assert compiled(REMOTE, TWO, bound, left_out).tier_duty("globex", LOW, "remote").match == ("region",)
    with pytest.raises(PolicyError, match="KVP508"):
        compiled(REMOTE, TWO, bound, own("{tiers: remote, encrypt: required, match: purpose}"))


def test_while_a_revision_is_staged_each_tenant_has_its_own(compiled):
    old, new = compiled(), compiled(limited("absolute: 2h"), revision=2)

    class Stage:
        def covers(self, tenant, digest):
            return tenant == "acme"

    staged = StagedTable(old, new, Stage())
    assert staged.tier_duty("acme", LOW, "host").absolute_us == 2 * HOUR
    assert staged.tier_duty("labs", LOW, "host").absolute_us == 7 * DAY
