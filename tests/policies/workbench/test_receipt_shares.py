"""`route_receipts`: which requests have a receipt, read, compared, linted, explained and handed to doors."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path

import pytest

from kvcustody.errors import ServiceError
from kvcustody.governance.edge.name_scopes import NameScopes
from kvcustody.governance.identity.principal import Principal
from kvcustody.ids import SubjectId, TenantId
from kvcustody.policies.document.digest import digest
from kvcustody.policies.document.model import UNSAID_RECEIPTS, Policy
from kvcustody.policies.document.problems import PolicyRejected
from kvcustody.policies.reading.load_policy import load_policy
from kvcustody.policies.table.compile import compile_policy
from kvcustody.policies.workbench.diff.semantic_diff import diff
from kvcustody.policies.workbench.explain_route import explain_route
from kvcustody.policies.workbench.lint.lint import lint

BASE = (Path(__file__).parents[1] / "base.yaml").read_text()
ALL, NONE = Fraction(1), Fraction(0)


def policy(section: str = "", **own: str) -> Policy:
    text = BASE
    for tenant, said in own.items():
        text = text.replace(f"\n  {tenant}: {{", f"\n  {tenant}: {{route_receipts: {said}, ", 1)
    return load_policy(text + (f"route_receipts: {section}\n" if section else ""), name="p.yaml")


def share(scopes: NameScopes, tenant: str, hint: str | None = None) -> Fraction:
    demand = scopes.demand(Principal("corp", TenantId(tenant), SubjectId("ann")), hint)
    assert demand is not None
    return demand.receipt_share


def test_a_share_is_of_the_tenant_and_the_classification_and_all_where_others_reach_it() -> None:
    declared = policy("{default: 1/4, high: all}", globex="{low: none, mid: none}", default="{default: 1/2}")
    scopes = NameScopes.from_data(json.loads(json.dumps(NameScopes.of_policies([declared]).data())))
    assert [share(scopes, "globex"), share(scopes, "globex", "high")] == [NONE, ALL], "its level is the request's"
    assert [share(scopes, "stranger"), share(scopes, "stranger", "high")] == [Fraction(1, 2)] * 2
    assert [share(scopes, "acme"), share(scopes, "labs")] == [ALL, ALL], "a segment and a grant open them"
    silent = NameScopes.of_policies([policy()])
    assert [share(silent, "globex"), share(silent, "stranger"), share(silent, "acme")] == [
        UNSAID_RECEIPTS, UNSAID_RECEIPTS, ALL,
    ]  # fmt: skip
    both = NameScopes.of_policies([declared, policy(globex="{mid: 1/3}")])
    assert share(both, "globex") == Fraction(1, 3), "the largest of policies that hold together"
    silenced = NameScopes.of_policies([policy("{default: none}"), policy()])
    assert share(silenced, "globex") == UNSAID_RECEIPTS, "one that says nothing means its share"


def test_a_segment_for_everybody_opens_unlisted_tenants_too() -> None:
    text = BASE.replace("tenants: [acme, labs]", 'tenants: "*"') + "route_receipts: {default: none}\n"
    scopes = NameScopes.of_policies([load_policy(text, name="p.yaml")])
    assert [share(scopes, "stranger"), share(scopes, "globex")] == [ALL, ALL]
    control = NameScopes.of_policies([policy("{default: none}")])
    assert [share(control, "stranger"), share(control, "globex")] == [NONE, NONE]


def test_what_says_nothing_new_has_the_digest_that_it_had() -> None:
    plain = digest(policy())
    assert digest(policy("{default: 1/10}", globex="{high: 1/10}")) == plain
    others = (policy("{high: all}"), policy(globex="{high: all}"), policy(default="{default: none}"))
    assert len({plain, *map(digest, others)}) == 4


@pytest.mark.parametrize(("said", "code"), [("{default: 2/1}", "KVP211"), ("{top: all}", "KVP402"), ("all", "KVP205")])
def test_what_cannot_be_meant_is_refused(said: str, code: str) -> None:
    for written in ({"section": said}, {"globex": said}):
        with pytest.raises(PolicyRejected) as rejected:
            policy(**written)
        assert {problem.code for problem in rejected.value.problems} == {code}


def test_fewer_receipts_are_looser_and_what_changes_for_all_is_said_once() -> None:
    plain, more, single = (
        compile_policy(made, revision=1)
        for made in (policy(), policy("{default: 1/10, high: all}"), policy(globex="{low: none}"))
    )
    changes = [change for change in diff(plain, more).duties if change.field == "route_receipts"]
    assert [(change[:2], change.loosens) for change in changes] == [(("every tenant", "high"), False)]
    changes = [change for change in diff(plain, single).duties if change.field == "route_receipts"]
    assert [change[:5] for change in changes] == [("globex", "low", "route_receipts", "1/10", "none")]
    assert changes[0].loosens


def test_lint_tells_of_a_share_that_changes_nothing() -> None:
    def codes(made: Policy) -> set[str]:
        found = lint(compile_policy(made, revision=1), now_us=0)
        return {one.code for one in found if one.code == "KVP774"}

    assert codes(policy(labs="{low: none}")) == {"KVP774"}
    assert codes(policy("{default: none}", globex="{low: all}")) == set()


def test_explain_says_of_which_share_and_why() -> None:
    table = compile_policy(policy("{default: 1/4}"), revision=1)
    asked = {"route": None, "claim": None, "hint": None}
    assert "requests with a route receipt: 1/4" in str(explain_route(table, "globex", **asked)).split("\n")
    opened = explain_route(table, "acme", **asked)
    assert str(opened).endswith("route receipt: all, for a grant or a segment opens the tenant")
    assert opened.data()["receipt_share"] == "all" and opened.data()["is_opened"] is True


def test_a_door_refuses_shares_that_are_none() -> None:
    data = NameScopes.of_policies([policy("{default: none}")]).data()
    for wrong in (["1/2"], ["1/0"] * 3, ["3/2"] * 3, None):
        data["placement"][0]["route_receipts"]["others"] = wrong
        with pytest.raises(ServiceError):
            NameScopes.from_data(data)
