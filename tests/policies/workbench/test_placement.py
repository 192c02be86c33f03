"""Placement rules and the copies of dead workers: proved, compared, linted and explained."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvcustody.console.main import app
from kvcustody.policies.document.digest import digest
from kvcustody.policies.document.model import OnWorkerDeath
from kvcustody.policies.document.problems import PolicyRejected
from kvcustody.policies.reading.load_policy import load_policy
from kvcustody.policies.table.compile import compile_policy
from kvcustody.policies.table.decision_table import DecisionTable
from kvcustody.policies.table.placement import Demand, PlacementTable
from kvcustody.policies.workbench.diff.model import DiffVerdict
from kvcustody.policies.workbench.diff.semantic_diff import diff
from kvcustody.policies.workbench.explain_route import OTHERS, explain_route
from kvcustody.policies.workbench.lint.lint import lint
from kvcustody.policies.workbench.prove.prove import prove

BASE = (Path(__file__).parents[1] / "base.yaml").read_text()
OWN = "{id: acme-own, groups: [a-1, a-2], tenants: [acme], dedicated: true}"
SEALED = "{id: sealed, groups: [a-1, s], classification: {at_least: high}}"
EU = "{id: eu, groups: [a-1, eu-1], labels: {region: eu}}"


def table(*rules: str, more: str = "") -> DecisionTable:
    said = "".join(f"  - {rule}\n" for rule in rules)
    return compile_policy(
        load_policy(BASE + ("placement:\n" + said if rules else "") + more, name="p.yaml"), revision=1
    )


def groups(found: DecisionTable, tenant: str, route: str | None = None, hint: str | None = None) -> set[str]:
    demand = found.placement.demand(tenant, route, None, hint)
    return set(demand.among(("a-1", "a-2", "s", "eu-1", "other")))


def test_every_matching_rule_narrows_and_a_dedicated_group_is_closed_to_others() -> None:
    decisions = table(OWN, SEALED, EU)
    assert groups(decisions, "acme") == {"a-1"}, "its region, and its own groups"
    assert groups(table(OWN, SEALED), "acme") == {"a-1", "a-2"}
    assert groups(decisions, "labs") == {"s", "eu-1", "other"}
    assert groups(decisions, "labs", hint="high") == {"s"} == groups(decisions, "stranger", hint="no-such-level")
    assert groups(table(OWN, SEALED), "acme", "/v1/hr/x") == {"a-1"}, "the route raises"
    assert groups(table(OWN, SEALED), "acme", "/v1/../v1") == {"a-1"}, "who cannot be trusted is the highest"
    assert groups(table(), "acme") == {"a-1", "a-2", "s", "eu-1", "other"}, "the control: no rule"
    again = PlacementTable.from_data(json.loads(json.dumps(decisions.placement.data())))
    for tenant in ("acme", "labs", "stranger"):
        for hint in (None, "high"):
            asked = tenant, "/v1/hr/x", None, hint
            assert again.demand(*asked) == decisions.placement.demand(*asked)


def test_what_says_nothing_new_has_the_digest_that_it_had() -> None:
    plain = digest(table().policy)
    assert digest(table(more="on_worker_death: {default: restore}\n").policy) == plain
    assert len({plain, digest(table(OWN).policy), digest(table(more="on_worker_death: {low: fail}\n").policy)}) == 3
    assert digest(table(OWN, EU).policy) == digest(table(EU, OWN).policy)
    policy = table(more="on_worker_death: {default: restore, high: fail}\n").policy
    assert [each.name for each in policy.on_worker_death] == ["RESTORE", "RESTORE", "FAIL"]
    assert table().policy.after_death(0) is OnWorkerDeath.RESTORE


@pytest.mark.parametrize(
    ("rule", "code"),
    [
        ("{id: x, groups: [a], dedicated: true}", "KVP302"),
        ("{id: x, groups: [a], tenants: [nobody]}", "KVP401"),
        ("{id: x, groups: [a], labels: {region: mars}}", "KVP403"),
        ("{id: x, groups: [a], classification: {at_least: top}}", "KVP402"),
        ("{id: x, groups: []}", "KVP305"),
        ("{id: x, groups: [default]}", "KVP207"),
        ("{id: own, groups: [a]}", "KVP304"),
    ],
)
def test_a_rule_that_cannot_be_meant_is_refused(rule: str, code: str) -> None:
    with pytest.raises(PolicyRejected) as rejected:
        table(rule)
    assert code in {problem.code for problem in rejected.value.problems}


def test_the_proof_says_where_requests_go_and_finds_a_table_that_sends_them_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decisions = table(OWN, SEALED, EU)
    proof = prove(decisions)
    placed = next(one for one in proof.properties if one.id == "ISO-14")
    assert proof.holds and placed.cells > placed.permits > 0
    assert all(one.id != "ISO-14" for one in prove(table()).properties)
    demand = PlacementTable.demand_of
    for broken in (
        lambda *asked: demand(*asked)._replace(barred=frozenset()),
        lambda *asked: demand(*asked)._replace(only=None),
        lambda self, tenant, level, labels: demand(self, tenant, 0, labels),
        lambda self, tenant, level, labels: demand(self, tenant, level, ()),
    ):
        monkeypatch.setattr(PlacementTable, "demand_of", broken)
        wrong = prove(decisions)
        assert [one.id for one in wrong.broken] == ["ISO-14"]


def test_another_group_is_wider_and_one_less_narrower() -> None:
    none, own = table(), table(OWN)
    assert diff(none, own).verdict is DiffVerdict.NARROWER
    assert diff(own, none).verdict is DiffVerdict.WIDER
    assert diff(own, table(OWN, SEALED)).verdict is DiffVerdict.NARROWER
    moved = diff(own, table(OWN.replace("a-2", "a-3")))
    assert moved.verdict is DiffVerdict.INCOMPARABLE
    assert all(duty.loosens is None for duty in moved.duties), "what is closed to others moves with it"
    assert diff(own, table(OWN.replace("acme-own", "own-acme"))).verdict is DiffVerdict.EQUIVALENT
    ends, fail = (table(more=f"on_worker_death: {{low: {said}}}\n") for said in ("recompute", "fail"))
    assert diff(ends, none).verdict is DiffVerdict.WIDER
    assert diff(ends, fail).verdict is DiffVerdict.NARROWER


def test_lint_tells_of_requests_that_nobody_may_serve() -> None:
    def codes(found: DecisionTable) -> set[str]:
        return {one.code for one in lint(found, now_us=0) if one.code.startswith("KVP77")}

    assert codes(table(OWN, SEALED, EU)) == set()
    assert codes(table(OWN, "{id: elsewhere, groups: [s], classification: [high]}")) == {"KVP771"}
    twice = "{id: labs-own, groups: [a-2], tenants: [labs], dedicated: true}"
    assert codes(table(OWN, twice)) == {"KVP771", "KVP772"}
    assert codes(table(more="on_worker_death: {mid: recompute}\n")) == {"KVP773"}
    assert codes(table(more="on_worker_death: {low: recompute}\n")) == set(), "it goes to nvme"


def test_explain_says_which_workers_and_why(tmp_path: Path) -> None:
    found = explain_route(table(OWN, EU), "labs", route="/v1/completions", claim=None, hint=None)
    assert found.allowed == ("eu-1", OTHERS) and found.refused == ("a-1", "a-2")
    assert [(rule.id, rule.effect) for rule in found.rules] == [("acme-own", "bars")]
    (tmp_path / "p.yaml").write_text(BASE + f"placement:\n  - {OWN}\n  - {EU}\n")
    (tmp_path / "placement.yaml").write_text(
        "schema: kvcustody/placement@1\ngroups:\n  a-1: {router: r:1, workers: [gpu-0]}\n  s: {router: s:1}\n"
    )
    asked = ["policy", "explain", str(tmp_path / "p.yaml"), "--reader", "acme", "--route", "/v1/completions"]
    answer = CliRunner().invoke(app, [*asked, "--placement", str(tmp_path / "placement.yaml")])
    assert answer.exit_code == 0, answer.output
    assert "a-1: may serve it (gpu-0)" in answer.output and "s: may not" in answer.output
    (tmp_path / "placement.yaml").write_text("schema: kvcustody/placement@1\ngroups:\n  s: {router: s:1}\n")
    refused = CliRunner().invoke(app, [*asked, "--placement", str(tmp_path / "placement.yaml"), "--json"])
    assert refused.exit_code == 1 and json.loads(refused.output)["permitted"] is False


def test_demands_of_several_policies_hold_together() -> None:
    one, other = table(OWN).placement, table(SEALED).placement
    asked = "acme", None, None, "high"
    both = one.demand(*asked).together(other.demand(*asked))
    assert both == Demand(frozenset({"a-1"}), frozenset(), ("acme-own", "sealed"), receipt_share=Fraction(1))
