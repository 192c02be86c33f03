"""The draft page: how the text differs, test cases and a simulation beside the check."""

from __future__ import annotations

import re

import httpx
import pytest

from kvcustody.console.web.source_listing import DiffLine, Line, marked, text_diff
from standins.console.web_world import World, policy_source

CASES = """\
schema: kvcustody/policy-tests@1
cases:
  - name: own reuse
    ask: {reader: acme, classification: internal}
    expect: EXPECTED
"""


def checked(world: World, **fields: str) -> str:
    world.release()
    with httpx.Client(base_url=world.url, timeout=60) as client:
        assert client.post("/console/login", data={"key": world.keys["author"]}).status_code == 303
        [token, *_] = re.findall(r'name="csrf" value="(\w+)"', client.get("/console/policy/draft").text)
        return client.post("/console/policy/draft", data={"csrf": token, **fields}).text


@pytest.mark.system("a draft's page shows another difference")
def test_a_draft_shows_how_its_text_differs(world: World) -> None:
    source = policy_source()
    page = checked(world, source=source.replace("until: 2027-03-31", "until: 2028-03-31"))
    assert re.search(r'data-n="−" class="wrong"><code>[^<]*until: 2027-03-31', page)
    assert re.search(r'data-n="\+" class="target"><code>[^<]*until: 2028-03-31', page)
    assert "The text is that of what is in effect." in checked(world, source=source)


@pytest.mark.parametrize(("expected", "says"), [("permit", "1 of 1 checks pass"), ("deny", "0 of 1 checks pass")])
def test_cases_run_with_the_check(world: World, expected: str, says: str) -> None:
    assert says in checked(world, source=policy_source(), cases=CASES.replace("EXPECTED", expected))


def test_cases_that_cannot_be_read_are_said_with_their_line(world: World) -> None:
    page = checked(world, source=policy_source(), cases="cases: [a\nb: c\n")
    assert "The cases cannot be read." in page and "close the `[` that opens on line 1" in page


def test_recorded_requests_are_decided_again_only_where_that_is_asked_for(world: World) -> None:
    page = checked(world, source=policy_source(), simulate="1")
    assert '<caption class="hidden">Simulation</caption>' in page and '<td class="left tenant">acme</td>' in page
    assert "<h2>Simulation</h2>" not in checked(world, source=policy_source())


def test_a_comparison_of_texts() -> None:
    assert text_diff("a\nb", "a\nb") == []
    assert text_diff("a\nb\nc", "a\nx\nc") == [
        DiffLine("", "a"),
        DiffLine("removed", "b"),
        DiffLine("added", "x"),
        DiffLine("", "c"),
    ]
    far = "\n".join(str(number) for number in range(40))
    assert text_diff(far, far + "\nend") == [
        DiffLine("skipped", "line 39"),
        DiffLine("", "38"),
        DiffLine("", "39"),
        DiffLine("added", "end"),
    ]
    assert text_diff("x", "y\n" * 6_000) is None


def test_what_may_not_be_meant_is_shown_with_the_lines_around_it() -> None:
    lines = [Line(number, f"line {number}", "doubt" if number in (3, 20) else "", ()) for number in range(1, 31)]
    assert [line.number for line in marked(lines)] == [1, 2, 3, 4, 5, 18, 19, 20, 21, 22]
    assert marked(lines[3:19]) == [], "nothing is marked"
