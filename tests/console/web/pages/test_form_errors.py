"""Forms keep what was typed, mark each fault at its field with its remedy, and offer what the state allows."""

from __future__ import annotations

import html
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvcustody.governance.release.release_desk import ReleaseWorkflow
from kvcustody.governance.release.signer import open_signer
from kvcustody.governance.release.store import SqlStore
from standins.console.web_world import World, policy_source, write_draft

Visitor = Callable[[str], httpx.Client]
FORMS = {  # the page, the form's path after it, who, what is sent, the field at fault, the remedy
    "an unknown tenant of an erasure": (
        "/erasures", "/preview", "dpo", {"tenant": "acne", "subject": "user-1"}, "tenant", "did you mean acme?"),
    "labels": ("/erasures", "/preview", "dpo", {"tenant": "acme", "labels": "region"}, "labels", "write name=value"),
    "a model": ("/erasures", "/preview", "dpo", {"tenant": "acme", "model": "5f"}, "model", "write it in the form"),
    "a key epoch": (
        "/erasures", "/preview", "dpo", {"tenant": "acme", "key_epoch": "x"}, "key_epoch", "write digits alone"),
    "a case of an unknown tenant": (
        "/cases", "", "dpo", {"tenant": "labz", "subject": "u", "right": "erasure", "channel": "mail"},
        "tenant", "did you mean labs?"),
    "a case without a subject": (
        "/cases", "", "dpo", {"tenant": "acme", "subject": "", "right": "erasure", "channel": "mail"},
        "subject", "fill this in"),
    "a case from no time": (
        "/cases", "", "dpo",
        {"tenant": "acme", "subject": "u", "right": "erasure", "channel": "mail", "received": "soon"},
        "received", "write 2026-01-31T12:00"),
    "a report of an unknown tenant": (
        "/reports", "", "auditor", {"framework": "gdpr", "tenant": "acne"}, "tenant", "did you mean acme?"),
    "a schedule at no hour": (
        "/reports", "/schedules", "auditor", {"framework": "gdpr", "every": "monthly", "hour": "25"},
        "hour", "use at most 23"),
    "an end of somebody else": (
        "/principals", "/disable", "key-custodian", {"name": "auditor", "again": "auditr"}, "again", "type auditor"),
}  # fmt: skip


def text(part: str) -> str:
    return html.unescape(re.sub(r"<[^>]*>", "", part))


@pytest.mark.parametrize("case", FORMS)
def test_a_fault_stands_at_its_field_and_what_was_typed_is_kept(world: World, visitor: Visitor, case: str) -> None:
    place, more, who, sent, field, remedy = FORMS[case]
    assert world.keys["auditor"] and world.keys[who]
    person, action = visitor(who), f"/console{place}{more}"
    page = person.get(f"/console{place}?name=auditor").text
    assert "aria-invalid" not in page, "control: nothing is wrong before anything is sent"
    form = page.partition(f'action="{action}"')[2].partition("</form>")[0]
    own = dict(re.findall(r'type="hidden" name="(\w+)" value="([^"]*)"', form))
    answer = person.post(action, data=own | sent)
    assert answer.status_code == 422
    again = answer.text.partition(f'action="{action}"')[2].partition("</form>")[0]
    [label] = [each for each in again.split("<label>") if f'id="{field}-wrong"' in each]
    assert f'name="{field}"' in label and 'aria-invalid="true"' in label
    assert remedy in text(label), text(label)
    for name, value in sent.items():
        kept = f'value="{value}"' in again if value else True
        assert kept, (name, value)
    assert "`" not in text(again), "code is shown as code"
    assert answer.text.count('aria-invalid="true"') == 1, "at this field alone"


def test_a_case_offers_the_steps_that_its_state_allows(world: World, visitor: Visitor) -> None:
    officer = visitor("dpo")

    def hidden(page: str, action: str) -> dict[str, str]:
        form = page.partition(f'action="{action}"')[2].partition("</form>")[0]
        return dict(re.findall(r'<input type="hidden" name="(\w+)" value="(\w*)"', form))

    def offered(page: str, name: str) -> set[str]:
        part = page.partition(f'<select name="{name}"')[2].partition("</select>")[0]
        return set(re.findall(r'<option value="([^"]+)"', part))

    sent = {"tenant": "acme", "subject": "user-1", "right": "erasure", "channel": "mail"}
    place = officer.post(
        "/console/cases", data=sent | hidden(officer.get("/console/cases").text, "/console/cases")
    ).headers["location"]
    page = officer.get(place).text
    assert {"identity", "extend", "decide"} <= offered(page, "step")
    assert not {"lift-restriction", "answer", "erasure", "export"} & offered(page, "step"), "not yet"
    assert "erased" not in offered(page, "outcome") and "refused" in offered(page, "outcome")
    wrong = {"step": "extend", "ground": "number", "reason": ""} | hidden(page, f"{place}/step")
    refused = officer.post(f"{place}/step", data=wrong)
    assert refused.status_code == 409 and 'id="reason-wrong"' in refused.text
    assert '<option value="extend" selected>' in refused.text and '<option value="number" selected>' in refused.text
    for step in ({"step": "identity", "outcome": "confirmed"}, {"step": "extend", "ground": "number", "reason": "a"}):
        page = officer.get(place).text
        assert officer.post(f"{place}/step", data=step | hidden(page, f"{place}/step")).status_code == 303
    page = officer.get(place).text
    assert "extend" not in offered(page, "step") and "erasure" in offered(page, "step")


def test_an_unknown_tenant_of_a_list_is_said_with_the_one_that_was_meant(world: World, visitor: Visitor) -> None:
    auditor = visitor("auditor")
    for place in ("audit", "custody", "erasures", "cases", "decisions"):
        page = auditor.get(f"/console/{place}?tenant=acne")
        assert page.status_code == 200 and "did you mean acme?" in text(page.text), place
        assert "did you mean" not in auditor.get(f"/console/{place}?tenant=acme").text, f"control: {place}"
        assert '<option value="acme"></option>' in page.text, "those that are known are suggested"
    kind = auditor.get("/console/audit?kind=reciept")
    assert kind.status_code == 422 and "did you mean receipt?" in text(kind.text)
    wrong = auditor.get("/console/audit?since=yesterday")
    assert wrong.status_code == 422 and 'id="since-wrong"' in wrong.text
    foreign = visitor("tenant-viewer@labs").get("/console/custody?tenant=acne")
    assert foreign.status_code == 404 and "acme" not in foreign.text, "behind a wall nothing is suggested"


def test_after_approving_there_is_no_approving(world: World, visitor: Visitor) -> None:
    world.release()
    desk = ReleaseWorkflow(
        SqlStore(world.service.engine),
        world.service.policies.trust,
        clock=world.service.clock,
        ledger=world.service.writer,
    )
    author, approver = (open_signer(Path(world.signing_key(name))) for name in ("author", "approver"))
    number = desk.propose(policy_source() + "# later\n", author, note="a comment").revision
    person, place = visitor("approver"), f"/console/policy/{number}"
    page = person.get(place).text
    assert "Sign and approve" in page and "Sign and activate" not in page
    desk.approve(number, approver, cells=desk.review(number).cells)
    page = person.get(place).text
    assert "Sign and approve" not in page and "Sign and activate" in page
    desk.activate(number, approver)
    page = person.get(place).text
    assert "Sign and approve" not in page and "Sign and activate" not in page


SIGNED = {  # the step, who, what is sent, the field at fault, the remedy
    "no reason of a proposal": ("proposed", "author", {"note": " ", "days": "30"}, "note", "say why"),
    "no days": ("proposed", "author", {"note": "x", "days": "0"}, "days", "use from 1 to 3660 days"),
    "days that are no number": ("proposed", "author", {"note": "x", "days": "many"}, "days", "write digits alone"),
    "no reason of a withdrawal": ("revoked", "tenant-admin@acme", {"id": "labs-reads-acme"}, "reason", "say why"),
    "a document with problems": ("proposed", "author", {"note": "x", "source": "name: x"}, "", "check it first"),
}


@pytest.mark.parametrize("case", SIGNED)
def test_a_signed_step_says_its_fault_by_field(world: World, visitor: Visitor, case: str) -> None:
    step, who, sent, field, remedy = SIGNED[case]
    world.release()
    assert world.keys[who]
    person = visitor(who)
    token = person.get("/console/").text.partition('name="csrf" content="')[2].partition('"')[0]
    headers = {"X-CSRF-Token": token, "Origin": world.url}
    given = {"step": step, "source": policy_source()} | sent
    answer = person.post("/console/policy/step", data=given, headers=headers)
    assert answer.status_code == 422 and list(answer.json()["wrong"]) == [field], answer.text
    assert remedy in answer.json()["wrong"][field]
    whole = given | {"note": "why", "days": "30", "reason": "why", "source": policy_source()}
    assert person.post("/console/policy/step", data=whole, headers=headers).status_code == 200, "control"


@pytest.mark.parametrize("act", ["keep", "revoke"])
def test_a_refused_key_button_says_so_beside_it(world: World, visitor: Visitor, act: str) -> None:
    assert world.keys["auditor"] and world.keys["key-custodian"]
    person = visitor("key-custodian")
    place = "/console/principals?name=auditor"
    page = person.get(place).text
    assert "wrong-field" not in page, "control"
    token = page.partition('name="csrf" value="')[2].partition('"')[0]
    [prefix] = {*re.findall(r'name="prefix" value="(\w+)"', page)}
    sent = {"csrf": token, "name": "auditor", "prefix": prefix if act == "keep" else "0" * 12}
    answer = person.post(f"/console/principals/{act}", data=sent)
    assert answer.status_code == (409 if act == "keep" else 404)
    assert "<h2>auditor</h2>" in answer.text, "the page that has the button"
    if act == "keep":
        row = next(row for row in answer.text.split("<tr>") if f'value="{prefix}"' in row)
        assert "stands alone already" in row.partition("wrong-field")[2]
    else:
        assert f"Key {'0' * 12}:" in text(answer.text)


@pytest.mark.system("a form that is signed in the browser shows a fault away from its field, or loses what was typed")
def test_a_signed_form_shows_each_fault_at_its_field(world: World, sign_in: Callable[..., Any]) -> None:
    page = sign_in("author")
    page.goto("/console/policy/draft")
    write_draft(page, policy_source())
    page.get_by_role("button", name="Check").click()
    form = page.locator("form[data-sign=proposed]")
    form.get_by_label("Valid for days").fill("9999")
    button = form.get_by_role("button", name="Sign and propose")
    button.click()
    assert form.locator(".wrong-field").all_inner_texts() == [
        "fill this in",
        "use a whole number from 1 to 3660",
        "choose your key file",
    ]
    assert (
        form.locator("[aria-invalid=true]").count() == 3 and form.get_by_label("Valid for days").input_value() == "9999"
    )
    note = form.get_by_label("Why, for the record")
    note.fill("for <b>labs</b>")
    form.get_by_label("Valid for days").fill("30")
    form.get_by_label("Your signing key").set_input_files({"name": "x.key", "mimeType": "text/plain", "buffer": b"x"})
    button.click()
    fault = form.locator("label", has_text="Your signing key").locator(".wrong-field")
    fault.wait_for()
    assert "not a private key" in fault.inner_text() and form.locator(".wrong-field").count() == 1
    assert note.input_value() == "for <b>labs</b>"
