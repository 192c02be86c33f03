"""A peer with a valid key of its own, and who has none: neither ends a worker, fills its memory, or hides what went."""

from __future__ import annotations

import os
import resource
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from kvcustody.audit.tlog.signing_key import create_signing_key
from kvcustody.clock import VirtualClock
from kvcustody.errors import ConfigError
from kvcustody.governance.credentials.scope_token_bytes import encoded, write_text
from kvcustody.governance.decisions.access_plan import DomainLabel
from kvcustody.governance.erasure.selector import Selector
from kvcustody.governance.handover import exchange, ticket
from kvcustody.governance.handover.exchange import Fetched
from kvcustody.governance.handover.peers import Peers, watch_peers
from kvcustody.governance.handover.ticket import RefusedTicket, Ticket, read_ticket
from standins.governance.handing_pair import BLOCKS, LIFE, PEER_LIFE, Pair
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


def signed(pair: Pair, texts: bytes, *, blocks: int = BLOCKS) -> str:
    """A ticket that the prefill worker's own key signed, whatever is in it."""
    key, now_ms = pair.keys["prefill"], pair.clock.utc_us() // 1000
    record = ticket._HEAD.pack(
        b"\x01", key.verifier.key_id, blocks, now_ms + 9_000, now_ms, bytes(16), bytes(32), bytes(32),
        bytes.fromhex(LIFE),
    )  # fmt: skip
    record += texts
    return ticket.PREFIX + encoded(record + key.sign(ticket._SIGNED + record))


WHOLE = write_text("prefill") + write_text("decode")


@pytest.mark.parametrize(
    ("texts", "blocks"),
    [
        (b"", 8),
        (write_text("prefill"), 8),
        (b"\x00", 8),
        (b"\x02\xff\xfe" + write_text("decode"), 8),
        (write_text("prefill") + b"\xff", 8),
        (write_text("prefill") + b"\x7fdecode"[:3] + b"\xc3", 8),
        (WHOLE + b"more", 8),
        (WHOLE, 0),
    ],
)
def test_a_ticket_that_a_peer_signed_and_that_is_none_is_refused(pair: Pair, texts: bytes, blocks: int) -> None:
    assert read_ticket(signed(pair, texts, blocks=blocks), pair.peers.keys, pair.clock) == RefusedTicket("malformed")
    assert isinstance(read_ticket(signed(pair, WHOLE), pair.peers.keys, pair.clock), Ticket), "control"


def test_a_fetch_that_is_broken_off_is_on_record_as_given(
    pair: Pair, label: DomainLabel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "_receive_exactly", cut_off := CutOff())
    found = pair.fetch(pair.ticket(label, "prompt"))
    assert found.objects == () and found.reason.startswith("unreachable") and cut_off.received > 0
    (given,) = until(lambda: pair.given)
    assert (given.reason, given.peer, given.objects) == ("", "decode", 2)


class CutOff:
    """Reads until the first object has come, then lets the connection go."""

    def __init__(self) -> None:
        self.received, self._receive = 0, exchange._receive_exactly

    def __call__(self, connection: socket.socket, size: int, deadline: float) -> bytes:
        data = self._receive(connection, size, deadline)
        if 900 < size < 5_000:
            self.received += 1
            raise ConnectionError("enough")
        return data


def test_who_has_no_key_of_a_peer_puts_nothing_on_record(pair: Pair, label: DomainLabel) -> None:
    """Neither memory nor log grows with what a stranger asks."""
    text = pair.ticket(label, "prompt")
    for _ in range(20):
        assert pair.fetch(text, worker="decode", signer="other").reason == "forged"
    assert pair.given == []
    assert pair.fetch(text).objects
    assert len(until(lambda: pair.given)) == 1, "control: an authentic one is"


def test_a_ticket_that_comes_again_and_again_is_on_record_once(pair: Pair, label: DomainLabel) -> None:
    first, second = pair.ticket(label, "prompt"), pair.ticket(label, "prompt")
    for text in (first, first, first, second, second):
        pair.fetch(text)
    until(lambda: len(pair.given) == 4)
    given = sorted((given.nonce[-1], given.reason) for given in pair.given)  # an answer is noted once it was sent
    assert given == [(1, ""), (1, "used"), (2, ""), (2, "used")]


@pytest.mark.parametrize("life", ["\0" * 32, "ü" * 32, "CD" * 16, "cd" * 15])
def test_what_a_peer_says_of_itself_is_of_few_characters(pair: Pair, label: DomainLabel, life: str) -> None:
    text = pair.ticket(label, "prompt")
    asked = exchange._Fetch(text, "decode", life, pair.clock.utc_us() // 1000)
    asked.signature = pair.keys["decode"].sign(asked.signed())
    answer, objects, given = pair.server.answer(msgspec.msgpack.encode(asked), time.monotonic() + 1)
    assert (objects, given.peer_life, given.nonce) == ((), "", b"")
    assert b"expired" in answer
    asked = exchange._Fetch(text, "decode", PEER_LIFE, pair.clock.utc_us() // 1000)
    asked.signature = pair.keys["decode"].sign(asked.signed())
    _, objects, given = pair.server.answer(msgspec.msgpack.encode(asked), time.monotonic() + 1)
    assert len(objects) == 2 and given.peer_life == PEER_LIFE, "control"


@pytest.mark.parametrize(("said", "reason"), [("\0\x1b[2J", "malformed"), ("x" * 4_000, "malformed"), ("gone", "gone")])
def test_why_a_peer_gives_nothing_is_a_word(
    pair: Pair, label: DomainLabel, monkeypatch: pytest.MonkeyPatch, said: str, reason: str
) -> None:
    monkeypatch.setattr(pair.offers, "take", lambda ticket, deadline: said)
    assert pair.fetch(pair.ticket(label, "prompt")) == Fetched(reason=reason)


def test_a_server_without_descriptors_answers_when_it_has_some_again(pair: Pair, label: DomainLabel) -> None:
    text = pair.ticket(label, "prompt")
    waiting = socket.create_connection(pair.server.address, 5)
    until(lambda: (pair.server._slots._value == 15) or None)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    second = socket.socket()
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))  # every new descriptor is refused
    try:
        with pytest.raises(OSError, match="Too many open files"):
            os.dup(1)
        second.connect(pair.server.address)
        time.sleep(2.5 * exchange._ACCEPT_AGAIN_SECONDS)  # so that it is asked for more than once
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    waiting.close()
    second.close()
    assert pair.fetch(text, seconds=2.0).objects


def test_what_arrives_after_an_erasure_of_a_classification_is_not_kept(pair: Pair, label: DomainLabel) -> None:
    """No key is destroyed for it, so what is on its way opens still."""
    found = pair.fetch(pair.ticket(label, "prompt"))
    assert len(found.objects) == 2
    pair.decode.tier.erase("e1", Selector("acme", classification="internal"), 1 << 60)
    assert pair.decode.tier.receive(label, keys_of("prompt", BLOCKS), found.objects) == 0
    assert pair.decode.bring(label, "prompt", BLOCKS) == 0


def test_control_an_erasure_of_another_classification_lets_it_be_kept(pair: Pair, label: DomainLabel) -> None:
    found = pair.fetch(pair.ticket(label, "prompt"))
    pair.decode.tier.erase("e1", Selector("acme", classification="restricted"), 1 << 60)
    assert pair.decode.tier.receive(label, keys_of("prompt", BLOCKS), found.objects) == BLOCKS


def test_what_was_computed_after_the_erasure_is_kept_once_clocks_cannot_explain_it(
    pair: Pair, label: DomainLabel
) -> None:
    """The prefill worker's clock may be ahead of the one that erased: within that bound nothing is taken."""
    pair.decode.tier.erase("e1", Selector("acme", classification="internal"), 1 << 60)
    for seconds, kept in ((4, 0), (2, BLOCKS)):
        pair.prefill.world.clock.advance(seconds * 1_000_000)
        prompt = f"after {seconds}"
        assert pair.prefill.keep(label, prompt, BLOCKS) == BLOCKS
        found = pair.fetch(pair.ticket(label, prompt))
        assert pair.decode.tier.receive(label, keys_of(prompt, BLOCKS), found.objects) == kept


def test_nobody_is_trusted_while_the_document_of_peers_cannot_be_read(tmp_path: Path) -> None:
    """Whoever replaces it writes it in two steps, or wrong: no engine ends for it."""
    clock, path = VirtualClock(), tmp_path / "peers.yaml"
    key = create_signing_key(tmp_path / "a.key", "prefill-1").verifier
    text = f"schema: kvcustody/handover-peers@1\nworkers:\n  prefill-1: {{address: 'h:1', key: '{key}'}}\n"
    path.write_text(text)
    trusted = watch_peers(path, clock)
    assert trusted().addresses == {"prefill-1": ("h", 1)}
    for odd in (text[:-9], "workers: 7\n", None):
        if odd is None:
            path.unlink()
        else:
            path.write_text(odd)
        clock.advance(2_000_000)
        assert trusted() == Peers({}, {})
    path.write_text(text)
    clock.advance(2_000_000)
    assert trusted().addresses == {"prefill-1": ("h", 1)}, "control"
    path.write_text(text[:-9])
    with pytest.raises(ConfigError):
        watch_peers(path, clock)
