"""Leaves for monitoring: every kind maps, none is lost, sinks fail alone."""

from __future__ import annotations

import contextlib
import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from sqlalchemy import Connection, Engine

from kvcustody.audit.evidence.query.events import EventRow
from kvcustody.audit.kinds import KINDS, KeyEvent
from kvcustody.audit.siem.cursor_reader import newest_positions, pull, read_positions, write_positions
from kvcustody.audit.siem.delivery import DeliveryPump
from kvcustody.audit.siem.formats import BATCH_TYPE, cloud_event
from kvcustody.audit.siem.ocsf import FAILURE, SUCCESS, TABLE, ocsf
from kvcustody.audit.siem.sink import RejectedError, SinkError, WebhookSink, check_webhook
from kvcustody.audit.siem.sink_folder import SinkFolder, find_troubles
from kvcustody.audit.store.database.engine import open_store
from kvcustody.audit.tlog.ledger_identity import ledger_identity, own_origin
from kvcustody.audit.tlog.signed_note import DEFAULT_ORIGIN
from kvcustody.clock import VirtualClock
from kvcustody.errors import LedgerError
from kvcustody.governance.service.fleet.webhooks import stored_troubles
from kvcustody.governance.service.settings import ServiceSettings, Webhook
from kvcustody.migrations.upgrade import upgrade
from kvcustody.times import HOUR_US
from standins.sinks import Flaky, WebhookReceiver

KEY = b"k" * 32
LEDGER = "ab12" * 4


def row(kind: str, **body: Any) -> EventRow:
    body = {"kind": kind, "incarnation": "a" * 32, "tenant": "acme", **body}
    return EventRow("tenant/acme", 7, 1_700_000_000_123_456, kind, body, orjson.dumps(body))


def fill(store: Engine, make_writer: Any, world: Any, steps: int = 60) -> Any:
    writer = make_writer(store)
    writer.submit(world(7).run(steps).events)
    assert writer.flush()
    return writer


def newest(connection: Connection) -> dict[str, int]:
    """How many leaves each log has."""
    return {name: place.next for name, place in newest_positions(connection).places.items()}


def lines(rows: Any) -> bytes:
    return b"".join(orjson.dumps({"log": each.log, "idx": each.idx}) + b"\n" for each in rows)


@pytest.mark.parametrize("kind", sorted(kind.name for kind in KINDS.values()))
def test_every_kind_maps_to_both_forms(kind: str) -> None:
    made = ocsf(row(kind), origin=LEDGER)
    assert made["type_uid"] == made["class_uid"] * 100 + made["activity_id"]
    assert made["category_uid"] == made["class_uid"] // 1000 and 1 <= made["severity_id"] <= 4
    assert made["time"] == 1_700_000_000_123 and made["metadata"]["uid"].startswith("tenant/acme:7-")
    assert made["unmapped"]["kind"] == kind and made["metadata"]["product"]["name"] == "kvcustody"
    event = cloud_event(row(kind), origin="ledger.example/a")
    assert event["type"] == f"kvcustody.{kind}.v1" and event["subject"] == "tenant/acme"
    assert event["source"] == "urn:kvcustody:ledger.example%2Fa:tenant%2Facme" and event["id"].startswith("7-")
    assert event["time"] == "2023-11-14T22:13:20.123456+00:00"


def test_a_trace_is_told_where_each_form_has_a_place_for_it() -> None:
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    traced, bare = (row("residency-opened", **more) for more in ({"trace": trace}, {}))
    assert (
        ocsf(traced, origin=LEDGER)["metadata"]["correlation_uid"]
        == trace
        == cloud_event(traced, origin=LEDGER)["traceid"]
    )
    assert "correlation_uid" not in ocsf(bare, origin=LEDGER)["metadata"] and "traceid" not in cloud_event(
        bare, origin=LEDGER
    )


def test_the_table_has_no_kind_that_is_not_there_and_unknown_ones_are_refused() -> None:
    assert set(TABLE) == {kind.name for kind in KINDS.values()}
    with pytest.raises(LedgerError):
        ocsf(row("invented"), origin=LEDGER)


def test_failures_are_seen_as_such() -> None:
    assert ocsf(row("receipt", result="failed"), origin=LEDGER)["status_id"] == FAILURE
    assert ocsf(row("receipt", result="ok"), origin=LEDGER)["status_id"] == SUCCESS
    assert (
        ocsf(row("receipt", result="failed"), origin=LEDGER)["severity_id"]
        > ocsf(row("receipt", result="ok"), origin=LEDGER)["severity_id"]
    )


def test_pulling_gives_every_leaf_once_in_order(
    any_store: Engine, make_writer: Any, world: Any, tmp_path: Path
) -> None:
    fill(any_store, make_writer, world)
    path, seen = tmp_path / "positions", []
    while True:
        with any_store.connect() as connection:
            page = pull(connection, read_positions(path), limit=13)
            sizes = newest(connection)
        if not page.rows:
            break
        assert len(page.rows) <= 13
        seen += [(each.log, each.idx) for each in page.rows]
        write_positions(path, page.positions)
    assert {name: place.next for name, place in read_positions(path).places.items()} == sizes
    for name, size in sizes.items():
        assert [idx for log, idx in seen if log == name] == list(range(size))


def test_a_damaged_position_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "positions"
    for wrong in (b"", b"{}", b'{"schema":"kvcustody/positions@2","places":3}', b"[1]"):
        path.write_bytes(wrong)
        with pytest.raises(LedgerError, match="damaged"):
            read_positions(path)


def test_a_failed_delivery_is_repeated_with_its_identity(
    store: Engine, make_writer: Any, world: Any, tmp_path: Path
) -> None:
    fill(store, make_writer, world)
    sink = Flaky(SinkError("no"), SinkError("no"))
    pump = DeliveryPump(store, sink, tmp_path / "sink", lines, batch=20)
    for _ in range(2):
        with pytest.raises(SinkError):
            pump.step()
    assert pump.step() == 20 and len(set(sink.tried)) == 1
    again = DeliveryPump(store, sink, tmp_path / "sink", lines, batch=20)  # a restart goes on after what was taken
    while again.step():
        pass
    seen = [json.loads(line) for _, body in sink.taken for line in body.splitlines()]
    with store.connect() as connection:
        assert len(seen) == sum(newest(connection).values()) == len({(one["log"], one["idx"]) for one in seen})


def test_what_is_refused_for_good_is_set_aside_and_can_be_sent_again(
    store: Engine, make_writer: Any, world: Any, tmp_path: Path
) -> None:
    fill(store, make_writer, world)
    sink = Flaky(RejectedError("sink refused the batch (400)"), None, SinkError("down"))
    pump = DeliveryPump(store, sink, tmp_path / "sink", lines, batch=20)
    assert pump.step() == 20 and pump.step() == 20
    assert pump.status().dead == 1 and "400" in pump.status().problem and len(sink.taken) == 1
    with pytest.raises(SinkError):
        pump.retry_dead()
    assert pump.status().dead == 1
    assert pump.retry_dead() == 1 and pump.status().dead == 0
    assert sink.taken[1][0] == sink.tried[0]


def test_a_dead_batch_that_cannot_be_read_hides_no_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Health asks for it. One that is sent between the look and the reading is not missed."""
    folder = SinkFolder(tmp_path / "sink")
    folder.make()
    folder.bury("a" * 20, b"{}", "", "refused")
    [whole] = folder.dead()
    (whole.parent / "9-torn.json").write_bytes(b"{")
    status = folder.status("sink", folder.read_positions())
    assert status.dead == 2 and status.problem == "batch `9-torn.json` cannot be read"
    monkeypatch.setattr(SinkFolder, "dead", lambda self: [whole, whole.with_name("sent.json")])
    assert folder.reasons() == ["refused"]


def test_a_damaged_sink_hides_no_other(tmp_path: Path) -> None:
    hooks = [Webhook(name=name, url="https://example.org/", key_path=tmp_path / "key") for name in ("one", "two")]
    settings = ServiceSettings(state_path=tmp_path, webhooks=hooks)
    for name in ("one", "two"):
        SinkFolder(tmp_path / "sinks" / name).make()
    (tmp_path / "sinks" / "one" / "positions.json").write_text("{")
    SinkFolder(tmp_path / "sinks" / "two").bury("a" * 20, b"{}", "", "refused")
    troubles = [(name, trouble.about) for name, trouble in stored_troubles(settings, 0)]
    assert troubles == [("one", "unreadable"), ("two", "given-up")]


def test_a_sink_that_never_answers_is_given_up_one_batch_at_a_time(
    store: Engine, make_writer: Any, world: Any, tmp_path: Path
) -> None:
    fill(store, make_writer, world)
    sink = Flaky(SinkError("down"))
    pump = DeliveryPump(store, sink, tmp_path / "sink", lines, batch=20, give_up_seconds=0.0)
    assert pump.step() == 20 and pump.status().dead == 1 and pump.step() == 20 and len(sink.taken) == 1


def test_a_detached_sink_stays_detached(store: Engine, make_writer: Any, world: Any, tmp_path: Path) -> None:
    fill(store, make_writer, world)
    sink = Flaky()
    DeliveryPump(store, sink, tmp_path / "sink", lines).detach()
    pump = DeliveryPump(store, sink, tmp_path / "sink", lines)
    assert pump.step() == 0 and not pump.status().attached
    pump.attach()
    assert pump.step() > 0


def test_a_dead_sink_costs_the_ledger_and_other_sinks_nothing(
    store: Engine, make_writer: Any, world: Any, tmp_path: Path
) -> None:
    writer = fill(store, make_writer, world)
    hangs = threading.Event()

    class Hanging(Flaky):
        def deliver(self, identity: str, body: bytes, content_type: str = "") -> None:
            hangs.wait(60)
            raise SinkError("too late")

    dead = DeliveryPump(store, Hanging(), tmp_path / "dead", lines, interval_seconds=0.01)
    sink = Flaky()
    alive = DeliveryPump(store, sink, tmp_path / "alive", lines, interval_seconds=0.01)
    dead.start(), alive.start()
    try:
        for number in range(20):
            began = time.monotonic()
            writer.submit_durable(KeyEvent(1, None, "made", number, "operator"))
            assert time.monotonic() - began < 50
        until = time.monotonic() + 60
        with store.connect() as connection:
            total = sum(newest(connection).values())
        while alive.status().delivered < total and time.monotonic() < until:
            time.sleep(0.01)
        assert alive.status().delivered == total and dead.status().delivered == 0
    finally:
        hangs.set()
        dead.close(), alive.close()


@pytest.fixture
def receiver() -> Iterator[WebhookReceiver]:
    with WebhookReceiver() as opened:
        yield opened


@pytest.mark.parametrize("ed25519", [False, True])
def test_webhooks_are_signed_over_time_and_body(receiver: WebhookReceiver, ed25519: bool) -> None:
    private = Ed25519PrivateKey.generate()
    url = f"{receiver.url}hook?x=1"
    sink = WebhookSink("hook", url, private if ed25519 else KEY, content_type=BATCH_TYPE)
    sink.deliver("batch-1", b"[]")
    [(headers, body)] = receiver.batches
    assert headers["content-type"] == BATCH_TYPE and headers["webhook-id"] == "batch-1"
    given = (headers["webhook-id"], headers["webhook-timestamp"], headers["webhook-signature"])
    key = private.public_key() if ed25519 else KEY
    now = int(given[1])
    check_webhook(key, *given, body, now_seconds=now + 299)
    wrong: list[Callable[[], None]] = [
        lambda: check_webhook(key, *given, body + b" ", now_seconds=now),
        lambda: check_webhook(key, "batch-2", *given[1:], body, now_seconds=now),
        lambda: check_webhook(key, given[0], str(now + 1), given[2], body, now_seconds=now),
        lambda: check_webhook(key, *given, body, now_seconds=now + 301),
        lambda: check_webhook(b"x" * 32, *given, body, now_seconds=now),
        lambda: check_webhook(key, given[0], given[1], "v1", body, now_seconds=now),
    ]
    for call in wrong:
        with pytest.raises(SinkError):
            call()


def test_statuses_decide_between_again_and_never(receiver: WebhookReceiver) -> None:
    sink = WebhookSink("hook", receiver.url, KEY, content_type=BATCH_TYPE)
    for status, problem in (
        (500, SinkError),
        (429, SinkError),
        (302, SinkError),
        (400, RejectedError),
        (404, SinkError),
        (401, SinkError),
    ):
        receiver.status = status
        with pytest.raises(problem) as caught:
            sink.deliver("1", b"[]")
        assert isinstance(caught.value, RejectedError) == (problem is RejectedError)
    assert len(receiver.batches) == 6  # the redirect was not followed


def test_a_receiver_that_is_not_there_for_seconds_loses_nothing_to_the_dead_folder(
    store: Engine, make_writer: Any, world: Any, tmp_path: Path, receiver: WebhookReceiver
) -> None:
    fill(store, make_writer, world)
    url = receiver.url
    pump = DeliveryPump(store, WebhookSink("hook", url, KEY, content_type=BATCH_TYPE), tmp_path, lines)
    receiver.status = 404
    with pytest.raises(SinkError, match="404"):
        pump.step()
    assert pump.status().dead == 0
    receiver.status = 200
    assert pump.step() and pump.status().dead == 0


def test_a_dead_batch_is_sent_again_with_its_own_content_type(
    store: Engine, make_writer: Any, world: Any, tmp_path: Path, receiver: WebhookReceiver
) -> None:
    fill(store, make_writer, world)
    url = receiver.url
    receiver.status = 400
    DeliveryPump(store, WebhookSink("hook", url, KEY, content_type="application/json"), tmp_path, lines).step()
    receiver.status = 200
    other = WebhookSink("hook", url, KEY, content_type=BATCH_TYPE)
    assert DeliveryPump(store, other, tmp_path, lines).retry_dead() == 1
    assert [headers["content-type"] for headers, _ in receiver.batches] == ["application/json"] * 2


@pytest.mark.parametrize("url", ["http://example.org/", "ftp://127.0.0.1/", "https://", "nonsense"])
def test_a_webhook_address_is_checked_at_the_start(url: str) -> None:
    with pytest.raises(SinkError):
        WebhookSink("hook", url, KEY, content_type=BATCH_TYPE)
    with pytest.raises(SinkError, match="shorter"):
        WebhookSink("hook", "https://example.org/", b"short", content_type=BATCH_TYPE)


def test_two_ledgers_are_two_sources(tmp_path: Path) -> None:
    """Each has an identity from its first day, which a move to another database keeps. Control: a copy is the same."""
    stores = [open_store(tmp_path / f"{name}.db") for name in ("one", "two")]
    for store in stores:
        upgrade(store)
        store.dispose()
    shutil.copy(tmp_path / "one.db", tmp_path / "copy.db")
    stores.append(open_store(tmp_path / "copy.db"))
    identities = []
    for store in stores:
        with store.connect() as connection:
            identities.append(ledger_identity(connection))
        store.dispose()
    assert identities[0] == identities[2] != identities[1] and {len(one) for one in identities} == {16}
    told = [cloud_event(row("receipt"), origin=one)["source"] for one in identities]
    assert told[0] == told[2] != told[1]
    products = [ocsf(row("receipt"), origin=one)["metadata"]["product"]["uid"] for one in identities]
    assert products == identities
    named = [own_origin(store, DEFAULT_ORIGIN) for store in stores]
    assert named[0] != named[1] and own_origin(stores[0], "kv.example/a") == "kv.example/a"


def failing_over_restarts(store: Engine, folder: Path) -> list[int]:
    """How many batches are dead after each of 25 hours, each in a process of its own."""
    clock, dead = VirtualClock(), []
    for _ in range(25):
        pump = DeliveryPump(store, Flaky(SinkError("answered 503")), folder, lines, batch=20, clock=clock)
        with contextlib.suppress(SinkError):
            pump.step()
        dead.append(pump.status().dead)
        clock.advance(HOUR_US)
    return dead


def test_a_day_of_failure_goes_on_over_restarts(store: Engine, make_writer: Any, world: Any, tmp_path: Path) -> None:
    fill(store, make_writer, world)
    assert failing_over_restarts(store, tmp_path / "sink") == [0] * 24 + [1]


def test_without_the_file_a_day_begins_again_at_each_start(
    store: Engine, make_writer: Any, world: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control of the test above."""
    fill(store, make_writer, world)
    monkeypatch.setattr(SinkFolder, "failure", lambda self: None)
    assert failing_over_restarts(store, tmp_path / "sink") == [0] * 25


def test_attaching_a_sink_gives_its_receiver_a_whole_day_again(
    store: Engine, make_writer: Any, world: Any, tmp_path: Path
) -> None:
    fill(store, make_writer, world)
    clock = VirtualClock()
    pump = DeliveryPump(store, Flaky(*[SinkError("down")] * 3), tmp_path / "sink", lines, clock=clock)
    with pytest.raises(SinkError):
        pump.step()
    clock.advance(HOUR_US)
    [trouble] = find_troubles(pump.status(), clock.utc_us())
    assert trouble.about == "failing" and not trouble.lasting and "down" in trouble.text
    pump.detach()
    assert not list(find_troubles(pump.status(), clock.utc_us())), "somebody detached it, on record"
    clock.advance(24 * HOUR_US)
    pump.attach()
    with pytest.raises(SinkError):
        pump.step()
    assert pump.status().dead == 0 and pump.status().failing_since_us == clock.utc_us()
