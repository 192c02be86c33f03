"""Six questions of an auditor and six of a data protection officer, answered in at most three steps each.

In the browser a step follows a link or sends a form, from the Overview page on; in the terminal it is a command.
"""

from __future__ import annotations

import html
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urljoin

import httpx
import pytest
from typer.testing import CliRunner

from kvcustody.audit.kinds import HitCounters
from kvcustody.console.main import app
from kvcustody.times import iso
from standins.console.web_world import World

STEPS_MAX = 3
Visitor = Callable[[str], httpx.Client]
Click = str | dict[str, str]  # a link's words, or what a form is sent with


class Question(NamedTuple):
    asks: str
    who: str
    clicks: tuple[Click, ...]
    commands: tuple[tuple[str, ...], ...]
    answer: str  # what page and terminal say, as a pattern; `{name}` of what the world recorded


QUESTIONS = (
    Question(
        "who read the ledger?", "auditor",
        ("Audit explorer", "access"), (("audit", "query", "--kind", "access"),), "dpo read the ledger"),
    Question(
        "what did labs reuse of acme in a period?", "auditor",
        ("Reuse", {"owner": "acme", "reader": "labs", "since": "{since}"}),
        (("custody", "reuse", "--owner", "acme", "--reader", "labs", "--since", "{since}"),),
        "labs-reads-acme.*1,?344"),
    Question(
        "what was denied, by which rule?", "auditor",
        ("Decisions",), (("custody", "denials"),), "no-restricted.*41"),
    Question(
        "which erasures are late?", "auditor",
        ("Erasures",), (("erasure", "list"),), "{missed}.*missed|missed.*{missed}"),
    Question(
        "who changed the policy?", "auditor",
        ("Policy",), (("audit", "query", "--kind", "release-step"),), "author.*approver|approver.*author"),
    Question(
        "what is overdue?", "auditor",
        ("Deletion",), (("coverage", "show"),), "overdue|late"),
    Question(
        "what is held of this person, and until when?", "dpo",
        ("Custody", {"tenant": "acme", "subject": "user-1"}),
        (("subject", "show", "--tenant", "acme", "--subject", "user-1"),), "own-scope"),
    Question(
        "which requests of people are open, and when are they due?", "dpo",
        ("Cases",), (("case", "list"),), "{case}.*{due}"),
    Question(
        "has every worker answered this erasure?", "dpo",
        ("Erasures", "{missed}"), (("erasure", "list"), ("erasure", "status", "{erasure}")), "worker"),
    Question(
        "what is left to do in this case?", "dpo",
        ("Cases", "{case}"), (("case", "show", "{whole_case}"),), "verify the person.s identity"),
    Question(
        "what did the auditor look at?", "dpo",
        ("Audit explorer", {"kind": "access", "actor": "auditor"}),
        (("audit", "query", "--kind", "access", "--actor", "auditor"),), "auditor read the ledger about acme"),
    Question(
        "what is overdue?", "dpo",
        ("Inbox",), (("inbox",),), "overdue.*erasure|erasure.*overdue"),
)  # fmt: skip


class Walk:
    """Pages that somebody goes through from the Overview on."""

    def __init__(self, client: httpx.Client) -> None:
        self._client, self.steps = client, 0
        self._answer = client.get("/console/")

    @property
    def text(self) -> str:
        """What the page shows, in one line."""
        shown = self._answer.text.partition("</h1>")[2]
        return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", shown)).split())

    def follow(self, words: str) -> None:
        """Follow the page's link with these words."""
        page = self._answer.text
        found = [href for href, inside in re.findall(r'<a [^>]*?href="([^"]+)"[^>]*>(.*?)</a>', page, re.DOTALL)
                 if re.sub(r"<[^>]*>", "", inside).strip() == words]  # fmt: skip
        assert found, f"no link `{words}` on {self._answer.url}"
        self._get(html.unescape(found[0]))

    def send(self, fields: dict[str, str]) -> None:
        """Send the first form of the page that is a question and has these fields."""
        for head, form in re.findall(r'<form method="get"([^>]*)>(.*?)</form>', self._answer.text, re.DOTALL):
            if fields.keys() <= {*re.findall(r'name="(\w+)"', form)}:
                action = re.search(r'action="([^"]+)"', head)
                place = self._answer.url.path if action is None else action[1]
                self._get(str(httpx.URL(place, params=fields)))
                return
        pytest.fail(f"no form with {', '.join(fields)} on {self._answer.url}")

    def _get(self, address: str) -> None:
        self.steps += 1
        self._answer = self._client.get(urljoin(str(self._answer.url), address))
        assert self._answer.status_code == 200, address


@pytest.fixture(scope="module")
def recorded(world: World) -> dict[str, str]:
    """What happened: a policy, reuse between tenants, a missed erasure, a case, and somebody who looked."""
    world.release()
    now = world.worker.now_us
    world.worker.ship(
        [HitCounters(now, "labs", "acme", "reuse", "permit", "labs-reads-acme", 1, now - 60_000_000, 12, 84, 1344)]
    )
    call = httpx.Client(base_url=world.url, headers={"Authorization": f"Bearer {world.keys['dpo']}"}, timeout=30)
    erased = {"tenant": "acme", "subject": "user-1", "deadline_seconds": 1}
    asked = {"tenant": "acme", "subject": "user-1", "right": "access", "channel": "mail"}
    with call:
        erasure = call.post("/v1/erasures", json=erased, headers={"Idempotency-Key": "late"}).json()["erasure"]
        case = call.post("/v1/cases", json=asked, headers={"Idempotency-Key": "case"}).json()
        for who in ("dpo", "auditor"):
            call.get("/v1/custody/live?tenant=acme", headers={"Authorization": f"Bearer {world.keys[who]}"})
        until = time.monotonic() + 60
        while call.get(f"/v1/erasures/{erasure}").json()["state"] != "missed" and time.monotonic() < until:
            time.sleep(0.2)
    since = iso(world.service.clock.utc_us() - 3_600_000_000)[:19]
    return {
        "since": since,
        "missed": erasure[:12],
        "erasure": erasure,
        "case": case["case_id"][:12],
        "whole_case": case["case_id"],
        "due": case["due_day"],
    }


@pytest.mark.parametrize("case", QUESTIONS, ids=lambda case: f"{case.who}: {case.asks}")
def test_a_question_is_answered_in_the_browser(
    world: World, visitor: Visitor, recorded: dict[str, str], case: Question
) -> None:
    walk = Walk(visitor(case.who))
    for click in case.clicks:
        if isinstance(click, str):
            walk.follow(click.format(**recorded))
        else:
            walk.send({name: value.format(**recorded) for name, value in click.items()})
    assert walk.steps <= STEPS_MAX
    assert re.search(case.answer.format(**recorded), walk.text), walk.text


@pytest.mark.parametrize("case", QUESTIONS, ids=lambda case: f"{case.who}: {case.asks}")
def test_a_question_is_answered_in_the_terminal(
    world: World, recorded: dict[str, str], case: Question, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)
    key = tmp_path / "api.key"
    key.write_text(world.keys[case.who])
    key.chmod(0o600)
    assert len(case.commands) <= STEPS_MAX
    printed = ""
    for words in case.commands:
        is_local = words[0] == "coverage"  # asked of the ledger itself
        of = ["--ledger", world.database_url] if is_local else ["--server", world.url, "--api-key-file", str(key)]
        done = CliRunner().invoke(app, [*(word.format(**recorded) for word in words), *of])
        assert done.exit_code in (0, 1), done.output
        printed = " ".join(done.output.split())
    assert re.search(case.answer.format(**recorded), printed), printed
