"""Hand-over between two workers: own blocks arrive whole, once, and nothing of a ticket that is anybody else's."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvcustody.audit.tlog.signing_key import create_signing_key
from kvcustody.clock import VirtualClock
from kvcustody.errors import ConfigError
from kvcustody.governance.decisions.access_plan import DomainLabel
from kvcustody.governance.erasure.selector import Selector
from kvcustody.governance.handover import exchange
from kvcustody.governance.handover.exchange import AnsweredFetch, Fetched
from kvcustody.governance.handover.peers import read_peers
from kvcustody.governance.handover.ticket import RefusedTicket, Ticket, issue, read_ticket
from kvcustody.governance.settings import load_settings
from kvcustody.governance.tiers.tier import SealedObject
from standins.governance.handing_pair import BLOCKS, PEER_LIFE, Pair
from standins.governance.tier_place import keys_of
from standins.waiting import until


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    made = Pair(tmp_path)
    yield made
    made.close()


@pytest.fixture
def label(pair: Pair) -> DomainLabel:
    whose = pair.prefill.label("acme", "ann")
    assert pair.prefill.keep(whose, "prompt", BLOCKS) == BLOCKS
    return whose


def test_what_was_prefilled_arrives_whole_and_is_the_decode_workers_from_then_on(
    pair: Pair, label: DomainLabel
) -> None:
    assert pair.decode.bring(label, "prompt", BLOCKS) == 0
    fetched = pair.fetch(pair.ticket(label, "prompt"))
    assert (len(fetched.objects), fetched.reason) == (2, "")
    keys = keys_of("prompt", BLOCKS)
    assert pair.decode.tier.receive(label, keys, fetched.objects) == BLOCKS
    assert pair.decode.bring(label, "prompt", BLOCKS) == BLOCKS, "what was kept, byte for byte"
    assert [event.step for event in pair.decode.events()] == ["stored", "stored"]
    assert pair.prefill.bring(label, "prompt", BLOCKS) == BLOCKS, "its own live on under their own terms"
    (given,) = until(lambda: pair.given)  # it is told behind the answer
    sizes = sum(len(one.data) for one in fetched.objects)
    assert given == AnsweredFetch((1).to_bytes(16), "decode", PEER_LIFE, 2, sizes, "")
    assert pair.decode.orphans() == pair.prefill.orphans() == []


def test_the_copies_live_no_longer_than_those_they_are_of(pair: Pair, label: DomainLabel) -> None:
    found = pair.fetch(pair.ticket(label, "prompt"))
    pair.decode.tier.receive(label, keys_of("prompt", BLOCKS), found.objects)
    dues = {copy.due_us for place in (pair.prefill, pair.decode) for copy in place.tier.copies()}
    assert len(dues) == 1
    pair.decode.world.clock.advance(20_000_000)
    assert pair.decode.bring(label, "prompt", BLOCKS) == 0


def test_a_ticket_is_for_one_fetch(pair: Pair, label: DomainLabel) -> None:
    text = pair.ticket(label, "prompt")
    assert pair.fetch(text).objects, "control"
    assert pair.fetch(text) == Fetched(reason="used")


def test_a_ticket_is_for_one_worker(pair: Pair, label: DomainLabel) -> None:
    text = pair.ticket(label, "prompt")
    assert pair.fetch(text, worker="other") == Fetched(reason="other-peer")
    assert pair.fetch(text, worker="decode", signer="other") == Fetched(reason="forged"), "and says so with its key"
    assert pair.fetch(text).objects, "control: neither has used it up"


def test_a_ticket_ends_with_its_deadline_and_with_the_workers_life(pair: Pair, label: DomainLabel) -> None:
    text, other = pair.ticket(label, "prompt"), pair.ticket(label, "prompt", life="00" * 16)
    assert pair.fetch(other) == Fetched(reason="other-life")
    pair.clock.advance(30_000_000)
    assert read_ticket(text, pair.peers.keys, pair.clock) == RefusedTicket("expired")
    assert pair.offers.take(pair_ticket(text, pair), time.monotonic()) == "unknown", "nor is anything held for it"


def pair_ticket(text: str, pair: Pair) -> Ticket:
    """What the ticket said while it was in time."""
    earlier = VirtualClock(utc_us=pair.clock.utc_us() - 30_000_000)
    ticket = read_ticket(text, pair.peers.keys, earlier)
    assert isinstance(ticket, Ticket)
    return ticket


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda text: text[:-8] + "AAAAAAAA", "forged"),
        (lambda text: text[:40] + ("A" if text[40] != "A" else "B") + text[41:], "forged"),
        (lambda text: "kvd1." + text[5:], "malformed"),
        (lambda text: text[:60], "malformed"),
        (lambda text: text + "A" * 2000, "malformed"),
        (lambda text: "", "malformed"),
    ],
)
def test_a_ticket_that_was_changed_is_none(
    pair: Pair, label: DomainLabel, change: Callable[[str], str], reason: str
) -> None:
    text = pair.ticket(label, "prompt")
    assert isinstance(read_ticket(text, pair.peers.keys, pair.clock), Ticket), "control"
    assert read_ticket(change(text), pair.peers.keys, pair.clock) == RefusedTicket(reason)  # type: ignore[arg-type]


def test_another_worker_cannot_make_a_ticket_of_this_one(pair: Pair, label: DomainLabel) -> None:
    mine = pair.read(pair.ticket(label, "prompt"))
    key = pair.keys["other"]
    forged = issue(mine, key.verifier.key_id, key.sign)
    assert read_ticket(forged, pair.peers.keys, pair.clock) == RefusedTicket("forged")
    del pair.peers.keys["other"]
    assert read_ticket(forged, pair.peers.keys, pair.clock) == RefusedTicket("other-key")


def zeroed(objects: list[SealedObject]) -> list[SealedObject]:
    return [one._replace(data=bytes(len(one.data))) for one in objects]


def swapped(objects: list[SealedObject]) -> list[SealedObject]:
    return [one._replace(name=other.name) for one, other in zip(objects, reversed(objects), strict=True)]


@pytest.mark.parametrize("tamper", [zeroed, swapped, lambda objects: objects[:0]])
def test_a_prefill_side_that_is_zeroed_or_lies_is_a_miss(
    pair: Pair, label: DomainLabel, tamper: Callable[[list[SealedObject]], list[SealedObject]]
) -> None:
    pair.tampers = tamper
    found = pair.fetch(pair.ticket(label, "prompt"))
    pair.decode.tier.receive(label, keys_of("prompt", BLOCKS), found.objects)
    assert pair.decode.bring(label, "prompt", BLOCKS) == 0


@pytest.mark.parametrize("is_checked", [True, False])
def test_what_is_torn_on_the_way_does_not_match_its_sum(
    pair: Pair, label: DomainLabel, is_checked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    send = exchange._send_all

    def torn(connection: object, data: bytes, deadline: float) -> None:
        is_object = len(data) > 900
        send(connection, data[:-1] + bytes([data[-1] ^ 1]) if is_object else data, deadline)  # type: ignore[arg-type]

    monkeypatch.setattr(exchange, "_send_all", torn)
    if not is_checked:
        monkeypatch.setattr(exchange, "_sum", lambda nonce, data: bytes(32))
    found = pair.fetch(pair.ticket(label, "prompt"))
    assert (found.reason, len(found.objects)) == (("torn", 0) if is_checked else ("", 2)), "control: nobody looks"
    pair.decode.tier.receive(label, keys_of("prompt", BLOCKS), found.objects)
    assert pair.decode.bring(label, "prompt", BLOCKS) == 0, "and what is sealed does not open"


def test_blocks_of_another_prompt_subject_or_tenant_are_not_taken(pair: Pair, label: DomainLabel) -> None:
    fetched = pair.fetch(pair.ticket(label, "prompt"))
    for whose in (pair.decode.label("acme", "bob"), pair.decode.label("beta", "ann")):
        assert pair.decode.tier.receive(whose, keys_of("prompt", BLOCKS), fetched.objects) == 0
    assert pair.decode.tier.receive(label, keys_of("other", BLOCKS), fetched.objects) == 0
    pair.decode.allowed = {}
    assert pair.decode.tier.receive(label, keys_of("prompt", BLOCKS), fetched.objects) == 0, "nor where policy says no"
    pair.decode.allowed = {"internal": 16_000_000}
    assert pair.decode.tier.receive(label, keys_of("prompt", BLOCKS), fetched.objects) == BLOCKS, "control"


def test_an_erasure_while_it_is_on_its_way_leaves_nothing(pair: Pair, label: DomainLabel) -> None:
    found = pair.fetch(pair.ticket(label, "prompt"))
    assert len(found.objects) == 2
    pair.prefill.tier.erase("e1", Selector("acme", "ann"), 1 << 60)
    assert pair.decode.tier.receive(label, keys_of("prompt", BLOCKS), found.objects) == 0
    assert pair.fetch(pair.ticket(label, "prompt"), seconds=0.2).reason == "gone"


def test_a_worker_that_is_away_or_silent_is_a_miss_within_the_deadline(pair: Pair, label: DomainLabel) -> None:
    text = pair.ticket(label, "prompt")
    pair.server.close()
    assert pair.fetch(text, seconds=0.2).reason.startswith("unreachable")


@pytest.mark.parametrize("data", [b"", b"\x00\x00\x00\x05hello", b"\xff\xff\xff\xff", b"GET / HTTP/1.1\r\n\r\n"])
def test_garbage_is_not_answered_and_the_next_is(pair: Pair, label: DomainLabel, data: bytes) -> None:
    with socket.create_connection(pair.server.address, 5) as connection:
        connection.sendall(data)
        with contextlib.suppress(OSError):  # the server may have ended the connection by now
            connection.shutdown(socket.SHUT_WR)
            assert connection.recv(1) == b""
    assert pair.fetch(pair.ticket(label, "prompt")).objects


def test_peers_are_read_from_their_document_and_problems_name_the_worker(tmp_path: Path) -> None:
    key = create_signing_key(tmp_path / "a.key", "prefill-1")
    path = tmp_path / "peers.yaml"

    def write(address: str, text: str) -> None:
        path.write_text(
            f"schema: kvcustody/handover-peers@1\nworkers:\n  prefill-1: {{address: '{address}', key: '{text}'}}\n"
        )

    write("10.0.0.5:9470", str(key.verifier))
    assert read_peers(path).addresses == {"prefill-1": ("10.0.0.5", 9470)}
    for address in ("10.0.0.5", "10.0.0.5:65536", ":9470", "10.0.0.5:"):
        write(address, str(key.verifier))
        with pytest.raises(ConfigError, match="address"):
            read_peers(path)
    with pytest.raises(ConfigError, match="handover_address"):
        load_settings(handover_address="10.0.0.5:65536", handover_peers_path=path)
    write("10.0.0.5:9470", "nonsense")
    with pytest.raises(ConfigError, match="key of `prefill-1`"):
        read_peers(path)
