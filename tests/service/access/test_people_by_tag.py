"""A service whose ledger knows people by tags finds them by name all the same, and nobody without the keys does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from kvcustody.audit.evidence.subjects.subject_key_store import SubjectKeys, is_tag
from kvcustody.audit.kinds import ResidencyOpened
from kvcustody.audit.store.schema.ledger import subjects
from kvcustody.audit.write.event_writer import EventWriter
from kvcustody.clock import SystemClock
from kvcustody.governance.service.service import Service
from standins.service.service_world import Worker, register, ship

ALICE = {"tenant": "acme", "subject": "alice"}


class Desk:
    """A service, somebody who may ask it anything, and how it answers about Alice."""

    def __init__(self, service: Service, client: Any, people: Any) -> None:
        self.service, self.client, self.people = service, client, people

    def custody(self) -> list[str]:
        """Classifications of what was held of her."""
        answer = self.client("GET", "/v1/custody/residencies", self.people["dpo"], params=ALICE)
        assert answer.status_code == 200, answer.text
        return [item["classification"] for item in answer.json()["items"]]

    def erase(self) -> str:
        answer = self.client("POST", "/v1/erasures", self.people["dpo"], json=ALICE)
        assert answer.status_code == 202, answer.text
        return str(answer.json()["erasure"])

    def orders(self) -> dict[str, tuple[bool, str | None]]:
        """By erasure, whether its worker is told who is meant, and who."""
        items = self.client("GET", "/v1/worker/erasures", self.people["worker"]).json()["items"]
        return {item["erasure"]: (item["named"], item["subject_name"]) for item in items}

    def opening(self, erasure: str) -> str:
        found = self.client("GET", f"/v1/erasures/{erasure}/opening", self.people["dpo"])
        return str(found.json()["selector"])

    def stored(self) -> list[str]:
        """How rows name people."""
        with self.service.reading() as connection:
            return list(connection.scalars(select(subjects.c.subject)))


@pytest.fixture
def opened(make_service, make_client, make_people) -> Callable[..., Desk]:
    """A service of this folder; a later one may have the people of an earlier one."""

    def make(earlier: Desk | None = None, **settings: Any) -> Desk:
        service = make_service(**settings)
        people = make_people(service) if earlier is None else earlier.people
        return Desk(service, make_client(service), people)

    return make


def keep_alice(desk: Desk) -> None:
    """Custody of hers, by a worker behind the API."""
    worker = Worker()
    register(desk.client, desk.people["worker"], worker)
    batch = worker.batch([worker.started(), *worker.request("acme", "alice")])
    assert ship(desk.client, desk.people["worker"], worker, batch).status_code == 200


def keep_alice_near(desk: Desk, folder: Path, keys: SubjectKeys) -> None:
    """Custody of hers, by a worker that writes to the ledger itself."""
    clock, spill = SystemClock(), folder / "near"
    writer = EventWriter(desk.service.engine, worker="near", clock=clock, spill_directory=spill, subject_keys=keys)
    writer.submit([event for event in Worker().request("acme", "alice") if isinstance(event, ResidencyOpened)])
    writer.close()


def test_people_are_found_by_name_and_no_row_names_them(opened, tmp_path: Path) -> None:
    desk = opened(subject_keys_url=f"sqlite:///{tmp_path}/people.db")
    keys = SubjectKeys.open(tmp_path / "people.db")
    keep_alice(desk)
    keep_alice_near(desk, tmp_path, keys)
    assert desk.custody() == ["internal"] * 2
    erasure = desk.erase()
    assert desk.orders() == {erasure: (True, "alice")}
    assert "alice" in desk.opening(erasure)
    assert desk.stored() and all(map(is_tag, desk.stored()))
    keys.destroy("acme", "alice")
    keys.close()
    assert desk.custody() == [], "her key went, and with it every way from her name"
    assert desk.orders() == {erasure: (False, None)}


def test_positive_control_a_service_without_the_keys_finds_only_what_stands_by_name(opened, tmp_path: Path) -> None:
    before = opened(subject_names="clear")
    keep_alice(before)
    assert before.custody() == ["internal"]
    before.service.close()
    keyed = opened(before, name="keyed", subject_keys_url=f"sqlite:///{tmp_path}/people.db")
    keep_alice(keyed)
    erasure = keyed.erase()
    assert keyed.custody() == ["internal"] * 2, "what stood by name before there were keys is found too"
    keyed.service.close()
    without = opened(before, name="without", subject_names="clear")
    assert without.custody() == ["internal"] and without.orders() == {erasure: (False, None)}
    assert "alice" not in without.opening(erasure)
