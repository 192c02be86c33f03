"""The writer over each of its sinks, a database and a control plane: what is called durable is there, once."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from sqlalchemy import select
from sqlalchemy.exc import OperationalError

from kvcustody.audit.evidence.processes.sequence_gaps import gaps
from kvcustody.audit.kinds import BlocksAttached, Event, KeyEvent, ResidencyOpened, WorkerStarted
from kvcustody.audit.leaf.change_items import plain_bodies
from kvcustody.audit.store.database.engine import open_store
from kvcustody.audit.store.schema.ledger import events, incarnations
from kvcustody.audit.write import committer
from kvcustody.audit.write.committer import Committer
from kvcustody.audit.write.event_writer import EventWriter, LedgerWriter, WriterSettings
from kvcustody.audit.write.outage import Spacing
from kvcustody.clock import SystemClock
from kvcustody.errors import LedgerError, LedgerUnavailable, ServiceError
from kvcustody.governance.control_plane import remote_ledger
from kvcustody.governance.control_plane.connection import ControlPlaneConnection
from kvcustody.governance.control_plane.remote_ledger import RemoteLedger
from kvcustody.governance.service.access.roles import Role
from kvcustody.governance.service.service import Service
from standins import builders
from standins.service.service_world import Server, Worker

SETTINGS = WriterSettings(interval_seconds=0.002, durable_seconds=3.0, retry_seconds=0.01)
CLOCK = SystemClock()


class Flaky(ControlPlaneConnection):
    """Loses answers, and sometimes requests, of batches."""

    lose: Callable[[], str]

    def put_bytes(self, path: str, body: bytes, media: str, *, encoding: str = "") -> Any:
        lost = self.lose()
        if lost == "request":
            raise ServiceError("lost", problem="unreachable")
        answer = super().put_bytes(path, body, media, encoding=encoding)
        if lost == "answer":
            raise ServiceError("lost", problem="unreachable")
        return answer


class Leaf(NamedTuple):
    """A leaf as it stands in the ledger."""

    sequence: int
    kind: str
    body: dict[str, Any]


class World:
    """A service's ledger, and writers to it: straight, or through the service."""

    def __init__(self, sink: str, service: Service, server: Server, people: Any, folder: Path) -> None:
        self.sink = sink
        self.service = service
        self.folder = folder / "spill"
        self._server = server
        self._people = people
        self.worker = f"{sink.replace(' ', '-')}-{folder.name}"[:60]
        self.engine = open_store(builders.ledger_file(service.engine))
        self.writers: list[LedgerWriter] = []
        self.lose: Callable[[], str] = lambda: ""

    def open(self, settings: WriterSettings = SETTINGS) -> LedgerWriter:
        given = {"worker": self.worker, "clock": CLOCK, "spill_directory": self.folder, "settings": settings}
        if self.sink == "database":
            writer: LedgerWriter = EventWriter(self.engine, **given, clear_names=True)
        else:
            keys = self._people.keys
            key = keys.get(self.worker) or self._people.add(self.worker, Role.WORKER)
            connection = Flaky(self._server.address, key)

            def lose() -> str:
                return self.lose()

            connection.lose = lose  # type: ignore[method-assign]
            writer = RemoteLedger(connection, **given)
        self.writers.append(writer)
        return writer

    def away(self) -> None:
        self.lose = lambda: "request"

    def back(self, writer: LedgerWriter) -> None:
        """Nothing is lost any more; waits until the writer knows."""
        self.lose = lambda: ""
        until(lambda: writer.status().healthy, writer)
        assert writer.flush(20)

    def leaves(self, writer: LedgerWriter) -> list[Leaf]:
        query = select(events.c.sequence, events.c.kind, events.c.leaf).join(
            incarnations, incarnations.c.id == events.c.incarnation
        )
        with self.service.reading() as connection:
            rows = connection.execute(query.where(incarnations.c.uuid == writer.incarnation)).all()
        return sorted((Leaf(row.sequence, row.kind, json.loads(row.leaf)) for row in rows), key=lambda leaf: leaf[:2])

    def kinds(self, writer: LedgerWriter) -> list[str]:
        return [leaf.kind for leaf in self.leaves(writer)]

    def gaps(self, writer: LedgerWriter) -> list[tuple[int, int]]:
        with self.service.reading() as connection:
            found = [gap for gap in gaps(connection) if gap.incarnation == writer.incarnation]
        return [(gap.first_sequence, gap.last_sequence) for gap in found]

    def end(self, writer: LedgerWriter) -> str | None:
        with self.service.reading() as connection:
            query = select(incarnations.c.end).where(incarnations.c.uuid == writer.incarnation)
            return connection.scalar(query)

    def spills(self) -> list[str]:
        return [path.suffix for path in self.folder.iterdir() if path.suffix not in (".lock", ".kept")]


def until(told: Callable[[], bool], writer: LedgerWriter, seconds: float = 60.0) -> None:
    """Wait for something that the writer comes to, with its next try brought forward."""
    end = time.monotonic() + seconds
    while not told():
        assert time.monotonic() < end, writer.status()
        writer._outage.spacing.due_at = 0.0
        writer._intake.wake.set()
        time.sleep(0.005)


@pytest.fixture(params=["database", "control plane"])
def world(
    request: pytest.FixtureRequest,
    service: Service,
    server: Server,
    people: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Any:
    world = World(request.param, service, server, people, tmp_path)

    class FlakyCommitter(Committer):
        def write(self, *args: Any, **named: Any) -> int:
            lost = world.lose()
            if lost == "request":
                raise OperationalError("lost", None, Exception("lost"))
            added = super().write(*args, **named)
            if lost == "answer":
                raise OperationalError("lost", None, Exception("lost"))
            return added

    monkeypatch.setattr(committer, "Committer", FlakyCommitter)
    yield world
    world.lose = lambda: ""
    for writer in world.writers:
        writer.close()
    world.engine.dispose()


def started(world: World) -> Event:
    return WorkerStarted(CLOCK.now_us(), world.worker, 10, 1, 4096, "cpu", "test")


def opened(residency: int) -> Event:
    now = CLOCK.now_us()
    rest = (False, "internal", (), (), ("own",), 1, now + 10**9)
    return ResidencyOpened(now, residency, "acme", None, None, *rest)


def key_event() -> Event:
    return KeyEvent(CLOCK.now_us(), None, "made", 1, "governor")


def test_everything_is_recorded_and_class_a_when_it_returns(world: World) -> None:
    writer = world.open()
    writer.submit([started(world)])
    made = Worker()
    for _ in range(50):
        writer.submit([event._replace(at_us=CLOCK.now_us()) for event in made.request("acme")])
    last = writer.submit_durable(key_event())
    told = [body for leaf in world.leaves(writer) for body in plain_bodies(leaf.body)]
    assert len(told) == 202 > last == len(world.leaves(writer))
    assert writer.flush(20) and writer.durable_sequence == last and writer.status().healthy
    assert world.kinds(writer)[-1] == "key-event"


def test_a_batch_is_encoded_while_another_is_handed_in(world: World) -> None:
    writer = world.open(SETTINGS._replace(batch=10))
    encode_ahead, queued = writer._encode_ahead, list[int]()

    def ahead() -> None:
        encode_ahead()
        queued.append(len(writer._ahead.items))

    writer._encode_ahead = ahead  # type: ignore[method-assign]
    last = writer.submit([opened(number) for number in range(500)])
    assert writer.flush(30) and writer.durable_sequence == last and any(queued)
    assert [leaf.sequence for leaf in world.leaves(writer)] == [*range(1, last + 1)]


def test_lost_requests_and_lost_answers_leave_each_leaf_once(world: World) -> None:
    """Every second answer and every fifth request is lost; the control: without the skipping of known leaves, twice."""
    writer = world.open()
    count = iter(range(10**6))

    def lose() -> str:
        number = next(count)
        return "answer" if number % 2 else "request" if number % 5 == 0 else ""

    world.lose = lose
    made = Worker()
    writer.submit([started(world)])
    for _ in range(60):
        writer.submit([event._replace(at_us=CLOCK.now_us()) for event in made.request("acme")])
        time.sleep(0.003)
    world.back(writer)
    kinds, sequences = world.kinds(writer), [leaf.sequence for leaf in world.leaves(writer)]
    assert world.gaps(writer) == []
    assert len({*sequences}) == len(sequences) and kinds.count("residency-opened") == 60
    assert {"spill-started", "replay-completed"} <= {*kinds}, "void: nothing was lost"


def test_class_a_is_refused_while_the_sink_is_away_and_accounted_for(world: World) -> None:
    writer = world.open()
    world.away()
    with pytest.raises(LedgerUnavailable, match="not done because it could not be recorded") as refused:
        writer.submit_durable(key_event())
    last = writer.submit([started(world)])
    assert writer.flush(10) and writer.durable_sequence >= last  # in the spill
    assert writer.admitting and not writer.recording and writer.down
    with pytest.raises(LedgerUnavailable, match="cannot be asked"):
        writer.issuers()
    world.back(writer)
    assert writer.issuers() is not None and not writer.down
    assert writer.submit_durable(key_event())
    found = world.leaves(writer)
    assert [leaf.kind for leaf in found].count("key-event") == 1 and world.gaps(writer) == []
    [withdrawn] = [leaf.body["of_sequence"] for leaf in found if leaf.kind == "withdrawn"]
    assert withdrawn == refused.value.operands["sequence"]
    assert world.spills() == []


def test_who_waits_has_a_try_brought_forward(world: World) -> None:
    """However late the next one is; the control: where the sink asked to be left alone, it is."""
    writer = world.open()
    world.away()
    writer.submit([opened(1)])
    assert writer.flush(10) and writer.down
    spacing = writer._outage.spacing
    while spacing.due_at < time.monotonic() + 500:  # a try that had begun says when the next one is
        spacing._told_until = spacing.due_at = time.monotonic() + 600
        time.sleep(0.05)
    world.lose = lambda: ""
    with pytest.raises(LedgerUnavailable):
        writer.submit_durable(key_event())
    spacing._told_until = spacing._early_at = 0.0
    assert writer.submit_durable(key_event()) and writer.recording


def test_a_full_spill_stops_admission_and_what_is_held_arrives(world: World) -> None:
    writer = world.open(SETTINGS._replace(spill_bytes=500))
    world.away()
    for number in range(60):
        writer.submit([opened(number)])
    until(lambda: not writer.admitting and "limit" in writer.status().cause, writer)
    until(lambda: writer.status().backlog > 0, writer)
    with pytest.raises(LedgerUnavailable):
        writer.submit_durable(key_event(), timeout_seconds=1.0)
    world.back(writer)
    assert writer.admitting and world.gaps(writer) == []
    assert sorted(leaf.body["residency"] for leaf in world.leaves(writer) if leaf.kind == "residency-opened") == [
        *range(60)
    ]


def test_what_was_encoded_ahead_waits_behind_what_is_held(world: World) -> None:
    """A batch fails beside the encoding of the next, and the spill refuses it: both arrive, in order."""
    writer = world.open(SETTINGS._replace(batch=10, spill_bytes=1))
    world.away()
    last = writer.submit([opened(number) for number in range(500)])
    until(lambda: bool(writer._outage.held and writer._ahead.items), writer)
    world.back(writer)
    assert writer.durable_sequence >= last and world.gaps(writer) == []
    assert world.kinds(writer).count("residency-opened") == 500


def test_a_queue_over_its_capacity_goes_to_the_spill(world: World) -> None:
    writer = world.open(SETTINGS._replace(batch=2, capacity=20, interval_seconds=0.02))
    writer.submit([opened(number) for number in range(39)])
    assert writer.flush(20)  # durable, if only in the spill
    world.back(writer)
    kinds = world.kinds(writer)
    assert (kinds.count("spill-started"), kinds.count("residency-opened")) == (1, 39)
    assert world.gaps(writer) == []


def test_a_leaf_that_is_refused_is_a_gap_and_stops_nothing(world: World) -> None:
    writer = world.open()
    writer.submit([opened(number) for number in (5, 6, 5, 7)])
    assert writer.flush(20)
    again = opened(6)
    with pytest.raises(LedgerUnavailable):
        writer.submit_durable(again)
    assert writer.flush(20) and writer.recording
    found = [leaf.body["residency"] for leaf in world.leaves(writer) if leaf.kind == "residency-opened"]
    assert found == [5, 6, 7] and (3, 3) in world.gaps(writer)


def test_a_spilled_leaf_that_is_refused_is_a_gap_and_its_spill_is_set_aside(world: World) -> None:
    writer = world.open()
    world.away()
    writer.submit([opened(number) for number in (5, 6, 5, 7)])
    assert writer.flush(10)
    world.back(writer)
    found = [leaf.body["residency"] for leaf in world.leaves(writer) if leaf.kind == "residency-opened"]
    assert found == [5, 6, 7]
    [gap] = [leaf.body for leaf in world.leaves(writer) if leaf.kind == "gap"]
    assert world.gaps(writer) == [(gap["first_sequence"], gap["last_sequence"])]
    assert "spilled leaf" in gap["cause"] and world.spills() == [".refused"]


def test_what_a_dead_process_left_in_its_spill_is_handed_in_by_its_successor(world: World) -> None:
    dead = world.open()
    world.away()
    made = Worker()
    opening = [event._replace(at_us=CLOCK.now_us()) for event in made.request("acme", None)]
    dead.submit([started(world), *opening])
    dead.close()
    assert world.leaves(dead) == []
    [segment] = world.folder.glob("*.spill")
    with segment.open("ab") as torn:
        torn.write(b"\x99\x01\x00\x00torn")
    world.lose = lambda: ""
    successor = world.open()
    told = [body for leaf in world.leaves(dead) for body in plain_bodies(leaf.body)]
    assert len(told) >= 5 and world.gaps(dead) == []
    [body] = [leaf.body for leaf in world.leaves(successor) if leaf.kind == "replay-completed"]
    assert (body["added"] >= 4, body["torn_bytes"]) == (True, 8)  # nothing of a replay goes in silence
    assert world.spills() == [".torn"]
    assert successor.flush(20)
    until(lambda: world.end(dead) == "died", successor)


@pytest.mark.system("a replayed spill keeps live batches waiting")
def test_live_batches_go_before_what_was_spilled(world: World) -> None:
    writer = world.open(SETTINGS._replace(replay_share=0.05, capacity=1 << 20))
    writer.submit([started(world)])
    assert writer.flush(20)
    world.away()
    for number in range(20):
        writer.submit([opened(100 * number + each) for each in range(100)])
    assert writer.flush(20)
    for _ in range(50):  # also while a replay is tried in vain
        assert writer.status().spilled_bytes
        writer._outage.spacing.due_at = 0.0
        writer._intake.wake.set()
        time.sleep(0.002)
    tries: list[bool] = []  # since nothing is lost any more: what was lost before has been told by then

    def nothing() -> str:
        tries.append(True)
        return ""

    world.lose = nothing
    until(lambda: bool(tries) and not writer.down and writer.status().replaying, writer)
    status = writer.status()
    assert status.replaying and not status.healthy and writer.recording
    live = writer.submit_durable(key_event())
    assert writer.status().replaying
    there = {leaf.sequence for leaf in world.leaves(writer)}
    assert live in there and len(there) < live, "control: the spill is not in yet"
    world.back(writer)
    found = [leaf.sequence for leaf in world.leaves(writer)]
    assert len(found) == len(set(found)) and set(range(1, live + 1)) <= set(found) | {live}
    assert world.gaps(writer) == [] and world.spills() == []


def test_closing_asks_the_sink_once_more(world: World) -> None:
    writer = world.open()
    world.away()
    writer.submit([opened(1)])
    assert writer.flush(10) and world.spills() == [".spill"]
    writer._outage.spacing.due_at = time.monotonic() + 600
    world.lose = lambda: ""
    writer.close()
    assert world.spills() == [] and "residency-opened" in world.kinds(writer)


def test_a_process_ends_in_order_where_its_block_ends(world: World) -> None:
    with world.open() as writer:
        writer.submit([opened(1)])
    assert world.kinds(writer)[-1] == "worker-stopped"
    assert world.kinds(writer).count("worker-stopped") == 1


def test_a_worker_name_is_one_process_at_a_time(world: World) -> None:
    writer = world.open()
    with pytest.raises(LedgerError, match="is already running"):
        world.open()
    world.worker += "-2"
    assert world.open().recording and writer.recording


def test_what_no_store_could_keep_is_a_gap_by_sequence(world: World) -> None:
    writer = world.open(SETTINGS._replace(spill_bytes=500, capacity=20))
    world.away()
    for number in range(100):
        writer.submit([opened(number)])
        time.sleep(0.001)
    until(lambda: not writer.admitting, writer)
    world.back(writer)
    kept = world.kinds(writer).count("residency-opened")
    lost, named = world.gaps(writer), [leaf.body for leaf in world.leaves(writer) if leaf.kind == "gap"]
    assert lost and kept + sum(last - first + 1 for first, last in lost) == 100
    assert len(lost) == len(named) and all("faster" in leaf["cause"] for leaf in named)


def test_a_tenants_share_of_the_spill_is_counted(world: World) -> None:
    writer = world.open(SETTINGS._replace(spill_bytes=1500))
    writer.shares.divide(lambda tenant: 0.5)
    world.away()
    writer.submit([BlocksAttached(CLOCK.now_us(), number, "greedy", ()) for number in range(30)])
    assert writer.flush(10) and writer.shares.over == {"greedy"}
    world.back(writer)
    assert writer.shares.over == frozenset()


@pytest.mark.parametrize("world", ["control plane"], indirect=True)
def test_a_control_plane_that_hangs_holds_up_no_engine(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine's thread asks whose tenants the ledger names; an answer never comes."""
    writer = world.open()
    assert isinstance(writer, RemoteLedger)
    writer.issuers()
    monkeypatch.setattr(remote_ledger, "ENGINE_DURABLE_SECONDS", 0.2)
    codes: list[str] = []

    def ask() -> None:
        with pytest.raises(LedgerUnavailable) as refused:
            writer.issuers()
        codes.append(refused.value.code)

    with socket.create_server(("127.0.0.1", 0)) as hangs:  # it accepts, and reads nothing
        there = writer._plane._connection
        writer._plane._connection = ControlPlaneConnection(f"http://127.0.0.1:{hangs.getsockname()[1]}", "nobody")
        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        asking.join(25)  # the connection's own bound is 30 seconds
        assert codes == ["KVC610"]
        writer._plane._connection = there
    assert writer.issuers() is not None


def test_tries_are_spaced_and_no_sooner_than_the_sink_asked_for() -> None:
    spacing = Spacing(100.0, 50.0, 1000.0)
    waits = []
    for _ in range(6):
        spacing.failed()
        waits.append(spacing.due_at - time.monotonic())
    for wait, nominal in zip(waits, (100, 200, 400, 800, 1000, 1000), strict=True):
        assert 0.7 * nominal < wait <= 1.25 * nominal
    assert not spacing.due and not spacing.may_be_early and spacing.may_at_the_end
    spacing.acknowledged()
    spacing.failed()
    assert 70 < spacing.due_at - time.monotonic() <= 125
    spacing.failed(10_000.0)
    assert 9_990 < spacing.due_at - time.monotonic() <= 12_500 and not spacing.may_at_the_end
    at_once = Spacing(100.0, 0.0, 1000.0)
    at_once.failed()
    assert at_once.may_be_early and not at_once.due
    at_once.failed(took_seconds=100.0)
    assert not at_once.may_be_early, "who waited rests first"
    assert Spacing(100.0, 100.0, 100.0).due, "control: nothing has failed"


@pytest.mark.parametrize("problem", ["unreachable", "forbidden"])
def test_only_a_control_plane_that_is_away_may_be_begun_without(
    problem: str, server: Server, people: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection = Flaky(server.address, people["worker"])
    connection.lose = lambda: "request"  # type: ignore[method-assign]

    def refuse(*_: Any, **__: Any) -> None:
        raise ServiceError("no", problem=problem)

    given = {"worker": "worker", "clock": CLOCK, "settings": SETTINGS, "spill_directory": tmp_path / "spill"}
    with monkeypatch.context() as patched:
        patched.setattr(connection, "put", refuse)
        with pytest.raises(ServiceError, match="no"):
            RemoteLedger(connection, **given)
        if problem == "forbidden":
            with pytest.raises(ServiceError, match="no"):
                RemoteLedger(connection, **given, may_be_away=True)
            return
        writer = RemoteLedger(connection, **given, may_be_away=True)
        writer.submit([WorkerStarted(CLOCK.now_us(), "worker", 10, 1, 4096, "cpu", "test")])
        assert writer.flush(10) and writer.down == "no" and writer.status().spilled_bytes
    connection.lose = lambda: ""  # type: ignore[method-assign]
    until(lambda: writer.status().healthy, writer)
    writer.close()
    assert not list((tmp_path / "spill").glob("*.spill"))
