"""The pages of cases at a real service, asked without a browser: a request recorded, its steps, its letter."""

from __future__ import annotations

import re
from collections.abc import Callable

import httpx
import pytest

from kvcustody.audit.evidence.cases.read_cases import read_cases
from standins.console.web_world import World

SignIn = Callable[[str], httpx.Client]
FORM = {"subject": "user-1", "right": "erasure", "channel": "mail"}


@pytest.fixture
def client(visitor: SignIn) -> SignIn:
    return visitor


def hidden(page: str, action: str) -> dict[str, str]:
    """The hidden fields of the form that is sent to this address."""
    form = page.partition(f'action="{action}"')[2].partition("</form>")[0]
    return dict(re.findall(r'<input type="hidden" name="(\w+)" value="(\w*)"', form))


def recorded(world: World) -> int:
    with world.service.reading() as connection:
        return len(read_cases(connection))


@pytest.mark.system("the pages record a case twice")
def test_a_request_is_recorded_once_and_taken_to_its_letter(world: World, client: SignIn) -> None:
    admin, before = client("tenant-admin@acme"), recorded(world)
    form = FORM | hidden(admin.get("/console/cases").text, "/console/cases")
    sent = [admin.post("/console/cases", data=form) for _ in range(2)]
    assert [answer.status_code for answer in sent] == [303, 303]
    assert sent[0].headers["location"] == sent[1].headers["location"], "sent twice, it is one case"
    assert recorded(world) == before + 1
    place = sent[0].headers["location"]
    page = admin.get(place).text
    assert "verify the person&#39;s identity" in page and "user-1" not in page.partition("<main")[2]
    wrong = {"step": "decide", "outcome": "erased"} | hidden(page, f"{place}/step")
    refused = admin.post(f"{place}/step", data=wrong)
    assert refused.status_code == 409 and "identity first" in refused.text
    for step in (
        {"step": "identity", "outcome": "confirmed"},
        {"step": "decide", "outcome": "refused", "ground": "12(5)", "reason": "the <ninth> this week"},
    ):
        form = step | hidden(admin.get(place).text, f"{place}/step")
        assert admin.post(f"{place}/step", data=form).status_code == 303
    page = admin.get(place).text
    assert "the &lt;ninth&gt; this week" in page and "answer the person" in page
    form = {"kind": "answer", "form": "text", "date": "2026-06-01", "addressee": "Ada\nBonn"}
    letter = admin.post(f"{place}/letter", data=form | hidden(page, f"{place}/letter"))
    assert letter.status_code == 200 and "Ada, Bonn" in letter.text and "<ninth>" in letter.text
    assert "attachment" in letter.headers["content-disposition"]
    assert place.rpartition("/")[2][:12] in admin.get("/console/cases").text


def test_who_may_not_act_sees_no_form_and_is_refused(world: World, client: SignIn) -> None:
    admin, viewer, other = (
        client("tenant-admin@acme"),
        client("tenant-viewer@acme"),
        client("tenant-admin@labs"),
    )
    form = FORM | hidden(admin.get("/console/cases").text, "/console/cases")
    place = admin.post("/console/cases", data=form).headers["location"]
    page = viewer.get(place)
    assert page.status_code == 200 and "<form" not in page.text.partition("<main")[2]
    token = re.findall(r'name="csrf" value="(\w+)"', viewer.get("/console/").text)
    for person in (viewer, other):
        stolen = {"step": "identity", "outcome": "confirmed", "once": "a" * 32, "csrf": (token or [""])[0]}
        assert person.post(f"{place}/step", data=stolen).status_code in (403, 404)
    assert other.get(place).status_code == 404
    unnamed = admin.post("/console/cases", data={**form, "right": "everything"})
    assert unnamed.status_code == 422 and "right" in unnamed.text


def test_an_auditor_sees_every_tenants_cases_and_that_is_on_record(world: World, client: SignIn) -> None:
    admin, auditor = client("tenant-admin@acme"), client("auditor")
    form = FORM | hidden(admin.get("/console/cases").text, "/console/cases")
    place = admin.post("/console/cases", data=form).headers["location"]
    assert place.rpartition("/")[2][:12] in auditor.get("/console/cases").text
    assert auditor.get(place).status_code == 200
    dpo = client("dpo")
    found = dpo.get("/v1/audit/events?kind=access&actor=auditor&limit=1000").json()["items"]
    assert {"consoleCases", "consoleCase"} <= {item["leaf"]["operation"] for item in found}
