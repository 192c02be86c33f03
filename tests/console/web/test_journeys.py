"""The main journeys in a real browser, each with its opposite."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orjson
import pytest
from playwright.sync_api import expect

from kvcustody.audit.reports.erasure.certificate import SelectorOpening
from kvcustody.audit.tlog.signing_key import read_signing_key
from kvcustody.governance.keys.checkpoint_signing_key import recorded_keys
from kvcustody.governance.service.access.principal_table import KeySource
from standins.audit.documents import verify_certificate
from standins.console.web_world import World, policy_source, write_draft

pytestmark = pytest.mark.system

SignIn = Callable[..., Any]


def test_a_denial_and_its_rule(sign_in: SignIn) -> None:
    page = sign_in("tenant-viewer@acme")
    page.get_by_role("link", name="Decisions").click()
    row = page.get_by_role("row").filter(has_text="no-restricted")
    assert row.get_by_role("cell").all_inner_texts()[:5] == ["acme", "acme", "no-restricted", "1", "41"]
    row.get_by_role("link", name="in the ledger").click()
    page.get_by_role("link", name="41 requests of acme").first.click()
    assert "no-restricted" in page.locator("dl").inner_text()
    assert page.goto("/console/decisions?tenant=labs").status == 404  # the opposite: whose denials these are not


def test_a_proof_is_checked_in_the_browser(sign_in: SignIn) -> None:
    page, tamper = sign_in("auditor"), "nothing"
    page.route("**/v1/audit/proofs/inclusion*", lambda route: _tampered(route, tamper))
    page.goto("/console/audit?tenant=acme&kind=receipt")
    page.locator("tbody a").first.click()
    verdict = page.locator("#verify-result strong")
    for tamper in ("leaf", "path", "opening", "root", "signature", "log", "index", "shorter"):
        _verify(page)
        assert (verdict.inner_text(), page.locator("li.no").count()) == ("Not verified", 1), tamper
    tamper = "nothing"
    _verify(page)
    assert (verdict.inner_text(), page.locator("li.no").count()) == ("Verified", 0)


def _verify(page: Any) -> None:
    page.get_by_role("button", name="Verify in this browser").click()
    expect(page.locator("#verify-button")).to_be_enabled()


def _tampered(route: Any, what: str) -> None:
    answer = route.fetch()
    given = answer.json()
    lines = given["proof"].split("\n")
    extra = next(place for place, line in enumerate(lines) if line.startswith("extra "))
    signed = next(place for place, line in enumerate(lines) if line.startswith("— "))
    places = {
        "path": (2, 0),
        "opening": (extra, 20),
        "root": (signed - 2, 0),
        "signature": (signed, len(lines[signed]) - 20),
        "log": (extra, len(lines[extra]) - 6),
    }
    if what == "leaf":
        given["canonical"] = given["canonical"].replace('"acme"', '"labs"')
    elif what == "index":
        lines[1] = f"index {int(lines[1].split()[1]) ^ 1}"
    elif what == "shorter":
        del lines[2]
    elif what in places:
        place, cut = places[what]
        line = lines[place]
        lines[place] = line[:cut] + ("B" if line[cut] != "B" else "C") + line[cut + 1 :]
    given["proof"] = "\n".join(lines)
    route.fulfill(response=answer, json=given)


def test_a_key_that_changed_is_not_believed(sign_in: SignIn, world: World) -> None:
    page = sign_in("auditor")
    origin = recorded_keys(world.service.engine)[-1].key.name
    page.evaluate("([name]) => localStorage.setItem(name, 'another+00000000+AAAA')", [f"kvcustody-ledger-key:{origin}"])
    page.goto("/console/audit?tenant=acme&kind=receipt")
    page.locator("tbody a").first.click()
    page.get_by_role("button", name="Verify in this browser").click()
    expect(page.locator("#verify-result")).to_contain_text("not the one that this browser knows")


def test_a_policy_from_draft_to_effect(sign_in: SignIn, world: World) -> None:
    author, approver, owner = (sign_in(name) for name in ("author", "approver", "tenant-admin@acme"))
    author.goto("/console/policy/draft")
    write_draft(author, policy_source().replace("effect: permit", "effect: allow", 1))
    author.get_by_role("button", name="Check").click()
    assert "cannot be proposed" in author.locator("#checked").inner_text()  # the opposite: a problem under its line
    assert author.locator(".source .wrong .say").count() >= 1
    write_draft(author, policy_source())
    author.get_by_role("button", name="Check").click()
    assert "its isolation is proved" in author.locator("#checked").inner_text()
    author.get_by_label("Why, for the record").fill("first <b>revision</b>")
    _sign(author, world, "author", "Sign and propose")
    author.wait_for_url("**/console/policy/1")
    assert author.get_by_role("button", name="Sign and approve").count() == 0  # nobody approves what they proposed

    approver.goto("/console/policy/1")
    _sign(approver, world, "author", "Sign and approve")  # the opposite: another person's key
    expect(approver.locator(".sign-result").first).to_contain_text("signed by the principal who sends it")
    _sign(approver, world, "approver", "Sign and approve")
    expect(approver.get_by_text("Approved by approver")).to_be_visible()
    assert approver.get_by_role("button", name="Sign and activate").is_disabled()  # an owner has not consented

    owner.goto("/console/policy")
    assert "labs" in owner.locator("main").inner_text()
    while owner.locator("form[data-sign]").count():
        before = owner.locator("form[data-sign]").count()
        form = owner.locator("form[data-sign]").first
        form.locator("input[type=file]").set_input_files(world.signing_key("tenant-admin@acme"))
        form.locator("button").click()
        expect(owner.locator("form[data-sign]")).to_have_count(before - 1)

    approver.reload()
    _sign(approver, world, "approver", "Sign and activate")
    expect(approver.get_by_text("Released; no worker is on record as running it")).to_be_visible()
    world.worker.activate(1, policy_source())
    approver.reload()
    expect(approver.get_by_text("In effect on 1 worker", exact=True)).to_be_visible()
    assert world.service.policies.state().active_revision == 1
    approver.goto("/console/")
    assert "Isolation proved" in approver.locator(".tiles").inner_text()
    approver.goto("/console/decisions?reader=labs&owner=acme&classification=restricted&via=grant")
    assert "deny" in approver.locator(".notice").inner_text()
    assert "no-restricted" in approver.locator("main").inner_text()


def test_an_owner_takes_a_grant_back(sign_in: SignIn, world: World) -> None:
    """What is its own is on its page, and goes by its signature; another's signature is refused before."""
    world.release()
    owner = sign_in("tenant-admin@acme")
    owner.goto("/console/grants")
    id_ = owner.get_by_label("Grant or segment").input_value()
    owner.get_by_label("Reason").fill("over <b>now</b>")
    _sign(owner, world, "approver", "Sign and take back")  # the opposite: another person's key
    expect(owner.locator(".sign-result")).to_contain_text("signed by the principal who sends it")
    assert id_ not in world.service.policies.state().revoked
    _sign(owner, world, "tenant-admin@acme", "Sign and take back")
    expect(owner.get_by_role("row").filter(has_text=id_).first).to_contain_text("revoked")
    assert id_ in world.service.policies.state().revoked


def test_a_custodian_ends_somebody(sign_in: SignIn, world: World) -> None:
    """One key goes at a click, the principal once its name was typed; the last custodian stays."""
    prefix = world.keys["tenant-viewer@labs"].split("_")[1]
    issued = world.service.principals.issue_key(
        "tenant-viewer@labs", days=1, source=KeySource(prefix, None), by="tenant-viewer@labs"
    )
    custodian = sign_in("key-custodian")
    custodian.goto("/console/principals?name=tenant-viewer%40labs")
    kept = custodian.get_by_role("row").filter(has=custodian.get_by_role("button", name=f"Keep {issued.prefix}"))
    expect(kept).to_contain_text(prefix)
    custodian.get_by_role("button", name=f"Keep {issued.prefix}").click()
    expect(custodian.get_by_role("button", name=f"Keep {issued.prefix}")).to_have_count(0)
    custodian.get_by_role("button", name=f"Revoke {prefix}").click()
    expect(custodian.get_by_role("row").filter(has_text=prefix)).to_contain_text("revoked")
    custodian.get_by_label("Type its name").fill("somebody else")
    custodian.get_by_role("button", name="End", exact=True).click()
    expect(custodian.locator("main")).to_contain_text("cannot be undone here")
    custodian.goto("/console/principals?name=tenant-viewer%40labs")
    custodian.get_by_label("Type its name").fill("tenant-viewer@labs")
    custodian.get_by_role("button", name="End", exact=True).click()
    expect(custodian.get_by_text("disabled").first).to_be_visible()
    assert world.service.principals.get("tenant-viewer@labs").disabled_us is not None
    custodian.goto("/console/principals?name=key-custodian")
    custodian.get_by_label("Type its name").fill("key-custodian")
    custodian.get_by_role("button", name="End", exact=True).click()
    expect(custodian.locator("main")).to_contain_text("the last principal who manages keys")


def _sign(page: Any, world: World, name: str, button: str) -> None:
    form = page.locator("form[data-sign]").filter(has=page.get_by_role("button", name=button))
    form.locator("input[type=file]").set_input_files(world.signing_key(name))
    form.get_by_role("button", name=button).click()


def test_a_subject_is_erased_and_the_certificate_holds(sign_in: SignIn, world: World) -> None:
    page = sign_in("tenant-admin@acme")
    page.goto("/console/custody")
    page.get_by_label("Subject").fill("user-2")
    page.get_by_role("button", name="Show").last.click()
    button = page.get_by_role("button", name="Erase")
    assert button.is_disabled()  # the opposite: nothing happens before the name is typed
    page.get_by_label("Type user-2 to confirm").fill("user-2")
    button.click()
    page.wait_for_url("**/console/erasures/*")
    assert "Waiting for worker" in page.locator("main").inner_text()
    files = {}
    for name in ("Certificate (JSON)", "Opening"):
        with page.expect_download() as caught:
            page.get_by_role("link", name=name).click()
        files[name] = caught.value.path().read_bytes()
    key = read_signing_key(world.service.settings.signing_key_path)
    opening = SelectorOpening(**orjson.loads(files["Opening"]))
    found = verify_certificate(files["Certificate (JSON)"], [str(key.verifier)], opening)
    assert (found.ok, found.shown["outcome"], found.shown["opened"]) == (True, "partial", True)
    assert b"user-2" not in files["Certificate (JSON)"]
    erasure = page.url.rpartition("/")[2]
    foreign = sign_in("tenant-admin@labs")
    assert foreign.goto(f"/console/erasures/{erasure}").status == 404
    assert foreign.goto("/console/erasures/ffff").status == 404
    viewer = sign_in("tenant-viewer@acme")
    assert viewer.request.get(f"{page.url}/certificate.json").status == 404
    assert viewer.goto("/console/custody/subject?tenant=labs&subject=user-1").status == 404


def test_a_report_is_made_and_downloaded(sign_in: SignIn, world: World) -> None:
    page = sign_in("tenant-viewer@acme")
    page.goto("/console/reports")
    page.get_by_label("Framework").select_option("soc2")
    page.get_by_role("button", name="Make it").click()
    with page.expect_download(timeout=300_000) as caught:
        page.get_by_role("link", name="report.json").click(timeout=240_000)
    report = orjson.loads(caught.value.path().read_bytes())
    assert report["asked"]["tenant"] == "acme"
    assert b"labs" not in caught.value.path().read_bytes()
    other = sign_in("auditor")
    assert other.goto(page.url).status == 404  # a job is its principal's own
