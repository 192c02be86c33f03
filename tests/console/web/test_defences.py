"""What must have no effect on the console: other sites' forms, frames, markup in stored texts, foreign tenants."""

from __future__ import annotations

import html
import re
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from standins.console.web_world import MARKUP, TRACE, World

pytestmark = pytest.mark.system

FORM = {"Content-Type": "application/x-www-form-urlencoded"}
ERASE = "tenant=acme&subject=user-9&sure=user-9&deadline_seconds=60&once=form-1"
SignIn = Callable[..., Any]


@pytest.fixture
def signed_in(world: World) -> Callable[[str], httpx.Client]:
    """A client with a session, without a browser."""

    def make(name: str) -> httpx.Client:
        client = httpx.Client(base_url=world.url)
        answer = client.post("/console/login", data={"key": world.keys[name]})
        assert answer.status_code == 303 and "SameSite=Strict" in answer.headers["set-cookie"]
        return client

    return make


def _token(client: httpx.Client) -> str:
    return client.get("/console/").text.partition('name="csrf" value="')[2].partition('"')[0]


def test_without_a_session_there_is_the_sign_in_alone(world: World) -> None:
    for path in ("/console/", "/console/audit", "/console/nothing", "/console/policy/step"):
        answer = httpx.get(world.url + path)
        assert (answer.status_code, answer.headers["location"].partition("?")[0]) == (303, "/console/login")
    refused = httpx.post(world.url + "/console/login", data={"key": "kvc_wrong"})
    assert refused.status_code == 401 and "set-cookie" not in refused.headers


def test_a_page_says_which_methods_it_has(world: World, signed_in: Callable[[str], httpx.Client]) -> None:
    """Control: each of them is another answer."""
    client = signed_in("dpo")
    for path, methods in (
        ("/console/erasures", "GET, HEAD, POST"),
        ("/console/audit", "GET, HEAD"),
        ("/console/login", "GET, HEAD, POST"),
        ("/console/logout", "POST"),
        ("/console/principals/keep", "POST"),
        ("/console/nothing", "GET, HEAD, POST"),
    ):
        token = {"X-CSRF-Token": _token(client), "Origin": world.url}
        answer = client.delete(path, headers=token)
        assert (answer.status_code, answer.headers.get("allow")) == (405, methods), path
        assert all(client.request(one, path).status_code != 405 for one in methods.split(", ") if one != "POST")
    link = client.head("/console/link/0123")
    assert (link.status_code, link.headers.get("allow")) == (405, "GET")


@pytest.mark.parametrize("after", ["https://evil.test/", "//evil.test", "/console//evil.test", "/console/\\evil", "x"])
def test_signing_in_leads_nowhere_else(world: World, after: str) -> None:
    answer = httpx.post(world.url + "/console/login", data={"key": world.keys["auditor"], "next": after})
    assert answer.headers["location"] == "/console/"
    kept = {"key": world.keys["auditor"], "next": "/console/audit?kind=receipt"}
    assert httpx.post(world.url + "/console/login", data=kept).headers["location"] == kept["next"]


def test_an_act_needs_the_token_of_its_session(world: World, signed_in: Callable[[str], httpx.Client]) -> None:
    client, other = signed_in("dpo"), signed_in("dpo")
    before = client.get("/v1/erasures").json()["items"]
    for token in ("", "&csrf=", f"&csrf={'0' * 64}", f"&csrf={_token(other)}"):
        assert client.post("/console/erasures", content=ERASE + token, headers=FORM).status_code == 403
    elsewhere = {**FORM, "Origin": "https://evil.test"}
    good = f"{ERASE}&csrf={_token(client)}"
    assert client.post("/console/erasures", content=good, headers=elsewhere).status_code == 403
    assert (
        client.post("/console/erasures", content=good, headers={**FORM, "Sec-Fetch-Site": "cross-site"}).status_code
        == 403
    )
    assert client.get("/v1/erasures").json()["items"] == before
    assert client.post("/console/erasures", content=good, headers=FORM).status_code == 303  # the control
    assert len(client.get("/v1/erasures").json()["items"]) == len(before) + 1
    again = client.post("/console/erasures", content=good, headers=FORM)  # a double click
    assert again.status_code == 303 and len(client.get("/v1/erasures").json()["items"]) == len(before) + 1
    without = good.replace("&once=form-1", "")
    assert client.post("/console/erasures", content=without, headers=FORM).status_code == 400


def test_signing_out_ends_the_session(signed_in: Callable[[str], httpx.Client]) -> None:
    client = signed_in("auditor")
    cookie = dict(client.cookies)
    assert client.get("/console/audit").status_code == 200
    client.post("/console/logout", content=f"csrf={_token(client)}", headers=FORM)
    client.cookies.update(cookie)
    assert client.get("/console/audit").status_code == 303


def test_no_page_is_framed(world: World, sign_in: SignIn) -> None:
    page = sign_in("auditor")
    policy = page.goto("/console/audit").headers
    assert "frame-ancestors 'none'" in policy["content-security-policy"] and policy["x-frame-options"] == "DENY"
    assert "unsafe" not in policy["content-security-policy"]
    page.route("http://evil.test/**", lambda route: route.fulfill(
        content_type="text/html", body=f'<iframe src="{world.url}/console/login"></iframe>'
    ))  # fmt: skip
    page.goto("http://evil.test/")
    frame = page.frames[-1]
    assert frame.url.startswith("chrome-error:") and frame.get_by_label("API key").count() == 0


def test_stored_markup_does_nothing(world: World, sign_in: SignIn) -> None:
    world.release(MARKUP)
    world.worker.strange("labs", MARKUP)
    page = sign_in("auditor")
    shown = 0
    paths = (
        "/",
        "/policy",
        "/policy/1",
        "/deletion",
        "/custody",
        "/audit?kind=orphan-found",
        "/audit?kind=access",
    )
    for path in (*paths, "/custody/subject?tenant=labs&subject=user-3", "/erasures", "/decisions"):
        page.goto("/console" + path)
        assert page.evaluate("window.broken") is None, path
        shown += page.locator("img[src=x]").count()
        shown += page.locator("main script").count()
    assert shown == 0
    page.goto("/console/deletion")
    assert MARKUP in page.locator("main").inner_text()  # it is there, as the text that it is
    page.goto(f"/console/audit?actor={MARKUP}&tenant=acme")
    assert page.evaluate("window.broken") is None and page.get_by_label("Actor").input_value() == MARKUP
    inert = page.evaluate("async () => { const s = document.createElement('script'); s.textContent = 'window.broken=1';"
                          " document.body.append(s); return window.broken; }")  # fmt: skip
    assert inert is None  # and if a page did hold a script, the policy of content would not let it run


def test_absent_and_foreign_are_one_page(world: World, signed_in: Callable[[str], httpx.Client]) -> None:
    client = signed_in("tenant-viewer@acme")
    pairs = [
        ("/console/audit?tenant=labs", "/console/audit?tenant=nobody"),
        ("/console/audit/event?log=tenant/labs&idx=0", "/console/audit/event?log=tenant/nobody&idx=0"),
        ("/console/audit/event?log=system&idx=0", "/console/audit/event?log=tenant/acme&idx=999999"),
        (
            "/console/custody/subject?tenant=labs&subject=user-1",
            "/console/custody/subject?tenant=nobody&subject=user-1",
        ),
        ("/console/cases/" + "ab" * 16, "/console/nothing"),
        ("/console/reports/" + "ab" * 16, "/console/nothing"),
    ]
    for foreign, absent in pairs:
        one, other = client.get(foreign), client.get(absent)
        assert (one.status_code, _main(one.text)) == (404, _main(other.text)), foreign
    world.worker.strange("umbra", "umbra-secret")
    auditor, pages = (
        signed_in("auditor"),
        ("", "audit", "cases", "custody", "deletion", "erasures", "decisions", "reports"),
    )
    assert all("umbra" not in _main(client.get(f"/console/{name}").text) for name in pages)
    seen = [name for name in pages if "umbra" in _main(auditor.get(f"/console/{name}").text)]
    assert {"", "custody", "deletion", "decisions"} <= set(seen)  # the control: whoever sees all does see it
    for path in ("/console/policy", "/console/grants", "/console/health", "/console/policy/1"):
        assert client.get(path).status_code == 403


def _main(text: str) -> str:
    return text.partition("<main")[2].partition("</main>")[0]


def test_reads_by_those_who_see_all_are_on_record(world: World, signed_in: Callable[[str], httpx.Client]) -> None:
    client = signed_in("dpo")
    client.get("/console/custody/subject?tenant=acme&subject=user-1")
    found = client.get("/v1/audit/events?kind=access&actor=dpo&limit=1000").json()["items"]
    leaf = [item["leaf"] for item in found if item["leaf"]["operation"] == "consoleSubject"][-1]
    assert (leaf["of_tenant"], leaf["filters"]) == ("acme", ["subject", "tenant"])
    assert all("user-1" not in str(item["leaf"]) for item in found)


def test_a_trace_is_followed_from_one_event_to_the_others(signed_in: Callable[[str], httpx.Client]) -> None:
    auditor, viewer = signed_in("auditor"), signed_in("tenant-viewer@labs")
    found = auditor.get(f"/console/audit?trace={TRACE}").text
    place = re.search(r"/console/audit/event\?log=tenant/acme&amp;idx=\d+", found)
    assert place is not None and "residency-opened" in found and "receipt</code></td>" not in found
    event = auditor.get(html.unescape(place[0])).text
    assert f'<a href="/console/audit?trace={TRACE}"><code>{TRACE}</code></a>' in event
    assert "No event fits" in viewer.get(f"/console/audit?trace={TRACE}").text
    assert "No event fits" in auditor.get(f"/console/audit?trace={'ab' * 16}").text


def test_wrong_parameters_are_a_page(signed_in: Callable[[str], httpx.Client]) -> None:
    client = signed_in("auditor")
    for path in ("audit?kind=none", "audit?revision=1e9", "audit?since=yesterday", "audit?actor=%00",
                 "audit?trace=x", "audit?trace=" + "0" * 32, "audit?block=x", "audit?block=a:b:c",
                 "audit?actor=a%0ab", "audit?tenant=" + "a" * 300, "custody/subject?subject=x"):  # fmt: skip
        answer = client.get(f"/console/{path}")
        assert (answer.status_code, "<h1>" in answer.text) == (422, True), path
    assert client.get("/console/audit?cursor=abc").status_code == 400
    assert client.get("/console/policy/99999999999").status_code == 404
