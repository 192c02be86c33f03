"""What a grant or segment opens: blocks that exist, of labels that it names; and what was reused is counted."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvcustody.audit.kinds import DecisionRecorded, Event, HitCounted
from kvcustody.clock import VirtualClock
from kvcustody.governance.admission_outcome import Admission
from kvcustody.governance.identity.principal import identify
from kvcustody.governance.ledger_protocol import CountingLedger
from kvcustody.policies.document.model import Action, Grant, Scope, SegmentRule, Via
from kvcustody.policies.table.crossing import Barriers
from kvcustody.policies.table.decision_table import DecisionTable
from kvcustody.policies.table.model import AccessRequest
from kvcustody.policies.workbench.cedar import cedar_request, to_cedar
from kvcustody.policies.workbench.diff.model import DiffVerdict
from kvcustody.policies.workbench.diff.semantic_diff import diff
from kvcustody.policies.workbench.explain import explain
from kvcustody.policies.workbench.prove.prove import prove
from kvcustody.policies.workbench.request import Request
from kvcustody.testkit.tiny_model import tiny_model
from standins.builders import governor
from standins.builders import table as compiled

MODEL = tiny_model(kv_dtype="bf16", attention={"heads": 8})
PROMPT = [*range(1, 65), 7]
POLICY = """\
schema: kvcustody/policy@1
name: crossing
profile: shared
classifications: [low]
labels: {{region: [eu, us], purpose: [chat, files]}}
classify:
  - {{tenant: "*", as: low}}
  - {{tenant: reader, route: /v1/files, labels: {{purpose: files}}}}
tenants:
  holder: {{quota: {{guaranteed: 25%, cap: 100%, borrow: true}}, scope: {scope}, labels: {{region: eu}}}}
  reader: {{quota: {{guaranteed: 25%, cap: 100%, borrow: true}}, scope: tenant, labels: {{region: {region}}}}}
grants:
  - {{id: reads, owner: holder, reader: reader, at_most: low, until: 2099-01-01, {crosses}reason: test}}
segments: {segments}
rules: [{{id: own, effect: permit, action: reuse, when: {{reader: owner}}}}]
retention: {{low: {{idle: 1h, absolute: 8h, active_max: 2h}}}}
scrub: {{default: {{within: 1s, verify: none}}}}
offload: {{low: never}}
audit: {{on_outage: {{decisions: deny, lifecycle: spill, own_hits: aggregate}}}}
"""


def of(*, region: str = "eu", crosses: str = "", scope: str = "tenant", segments: str = "[]") -> DecisionTable:
    return compiled(POLICY.format(region=region, crosses=crosses, scope=scope, segments=segments))


class Recording(CountingLedger):
    def __init__(self) -> None:
        super().__init__()
        self.events: list[Event] = []

    def submit_durable(self, event: Event, /) -> int:
        self.events.append(event)
        return super().submit_durable(event)

    def submit(self, events: Sequence[Event], /) -> int:
        self.events += events
        return super().submit(events)

    def of(self, kind: type[Event]) -> list[Event]:
        return [event for event in self.events if isinstance(event, kind)]


def reused(table: DecisionTable, ledger: Recording, *, route: str | None = None) -> int:
    """Tokens that the reader has of the holder's prompt, when its first use has had its time."""
    governed = governor(table, VirtualClock(), ledger=ledger)
    owner = governed.admit(identify(issuer="idp", tenant="holder"), MODEL, PROMPT)
    assert isinstance(owner, Admission)
    governed.commit([owner.request_id], [len(PROMPT)])
    governed.release(owner.request_id)
    hits = 0
    for _ in range(2):
        asked = governed.admit(identify(issuer="idp", tenant="reader"), MODEL, PROMPT, route=route)
        assert isinstance(asked, Admission)
        hits = asked.hit_tokens
        governed.abort(asked.request_id)
        governed.settle()
    governed.step()
    governed.close()
    return hits


def test_a_grant_crosses_no_label_that_it_does_not_name() -> None:
    assert reused(of(), Recording()) == 64, "control: equal labels"
    assert reused(of(region="us"), Recording()) == 0
    assert reused(of(region="us", crosses="crosses: [region], "), Recording()) == 64
    assert reused(of(region="us", crosses="crosses: [purpose], "), Recording()) == 0


def test_a_routes_label_is_crossed_only_by_name() -> None:
    assert reused(of(), Recording(), route="/v1/files") == 0
    assert reused(of(crosses="crosses: [purpose], "), Recording(), route="/v1/files") == 64


@pytest.mark.parametrize("off", [False, True])
def test_positive_control_without_the_look_at_labels_a_grant_crosses_them(
    off: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both looks: the compiler's, at labels that differ on every route, and that of whoever opens domains."""
    if off:
        monkeypatch.setattr(Barriers, "never_equal", lambda *asked: ())
        monkeypatch.setattr(DecisionTable, "opens", lambda *asked: True)
    assert reused(of(region="us"), Recording()) == (64 if off else 0)


@pytest.mark.parametrize("region", ["eu", "us"])
def test_a_decision_permits_nothing_across_labels_that_differ_on_every_route(region: str) -> None:
    """Control: equal labels. What a route alone tells apart is asked where domains are opened."""
    asked = AccessRequest(Action.REUSE, "reader", "holder", 0, Scope.TENANT, Via.GRANT)
    assert of(region=region).decide(asked, 0).permitted is (region == "eu")
    assert of(region=region, crosses="crosses: [region], ").decide(asked, 0).permitted
    assert not of().opens(of().policy.grants[0], "reader", "/v1/files"), "by this route purposes differ"


@pytest.mark.parametrize("region", ["eu", "us"])
@pytest.mark.parametrize("crosses", ["", "crosses: [region], "])
def test_cedar_says_the_same_of_labels(region: str, crosses: str) -> None:
    cedarpy = pytest.importorskip("cedarpy")
    table = of(region=region, crosses=crosses)
    asked = Request(Action.REUSE, "reader", "holder", 0, Scope.TENANT, Via.GRANT, 0)
    cedar = to_cedar(table.policy)
    (answer,) = cedarpy.is_authorized_batch([cedar_request(asked)], cedar.text, list(cedar.entities))
    assert not answer.diagnostics.errors
    assert answer.allowed is asked.decide(table).permitted is (region == "eu" or bool(crosses))


def test_the_proof_shows_a_decision_that_crosses_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Barriers, "never_equal", lambda *asked: ())
        crossing = of(region="us")
    (broken,) = prove(crossing).broken
    assert broken.id == "ISO-13" and broken.counterexample is not None
    assert "reads" in broken.counterexample.text
    assert prove(of(region="us")).holds, "control: the table as it is compiled"


def test_an_explanation_names_the_labels() -> None:
    asked = Request(Action.REUSE, "reader", "holder", 0, Scope.TENANT, Via.GRANT, 0)
    closed = "denied: reads opens nothing: the labels `region` differ and are not in its `crosses`"
    assert explain(of(region="us"), asked).summary == closed
    assert explain(of(), asked).summary.startswith("permitted by reads"), "control: equal labels"


def test_a_label_that_a_grant_names_from_now_on_is_an_opening() -> None:
    found = diff(of(region="us"), of(region="us", crosses="crosses: [region], "))
    assert found.verdict is DiffVerdict.WIDER and found.cells and found.openings
    assert diff(of(region="us"), of(region="us")).verdict is DiffVerdict.EQUIVALENT, "control"


def test_a_segment_crosses_no_label_that_it_does_not_name() -> None:
    """What it opens is asked of the table as for a grant; the proof asks every reader and route."""
    digest = "1" * 64
    segment = f"[{{id: agent, owner: holder, tenants: [reader], digest: 'hmac:{digest}', tokens: 64, "
    segment += "classification: low, expires: 2099-01-01%s}]"
    for crosses, opens in (("", False), (", crosses: [region]", True)):
        table = of(region="us", segments=segment % crosses)
        (rule,) = table.policy.segments
        assert isinstance(rule, SegmentRule) and table.opens(rule, "reader", None) is opens
        asked = AccessRequest(Action.REUSE, "reader", "holder", 0, Scope.TENANT, Via.SEGMENT)
        assert table.decide(asked, 0).permitted is opens is bool(table.segments_for("reader", 0))


@pytest.mark.parametrize("scope", ["subject", "session"])
def test_nothing_is_recorded_for_a_grant_that_can_open_nothing(scope: str) -> None:
    ledger = Recording()
    assert reused(of(scope=scope), ledger) == 0
    assert ledger.of(DecisionRecorded) == []
    assert [one for one in ledger.of(HitCounted) if isinstance(one, HitCounted) and one.tenant == "reader"] == []


def test_what_was_reused_is_counted_in_blocks_and_tokens() -> None:
    ledger = Recording()
    reused(of(), ledger)
    assert ledger.of(DecisionRecorded), "its first use is on record"
    (counted,) = ledger.of(HitCounted)
    assert isinstance(counted, HitCounted)
    assert (counted.tenant, counted.owner, counted.effect, counted.rule) == (
        "reader",
        "holder",
        "permit",
        "reads",
    )
    assert (counted.requests, counted.blocks, counted.tokens) == (1, 4, 64)


def test_the_proof_shows_a_table_that_crosses_a_label(monkeypatch: pytest.MonkeyPatch) -> None:
    table = of(region="us")
    assert prove(table).holds
    monkeypatch.setattr(DecisionTable, "uncrossed", lambda *asked: ())
    (broken,) = prove(table).broken
    assert broken.id == "ISO-13" and broken.counterexample is not None
    assert broken.counterexample.data == {"id": "reads", "reader": "reader", "owner": "holder", "route": None}
    assert "region" in broken.counterexample.why


def test_the_proof_names_what_opens_nothing() -> None:
    (named,) = prove(of(scope="subject")).without_effect
    assert named[0] == "reads" and "`scope` is `subject`" in named[1]
    assert prove(of()).without_effect == ()
    (grant,) = of().policy.grants
    assert isinstance(grant, Grant) and of().opens(grant, "reader", None)
