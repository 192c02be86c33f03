"""The draft page's editor in a real browser: completion of the one schema, problems of the one validator."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import expect

from kvcustody.console.web.rendering import STATIC_FILES
from kvcustody.policies.workbench.json_schema import schema
from kvcustody.policies.workbench.validate import validate
from standins.console.web_world import World, policy_source, write_draft

pytestmark = pytest.mark.system

ROOT = Path(__file__).resolve().parents[4]
SignIn = Callable[..., Any]
NAMES = """\
schema: kvcustody/policy@1
classifications: [low, high]
labels: {region: [eu, us]}
tenants:
  acme: {}
  labs: {}
  default: {tenants_max: 5}
groups: {family: {share: false}}
eviction: {policy: priority, kinds: {log: 5}}
"""


@pytest.fixture
def page(world: World, sign_in: SignIn) -> Any:
    """The draft page with its editor open; what the policy of content refuses is noted."""
    world.release()
    page = sign_in("author", viewport={"width": 1280, "height": 900})
    page.add_init_script(
        "window.refused = []; document.addEventListener('securitypolicyviolation', "
        "(event) => window.refused.push(`${event.violatedDirective} ${event.blockedURI}`))"
    )
    page.goto("/console/policy/draft")
    page.locator("#editor-status").wait_for(state="attached")
    return page


def write(page: Any, text: str) -> None:
    """Put a text into the editor, the cursor where it has a `|`."""
    before, _, after = text.partition("|")
    write_draft(page, before + after)
    for _ in after:
        page.keyboard.press("ArrowLeft")
    page.keyboard.press("Escape")


def offered(page: Any, text: str) -> list[str]:
    """What is offered at the `|` of a text."""
    write(page, text)
    page.keyboard.press("Control+Space")
    page.get_by_role("listbox").wait_for()
    labels: dict[str, None] = {}
    chosen = page.locator("[role=option][aria-selected]")
    first = chosen.inner_text()
    while True:  # the list shows some that are around the choice, and one in the middle only when it is chosen
        last = chosen.inner_text()
        labels |= dict.fromkeys(page.locator("[role=option] .cm-completionLabel").all_inner_texts())
        page.wait_for_timeout(100)  # an early key is not taken for a choice
        page.keyboard.press("ArrowDown")
        try:
            expect(chosen).not_to_have_text(last, timeout=1000)
        except AssertionError:
            return list(labels)  # there is one
        if chosen.inner_text() == first:
            return list(labels)  # round once


def source(page: Any) -> str:
    """What the form would send."""
    return page.locator("#source").input_value()  # type: ignore[no-any-return]


def definition(name: str) -> dict[str, Any]:
    found: dict[str, Any] = schema()["$defs"][name]
    return found


def test_keys_are_those_of_the_schema_at_the_place(page: Any) -> None:
    assert set(offered(page, "|")) == set(schema()["properties"])
    written = {"schema", "classifications", "labels", "tenants", "groups", "eviction"}
    assert set(offered(page, NAMES + "|")) == set(schema()["properties"]) - written
    assert set(offered(page, NAMES + "rules:\n  - |")) == set(definition("RuleEntry")["properties"])
    assert set(offered(page, NAMES + "rules:\n  - id: one\n    |\n")) == set(definition("RuleEntry")["properties"]) - {
        "id"
    }
    assert set(offered(page, NAMES + "rules:\n  - id: one\n    when: {|}\n")) == set(
        definition("WhenTerms")["properties"]
    )
    assert set(offered(page, NAMES.replace("labs: {}", "labs: {quota: {|}}"))) == set(
        definition("QuotaTerms")["properties"]
    )
    first, *_ = offered(page, NAMES + "rules:\n  - |")
    assert first in definition("RuleEntry")["required"]  # what is needed comes first


def test_values_are_those_of_the_schema(page: Any) -> None:
    assert offered(page, "profile: |") == schema()["properties"]["profile"]["enum"]
    assert offered(page, "profile: sh|ared\n")[0] == "shared"
    assert offered(page, NAMES.replace("share: false", "share: |")) == ["true", "false"]
    durations = definition("RetentionTerms")["properties"]["idle"]["examples"]
    assert offered(page, NAMES + "retention:\n  low: {idle: |}\n") == durations
    forbids = offered(page, NAMES + "rules:\n  - {id: one, effect: forbid, action: |}\n")
    permits = offered(page, NAMES + "rules:\n  - {id: one, effect: permit, action: |}\n")
    assert set(permits) < set(forbids)  # the schema's own condition
    assert offered(page, NAMES + "segments:\n  - {id: one, tenants: |}\n") == ['"*"']  # quoted, as YAML asks


@pytest.mark.parametrize(
    ("text", "names"),
    [
        (NAMES + "retention:\n  |", {"low", "high"}),
        (NAMES + "retention: {low: {}, |}", {"high"}),
        (NAMES + "scrub:\n  |", {"low", "high", "default"}),
        (NAMES + "grants:\n  - {id: one, at_most: |}", {"low", "high"}),
        (NAMES + "grants:\n  - {id: one, owner: |}", {"acme", "labs"}),
        (NAMES + "segments:\n  - {id: one, tenants: [labs, |]}", {"acme"}),
        (NAMES + "segments:\n  - {id: one, kind: |}", {"log"}),
        (NAMES + "classify:\n  - {tenant: acme, labels: {|}}", {"region"}),
        (NAMES + "classify:\n  - {tenant: acme, labels: {region: |}}", {"eu", "us"}),
        (NAMES + "rules:\n  - {id: one, when: {owner: |}}", {"acme", "labs"}),
        (NAMES.replace("labs: {}", "labs: {group: |}"), {"family"}),
    ],
)
def test_names_are_those_that_the_document_declares(page: Any, text: str, names: set[str]) -> None:
    assert set(offered(page, text)) == names


def test_the_schema_that_is_served_is_the_one_that_commands_print() -> None:
    assert json.loads(STATIC_FILES["policy-schema.json"].content) == schema()
    for name in ("policy-editor.js", "schema-completion.js"):  # and no second list of its words
        text = STATIC_FILES[name].content.decode()
        words = {word for part in [schema(), *schema()["$defs"].values()] for word in part["properties"]}
        strings = set(re.findall(r"""["']([a-z_]+)["']""", text)) & words
        assert strings <= {"schema", "labels"}, name


def test_problems_are_the_validators_under_their_lines(page: Any) -> None:
    wrong = policy_source().replace("effect: permit", "effect: allow", 1)
    (problem,) = validate(wrong, name="policy").problems
    write(page, wrong)
    message = page.locator(".says")
    expect(message).to_have_count(1)
    expect(message).to_contain_text(f"{problem.code} {problem.message}; {problem.hint}")
    line = wrong.split("\n")[problem.line - 1]
    caret = message.locator(".caret").evaluate("element => element.textContent.length")
    assert caret == problem.column and line[problem.column - 1 :].startswith("allow")
    assert page.locator(".cm-lintRange-error").inner_text() == "allow"
    assert message.evaluate("element => element.previousElementSibling.textContent") == line
    status = page.locator("#editor-status")
    expect(status).to_contain_text(f"1 problem. Line {problem.line}: {problem.code}")
    write(page, policy_source())  # the opposite
    expect(status).to_have_text("No problem.")
    expect(message).to_have_count(0)
    assert page.url.endswith("/console/policy/draft") and page.evaluate("window.refused") == []


def test_a_place_past_other_scripts_letters_is_the_right_one(page: Any) -> None:
    """Columns count characters; the browser's offsets do not."""
    text = policy_source() + '\nx: {"\U0001f600\U0001f600": 1, y: yes}\n'
    *_, problem = validate(text, name="policy").problems
    there = text.split("\n")[problem.line - 1][problem.column - 1 :]
    assert there.startswith("yes")
    write(page, text)
    expect(page.locator(".says").last).to_contain_text(problem.code)
    assert page.locator(".cm-lintRange-error").last.inner_text() == "yes"


def test_a_service_that_does_not_answer_is_said(page: Any) -> None:
    page.route("**/v1/policies:validate", lambda route: route.abort())
    write(page, "name: x")
    expect(page.locator("#editor-status")).to_have_text("Not checked: the service does not answer.")


def test_by_keyboard(page: Any) -> None:
    write(page, "pro|")
    page.keyboard.type("f")
    listed = page.get_by_role("listbox")
    expect(listed).to_be_visible()
    editor = page.get_by_role("textbox", name="Document", exact=True)
    assert editor.get_attribute("aria-controls") == listed.get_attribute("id")
    page.wait_for_timeout(100)  # an accidental key is not taken for a choice
    page.keyboard.press("Tab")
    assert source(page) == "profile: "
    expect(listed).to_be_visible()  # its values follow
    page.wait_for_timeout(100)
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    assert source(page) == f"profile: {schema()['properties']['profile']['enum'][1]}"
    page.keyboard.press("Control+Space")
    page.keyboard.press("Escape")
    expect(listed).to_have_count(0)
    page.keyboard.press("Tab")  # out of the editor, on to what comes next
    assert page.evaluate("document.activeElement.tagName") == "SUMMARY"
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Control+Enter")
    page.locator("#checked").wait_for()


def test_to_the_next_problem(page: Any) -> None:
    wrong = policy_source().replace("effect: permit", "effect: allow", 1)
    assert wrong != policy_source()
    write(page, wrong)
    page.locator(".says").wait_for()
    page.keyboard.press("F8")
    page.keyboard.insert_text("permit")  # what is wrong is selected
    expect(page.locator("#editor-status")).to_have_text("No problem.")
    assert source(page) == policy_source()


def test_what_is_checked_is_what_is_written(page: Any, world: World) -> None:
    """Difference, proof, test cases and simulation stay one step away."""
    write(page, policy_source().replace("until: 2027-03-31", "until: 2028-03-31"))
    page.get_by_text("Test cases and simulation").click()
    page.get_by_label("Decide recorded requests again").check()
    page.get_by_role("button", name="Check").click()
    checked = page.locator("#checked")
    for title in ("What it changes", "How the text differs", "Simulation", "Proof"):
        expect(checked.get_by_role("heading", name=title, exact=True)).to_be_visible()
    assert "until: 2028-03-31" in source(page)


def test_nothing_serious_and_nothing_refused(page: Any, sign_in: SignIn) -> None:
    for scheme, width in (("light", 1280), ("dark", 1280), ("light", 390)):
        page.emulate_media(color_scheme=scheme)
        page.set_viewport_size({"width": width, "height": 860})
        write(page, "schema: kvcustody/policy@1\nprofile: open\n|")
        expect(page.locator(".says").first).to_be_visible()
        page.keyboard.press("Control+Space")
        expect(page.get_by_role("listbox")).to_be_visible()
        found = Axe().run(page).response["violations"]
        serious = [
            (item["id"], item["nodes"][0]["html"][:200]) for item in found if item["impact"] in ("serious", "critical")
        ]
        assert serious == [], (scheme, width)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        page.keyboard.press("Escape")
    assert page.evaluate("window.refused") == []
    page.evaluate("document.body.append(Object.assign(document.createElement('style'), {textContent: 'a {}'}))")
    page.wait_for_function("() => window.refused.length === 1")  # what it would look like


def test_without_scripts_it_is_a_field(world: World, browser: Any) -> None:
    world.release()
    context = browser.new_context(base_url=world.url, java_script_enabled=False)
    page = context.new_page()
    page.goto("/console/")
    page.get_by_label("API key").fill(world.keys["author"])
    page.get_by_role("button", name="Sign in").click()
    page.goto("/console/policy/draft")
    page.get_by_label("Document", exact=True).fill("name: x")
    page.get_by_role("button", name="Check").click()
    assert "cannot be proposed" in page.locator("#checked").inner_text()
    context.close()


def test_the_bundle_says_what_is_in_it() -> None:
    """Each package at the version of the lock, with its licence."""
    told = STATIC_FILES["codemirror.js"].content.decode().partition("*/")[0]
    locked = json.loads((ROOT / "packaging" / "editor" / "package-lock.json").read_text())["packages"]
    found = re.findall(r"^((?:@[\w-]+/)?[\w-]+) (\d+\.\d+\.\d+)$", told, re.MULTILINE)
    assert len(found) > 10 and told.count("MIT") >= 1
    assert [(one, locked[f"node_modules/{one}"]["version"]) for one, _ in found] == found
