"""A worker that starts while its control plane is away goes on to withhold what it was told to before."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvcustody.clock import VirtualClock
from kvcustody.errors import ConfigError
from kvcustody.governance.control_plane.connection import ControlPlaneConnection
from kvcustody.governance.control_plane.erasures import RemoteInbox
from kvcustody.governance.restriction.restricted_subjects import RestrictedSubject, RestrictedSubjects

ADA = RestrictedSubject("case-1", "acme", "ada")
Answers = Callable[..., dict[str, Any]]


class Facade:
    """Remembers whom it was told to restrict."""

    def __init__(self) -> None:
        self.restricted = RestrictedSubjects()

    def restrict(self, ordered: RestrictedSubjects) -> None:
        self.restricted = ordered

    def call(self, command: Any) -> Any:
        return command(self)

    def end_keys_in_service(self) -> None: ...

    def follow_keys(self, orders: object) -> int:
        return 0

    def renew_custody(self, source: str, until_us: int) -> None:
        pass


def answer(*people: RestrictedSubject) -> Answers:
    return lambda *_, **__: {
        "items": [],
        "keys": [],
        "enforcement": None,
        "restrictions": [one._asdict() for one in people],
    }


def start(path: Path | None, answers: Answers | None = None) -> tuple[RemoteInbox, Facade]:
    """A new process of the worker; without `answers` nobody answers at the control plane's address."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{taken.getsockname()[1]}"
    connection = ControlPlaneConnection(address, "key")
    if answers is not None:
        connection.get = answers  # type: ignore[method-assign]
    inbox, facade = RemoteInbox(connection, 0, path, clock=VirtualClock(), lease_seconds=300), Facade()
    try:
        inbox.recover_pending(facade)  # type: ignore[arg-type]
    finally:
        connection.close()
    return inbox, facade


def test_what_was_heard_holds_in_a_later_process_until_it_is_lifted(tmp_path: Path) -> None:
    path = tmp_path / "restrictions.json"
    assert start(path)[1].restricted.orders == frozenset(), "nothing was heard yet"
    assert start(path, answer(ADA))[1].restricted.covers("acme", "ada")
    assert path.stat().st_mode & 0o077 == 0, "it names a person"
    inbox, facade = start(path)
    assert facade.restricted.orders == {ADA}
    inbox._connection.get = answer()  # type: ignore[method-assign]
    inbox.look(facade)  # type: ignore[arg-type]
    assert facade.restricted.orders == frozenset(), "the control plane is back: it was lifted meanwhile"
    assert start(path)[1].restricted.orders == frozenset()


def test_without_the_file_a_later_process_withholds_nothing() -> None:
    """The control: only the file carries it."""
    assert start(None, answer(ADA))[1].restricted.orders == {ADA}
    assert start(None)[1].restricted.orders == frozenset()


@pytest.mark.parametrize("content", [b"", b"[", b"{}x", b'[{"case_id": "c"}]', b"3", b'["x"]'])
def test_what_was_kept_and_cannot_be_read_is_no_start_unless_somebody_can_be_asked(
    content: bytes, tmp_path: Path
) -> None:
    path = tmp_path / "restrictions.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="kept restrictions"):
        start(path)
    assert start(path, answer(ADA))[1].restricted.orders == {ADA}
    assert start(path)[1].restricted.orders == {ADA}, "and it is written anew"


def test_a_file_that_cannot_be_written_does_not_stop_the_order(tmp_path: Path) -> None:
    assert start(tmp_path / "nowhere" / "restrictions.json", answer(ADA))[1].restricted.orders == {ADA}
