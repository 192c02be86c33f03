"""A worker's sessions are found by name though no row names them: what says so is their subject's secret."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
from sqlalchemy import select

from kvcustody.audit.evidence.subjects.pseudonym_directory import SubjectDirectory
from kvcustody.audit.evidence.subjects.subject_key_store import SubjectKeys
from kvcustody.audit.evidence.subjects.subject_table import committed_name, is_proved, session_names
from kvcustody.audit.kinds import ErasureRequested
from kvcustody.audit.store.schema.leaf_tables import residencies
from kvcustody.audit.store.schema.ledger import subjects
from kvcustody.governance.service.service import Service
from standins.service.service_world import Batch, Worker, register, ship

SESSIONS = tuple(f"chat-{number}" for number in range(6))


class Desk:
    """A service with a worker that held something of each of Alice's sessions, and the batch that said so."""

    def __init__(self, service: Service, client: Any, people: Any) -> None:
        self.service, self.client, self.people = service, client, people
        self.worker = Worker()
        register(client, people["worker"], self.worker)

    def tell(self) -> Batch:
        worker = self.worker
        made: list[Any] = [worker.started()]
        for session in SESSIONS:
            opening, *_ = worker.request("acme", "alice")
            made.append(opening._replace(session=session))
        batch = worker.batch(made)
        answer = ship(self.client, self.people["worker"], worker, batch)
        assert answer.status_code == 200, answer.text
        return batch

    def count(self, session: str) -> int:
        """Residencies that an erasure of a session would cover."""
        body = {"tenant": "acme", "subject": "alice", "session": session}
        answer = self.client("POST", "/v1/erasures:preview", self.people["dpo"], json=body)
        assert answer.status_code == 200, answer.text
        return int(answer.json()["residencies"])

    def rows(self) -> list[Any]:
        with self.service.reading() as connection:
            return list(connection.execute(select(subjects)))


@pytest.fixture
def opened(make_service: Any, make_client: Any, make_people: Any) -> Callable[..., Desk]:
    def make(**settings: Any) -> Desk:
        service = make_service(**settings)
        return Desk(service, make_client(service), make_people(service))

    return make


@pytest.mark.parametrize("keyed", [False, True])
def test_sessions_are_found_by_name_without_rows(opened: Callable[..., Desk], keyed: bool) -> None:
    desk = opened(subject_names="sealed" if keyed else "clear")
    desk.tell()
    assert [desk.count(session) for session in SESSIONS] == [1] * len(SESSIONS)
    assert desk.count("another") == 0
    [row] = desk.rows()
    assert row.session == "" and row.secret.startswith("s1:") is keyed
    with desk.service.reading() as connection:
        assert len(set(connection.scalars(select(residencies.c.session)))) == len(SESSIONS)


@pytest.mark.parametrize("sealing", [True, False])
def test_a_secret_is_of_no_use_without_the_subjects_key(
    opened: Callable[..., Desk], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sealing: bool
) -> None:
    if not sealing:  # positive control: an open secret names sessions for whoever has the ledger alone
        monkeypatch.setattr(SubjectKeys, "sealed", lambda _keys, _owner, _name, secret: secret)
    desk = opened(subject_keys_url=f"sqlite:///{tmp_path}/people.db")
    batch = desk.tell()
    [[name, _, _, _, secret]] = orjson.loads(batch.body.split(b"\n")[0])
    [row] = desk.rows()
    assert row.pseudonym == name and (row.secret == secret) is not sealing
    stored = b"".join(path.read_bytes() for path in tmp_path.rglob("*ledger*") if path.is_file())
    assert name.encode() in stored, "void: this is not where rows are"
    assert (secret.encode() in stored) is not sealing
    keys = SubjectKeys.open(tmp_path / "people.db")
    keys.destroy("acme", "alice")
    with desk.service.reading() as connection:
        held = set(connection.scalars(select(residencies.c.session)))
        assert not session_names(connection, "acme", "alice", SESSIONS[0], keys)
    assert (committed_name(row.secret, "acme", "alice", SESSIONS[0]) in held) is not sealing  # a guess
    keys.close()


def test_who_an_erasure_is_about_has_a_row_though_no_database_was_asked() -> None:
    directory = SubjectDirectory(clear_names=True)
    session = directory("acme", "alice", "chat-1")
    subject = directory("acme", "alice")
    assert [row[0] for row in directory.fresh()] == [subject], "control: else a session has none"
    directory.settle(directory.fresh())
    asked = ErasureRequested(1, "e-1", "acme", "session", "alice", "chat-1", 2, "dpo")
    directory.list_erased([asked])
    [row] = directory.fresh()
    assert row[:4] == (session, "acme", "alice", "chat-1") and is_proved(row)


@pytest.mark.parametrize("dropped", [True, False])
def test_sessions_have_other_pseudonyms_once_their_subject_is_forgotten(dropped: bool) -> None:
    directory = SubjectDirectory(clear_names=True)
    before = directory("acme", "alice", "chat-1")
    other = directory("acme", "bob", "chat-1")
    directory.settle(directory.fresh())
    if dropped:
        directory.drop([directory("acme", "alice")])
    assert (directory("acme", "alice", "chat-1") != before) is dropped
    assert directory("acme", "bob", "chat-1") == other


def test_a_worker_that_names_very_many_forgets_those_that_are_durable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvcustody.audit.evidence.subjects.pseudonym_directory._CACHED_MAX", 10)
    directory = SubjectDirectory(clear_names=True)
    first = directory("acme", "user-0", "chat")
    directory.settle(directory.fresh())
    directory.trim()
    assert directory("acme", "user-0", "chat") == first, "control: a few are remembered"
    for number in range(1, 12):
        directory("acme", f"user-{number}")
    directory.trim()
    assert len(directory.fresh()) == 11, "none that is not durable is forgotten"
    assert directory("acme", "user-0", "chat") != first
