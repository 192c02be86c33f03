"""The overview shows what was judged and counted, with its age, and looks at no row of custody."""

from __future__ import annotations

import re
from typing import Any

import httpx
import pytest
from sqlalchemy import event

from kvcustody.audit.evidence.counters.judge_hours import judge
from kvcustody.audit.evidence.counters.read_figures import event_counts
from kvcustody.errors import PolicyError
from kvcustody.governance.release.replay_records import fold
from kvcustody.governance.service.fleet import policy_releases
from standins.console.web_world import World

CUSTODY = ("custody_ends", "receipts", "releases", "residencies", "attachments", "decisions", "hit_counters")


@pytest.mark.parametrize("who", ["auditor", "tenant-viewer@acme"])
def test_the_overview_reads_figures(world: World, who: str) -> None:
    service, heard = world.service, list[str]()
    assert service.writer.seal()  # verdicts are of the newest checkpoint
    assert judge(service.reader, service.engine, now_us=service.clock.utc_us()) is not None

    def hear(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        heard.append(statement)

    with httpx.Client(base_url=world.url, timeout=30) as client:
        assert client.post("/console/login", data={"key": world.keys[who]}).status_code == 303
        event.listen(service.reader, "before_cursor_execute", hear)
        try:
            page = client.get("/console/").text
            figures, heard[:] = list(heard), []
            assert client.get("/console/deletion").status_code == 200
            judged, heard[:] = list(heard), []
            assert client.get("/console/deletion?recount=1").status_code == 200
        finally:
            event.remove(service.reader, "before_cursor_execute", hear)

    def asked(statements: list[str]) -> set[str]:
        text = "\n".join(statements)
        return {name for name in CUSTODY if re.search(rf"\b(from|join) {name}\b", text, re.IGNORECASE)}

    assert re.search(r"deletion coverage, last 24 hours, judged .+ ago", page) and "acme" in page
    assert any("counters" in statement for statement in figures) and not asked(figures)
    assert any("coverage_hours" in statement for statement in judged) and not asked(judged)
    assert asked(heard) >= {"custody_ends", "releases"}  # control: the page that computes is heard


def test_the_explorer_counts_kinds_and_outcomes_by_figures(world: World) -> None:
    with httpx.Client(base_url=world.url, timeout=30) as client:
        assert client.post("/console/login", data={"key": world.keys["auditor"]}).status_code == 303
        page = client.get("/console/audit", params={"tenant": "acme", "kind": "residency-released"}).text
        every = client.get("/console/audit").text
    with world.service.reading() as connection:
        mine, whole = event_counts(connection, tenant="acme"), event_counts(connection)
    released = {row.outcome: row.events for row in mine if row.kind == "residency-released"}
    assert f">residency-released ({sum(released.values()):,})</option>" in page and released
    for outcome, number in released.items():
        assert re.search(rf'outcome={outcome}[^>]*>{outcome}</a> <span class="quiet">{number:,}<', page), outcome
    opened = sum(row.events for row in whole if row.kind == "residency-opened")
    assert f">residency-opened ({opened:,})</option>" in every
    assert opened > sum(row.events for row in mine if row.kind == "residency-opened")  # of others too


def test_the_overview_verifies_the_release_and_reads_erasures_once(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.release()
    folds, heard = list[int](), list[str]()

    def counted(records: list[bytes], trust: Any) -> Any:
        folds.append(len(records))
        return fold(records, trust)

    def hear(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        heard.append(statement)

    monkeypatch.setattr(policy_releases, "fold", counted)
    with httpx.Client(base_url=world.url, timeout=30) as client:
        assert client.post("/console/login", data={"key": world.keys["auditor"]}).status_code == 303
        event.listen(world.service.reader, "before_cursor_execute", hear)
        try:
            pages = [client.get("/console/").text for _ in range(2)]
        finally:
            event.remove(world.service.reader, "before_cursor_execute", hear)
    assert all("Isolation proved" in page for page in pages)
    assert len(folds) <= 1  # of two pages
    asked = [text for text in heard if re.search(r"from erasures\b", text, re.IGNORECASE)]
    assert len(asked) == 2


def test_a_record_that_was_changed_is_verified_again(world: World) -> None:
    world.release()
    policies = world.service.policies
    before = policies.released()
    assert before is policies.released() and before is not None
    records = policies.records()

    class Changed:
        def read(self, after: int = 0) -> list[bytes]:
            return [*records[:-1], records[-1].replace(b'"', b"'", 1)]

    kept, policies._store = policies._store, Changed()  # type: ignore[assignment]
    try:
        with pytest.raises(PolicyError):
            policies.released()
    finally:
        policies._store = kept
