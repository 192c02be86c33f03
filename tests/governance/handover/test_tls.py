"""Hand-overs over TLS: who reads the wire learns nothing; who has no certificate of the authority is not answered."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvcustody.errors import ConfigError
from kvcustody.governance.handover.tls import HandoverTls, handover_tls
from kvcustody.governance.settings import Settings
from standins.certificates import Authority
from standins.governance.handing_pair import BLOCKS, Pair


def tls_of(authority: Authority, name: str) -> HandoverTls:
    """As a worker's settings name it."""
    made = authority.issue(name, both=True)
    tls = handover_tls(
        Settings(
            handover_certificate_path=made.certificate,
            handover_certificate_key_path=made.key,
            handover_ca_path=authority.pem,
        )
    )
    assert tls is not None
    return tls


class Wire:
    """One that passes on everything between two sockets, and keeps it."""

    def __init__(self, to: tuple[str, int]) -> None:
        self.seen, self._to = bytearray(), to
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self._listening.getsockname()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        accepted, _ = self._listening.accept()
        other = socket.create_connection(self._to)
        back = threading.Thread(target=self._pass, args=(other, accepted))
        back.start()
        self._pass(accepted, other)
        back.join()
        for each in (accepted, other, self._listening):
            each.close()

    def _pass(self, source: socket.socket, target: socket.socket) -> None:
        while data := source.recv(65_536):
            self.seen += data
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)


@pytest.fixture(params=[True, False], ids=["tls", "control: in clear"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pair]:
    tls = tls_of(Authority(tmp_path, "fleet"), "workers") if request.param else None
    made = Pair(tmp_path, tls)
    yield made
    made.close()


def test_who_reads_the_wire_learns_no_name_and_no_ticket(pair: Pair) -> None:
    label = pair.prefill.label("acme", "ann")
    assert pair.prefill.keep(label, "prompt", BLOCKS) == BLOCKS
    text = pair.ticket(label, "prompt")
    wire = Wire(pair.server.address)
    pair.peers.addresses["prefill"] = wire.address
    fetched = pair.fetch(text)
    assert fetched.reason == "" and len(fetched.objects) == 2
    told = [text.encode(), b"decode", *(one.name for one in fetched.objects)]
    assert [part in wire.seen for part in told] == [pair.tls is None] * len(told)


@pytest.mark.parametrize("client", ["none", "of another authority"])
def test_who_has_no_certificate_of_the_authority_is_not_answered(tmp_path: Path, client: str) -> None:
    (tmp_path / "other").mkdir()
    own = tls_of(Authority(tmp_path, "fleet"), "workers")
    foreign = tls_of(Authority(tmp_path / "other", "others"), "workers")
    pair = Pair(tmp_path, own)
    try:
        label = pair.prefill.label("acme", "ann")
        assert pair.prefill.keep(label, "prompt", BLOCKS) == BLOCKS
        text = pair.ticket(label, "prompt")
        pair.tls = None if client == "none" else foreign
        assert pair.fetch(text).reason.startswith("unreachable") and pair.given == []
        pair.tls = own
        assert pair.fetch(text).reason == "", "control: the ticket was not used up"
    finally:
        pair.close()


def test_a_prefill_side_in_clear_is_not_asked_over_tls(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    try:
        label = pair.prefill.label("acme", "ann")
        assert pair.prefill.keep(label, "prompt", BLOCKS) == BLOCKS
        text = pair.ticket(label, "prompt")
        pair.tls = tls_of(Authority(tmp_path, "fleet"), "workers")
        assert pair.fetch(text).reason.startswith("unreachable")
        pair.tls = None
        assert pair.fetch(text).reason == "", "control"
    finally:
        pair.close()


def test_files_that_cannot_be_used_are_told_at_start(tmp_path: Path) -> None:
    authority = Authority(tmp_path, "fleet")
    issued, other = authority.issue("one", both=True), authority.issue("two", both=True)
    assert handover_tls(Settings()) is None
    for key in (other.key, tmp_path / "absent"):
        with pytest.raises(ConfigError, match="handover_certificate_path"):
            handover_tls(
                Settings(
                    handover_certificate_path=issued.certificate,
                    handover_certificate_key_path=key,
                    handover_ca_path=authority.pem,
                )
            )
    with pytest.raises(ValueError, match="together"):
        Settings(handover_certificate_path=issued.certificate)
