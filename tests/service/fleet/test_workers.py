"""Workers' ledgers over the API: forged leaves, exactly once, outages, and nothing acknowledged that is lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import orjson
import pytest
from sqlalchemy import select

from kvcustody.audit.evidence.processes.sequence_gaps import gaps
from kvcustody.audit.evidence.query.custody import custody_of
from kvcustody.audit.evidence.subjects.subject_table import committed_name, names_of
from kvcustody.audit.kinds import DecisionRecorded, ErasureRequested, KeyEvent, ResidencyOpened, WorkerStarted
from kvcustody.audit.leaf.batch import LeafBatch, merge_batches, part_of_batch, read_leaves
from kvcustody.audit.leaf.change_items import plain_bodies
from kvcustody.audit.store.database.engine import WRITE, open_store
from kvcustody.audit.store.schema.leaf_tables import releases
from kvcustody.audit.store.schema.ledger import events, incarnations, subjects
from kvcustody.audit.verify.ledger.fsck_ledger import fsck
from kvcustody.audit.write.event_writer import WriterSettings
from kvcustody.clock import SystemClock
from kvcustody.errors import ServiceError
from kvcustody.governance.control_plane.connection import ControlPlaneConnection
from kvcustody.governance.control_plane.remote_ledger import RemoteLedger
from kvcustody.governance.service.access.roles import Role
from kvcustody.governance.service.ingest import ingest
from kvcustody.governance.service.ingest.check_leaves import Sender, read_batch, write_batch
from kvcustody.governance.service.problem_details import ProblemError
from kvcustody.governance.service.service import Service
from standins import PLACE
from standins.service.service_world import OFFSET_US, Server, Worker, register, ship
from standins.waiting import until

KILLS = int(os.environ.get("KVCUSTODY_SERVICE_KILLS", "1"))
MANY = 150  # leaves, and more than are read at a time
CUTS = {
    "two-in-a-line": lambda first, second: [first + b"," + second, first, second[:-1]],
    "an-empty-line": lambda first, second: [first + b"," + second, b""],
    "cut-at-a-comma": lambda first, second: [*(first + b"," + second).split(b",", 1)],
    "space-after": lambda first, second: [first + b" ", second],
    "space-before": lambda first, second: [first, b" " + second],
}
QUICK = WriterSettings(interval_seconds=0.002, durable_seconds=3.0)


@pytest.fixture
def worker(client, people) -> Worker:
    made = Worker()
    told = {"issuers": [], "protocol": 2}
    assert register(client, people["worker"], made).json() == {"new": True, "worker": "worker", **told}
    return made


def leaf_count(service: Service, worker: Worker) -> int:
    """How many events the ledger has of a worker, whatever leaves they share."""
    life = select(incarnations.c.id).where(incarnations.c.uuid == worker.incarnation).scalar_subquery()
    with service.reading() as connection:
        leaves = connection.scalars(select(events.c.leaf).where(events.c.incarnation == life))
        return sum(1 for leaf in leaves for _ in plain_bodies(orjson.loads(leaf)))


# -- batches ----------------------------------------------------------------------------------------------------------


def test_a_batch_is_stored_once_however_often_it_comes(service: Service, client, people, worker: Worker) -> None:
    first = worker.batch([worker.started(), *worker.request("acme")])
    second = worker.batch(worker.request("labs"))
    answers = [ship(client, people["worker"], worker, batch).json() for batch in (first, first, second, first, second)]
    assert [(answer["added"], answer["known"]) for answer in answers] == [
        (len(first.leaves), 0),
        (0, len(first.leaves)),
        (len(second.leaves), 0),
        (0, len(first.leaves)),
        (0, len(second.leaves)),
    ]
    assert leaf_count(service, worker) == len(first.leaves) + len(second.leaves)
    with service.reading() as connection:
        found = custody_of(connection, "acme", names_of(connection, "acme", "user-1", service.subject_keys))
        assert gaps(connection) == ()
    assert worker.incarnation in {one.incarnation for one in found}


def test_batches_that_waited_for_the_database_are_each_there_once(service: Service, client, people) -> None:
    """Of several processes, handed in while another transaction has the ledger; the trees hold them too."""
    workers = [Worker() for _ in range(4)]
    for each in workers:
        register(client, people["worker"], each)
        ship(client, people["worker"], each, each.batch(each.request("acme")))
    second = [each.batch([*each.request("acme"), *each.request("labs")]) for each in workers]

    def put(each: Worker, batch: Any) -> Any:
        read = service.ingest.read(batch.body, service.fleet.sender("worker", each.incarnation))
        return service.ingest.put(each.name, each.incarnation, read)

    with ThreadPoolExecutor(len(workers)) as pool:
        with service.engine.connect().execution_options(**WRITE) as connection, connection.begin():
            stored = [pool.submit(put, *pair) for pair in zip(workers, second, strict=True)]
        assert [one.result()[:2] for one in stored] == [(8, 0)] * 4
    assert [leaf_count(service, each) for each in workers] == [12] * 4
    with service.reading() as connection:
        assert fsck(connection).problems == []


@pytest.mark.parametrize("divided", [True, False], ids=["divided", "control"])
def test_one_workers_batches_keep_no_other_worker_out(
    service: Service, client, people, monkeypatch: pytest.MonkeyPatch, divided: bool
) -> None:
    """While the database takes nothing: of ten leaves that may wait, one worker's share is five. The control: all."""
    monkeypatch.setattr(ingest, "_WAITING_LEAVES_MAX", 10)
    monkeypatch.setattr(ingest, "_WAITING_LEAVES_MAX_OF_WORKER", 5)
    key = people.keys.get("modest") or people.add("modest", Role.WORKER)
    greedy, modest = Worker(), Worker("modest")
    for each, of in ((greedy, people["worker"]), (modest, key)):
        register(client, of, each)

    def handed_in(each: Worker, batch: Any) -> Any:
        read = service.ingest.read(batch.body, service.fleet.sender(each.name, each.incarnation))
        return each.name if divided else "everybody", each.incarnation, read

    def put(each: Worker, batch: Any) -> Any:
        return service.ingest.put(*handed_in(each, batch))

    def waiting(leaves: int) -> None:
        while service.ingest._leaves < leaves:
            time.sleep(0.01)

    with ThreadPoolExecutor(4) as pool:
        with service.engine.connect().execution_options(**WRITE) as connection, connection.begin():
            decided, taken = threading.Event(), []
            first = service.ingest.begin(*handed_in(greedy, greedy.batch([greedy.started()])), decided.set)
            while service.ingest._queue:
                time.sleep(0.01)  # that one is being committed; what follows waits
            for leaves in (4, 8):
                taken.append(pool.submit(put, greedy, greedy.batch(greedy.request("acme"))))
                waiting(leaves)
            refused = greedy.batch(greedy.request("acme"))
            with pytest.raises(ProblemError, match="wait"):
                put(greedy, refused)
            theirs = modest.batch([modest.started(), *modest.request("labs")])
            if divided:
                taken.append(pool.submit(put, modest, theirs))
                waiting(8 + len(theirs.leaves))
            else:
                with pytest.raises(ProblemError, match="wait"):
                    put(modest, theirs)
        assert [one.result().known for one in taken] == [0] * len(taken)
        assert decided.wait(30) and service.ingest.end(first).known == 0


def _changed(leaf: bytes, **values: Any) -> bytes:
    body = {**orjson.loads(leaf), **values}
    return orjson.dumps(body, option=orjson.OPT_SORT_KEYS)


FORGED: dict[str, Callable[[bytes], bytes]] = {
    "another incarnation": lambda leaf: _changed(leaf, incarnation="cd" * 16),
    "another worker's name": lambda leaf: _changed(leaf, worker="other"),
    "an unknown kind": lambda leaf: _changed(leaf, kind="nonsense"),
    "a kind of the control plane": lambda leaf: _changed(leaf, kind="access"),
    "a kind that is a list": lambda leaf: _changed(leaf, kind=["receipt"]),
    "another tenant's log": lambda leaf: _changed(leaf, log="tenant/labs"),
    "the system log": lambda leaf: _changed(leaf, log="system"),
    "a further field": lambda leaf: _changed(leaf, prompt="secret"),
    "another outage class": lambda leaf: _changed(leaf, outage="C"),
    "another schema": lambda leaf: _changed(leaf, schema="kvcustody/event@2"),
    "sequence 0": lambda leaf: _changed(leaf, sequence=0),
    "sequence that is text": lambda leaf: _changed(leaf, sequence="1"),
    "part over parts": lambda leaf: _changed(leaf, part=2),
    "a time of another incarnation": lambda leaf: _changed(leaf, at_us=1),
    "a boot time that is text": lambda leaf: _changed(leaf, boot_us="1"),
    "a space": lambda leaf: leaf.replace(b":", b": ", 1),
    "keys out of order": lambda leaf: orjson.dumps(dict(reversed(orjson.loads(leaf).items()))),
    "a key twice": lambda leaf: leaf[:-1] + b',"tenant":"labs"}',
    "a float": lambda leaf: _changed(leaf, revision=1.5),
    "a run of two counts for three deltas": lambda leaf: _changed(leaf, runs=[[9, [1, 2, 3], [1, 1]]]),
    "a run of no count": lambda leaf: _changed(leaf, runs=[[9, [1, 2], [1, 0]]]),
    "a run of a negative block": lambda leaf: _changed(leaf, runs=[[9, [4, -2], [1, 3]]]),
    "a run of a negative generation": lambda leaf: _changed(leaf, runs=[[-9, [4], []]]),
    "a run of no pool": lambda leaf: _changed(leaf, runs=[[9, [4], [], -1]]),
    "a run of five values": lambda leaf: _changed(leaf, runs=[[9, [4], [], 1, 1]]),
    "a run of text": lambda leaf: _changed(leaf, runs=[[9, "4", []]]),
    "a run of no blocks": lambda leaf: _changed(leaf, runs=[[9, [], []]]),
    "no object": lambda leaf: b"[1]",
    "no JSON": lambda leaf: b"\x00\xff",
    "too long": lambda leaf: _changed(leaf, cause="x" * 9000),
    "a tenant that is a list": lambda leaf: _changed(leaf, tenant=["acme"]),
    "a tenant that is a number": lambda leaf: _changed(leaf, tenant=7),
    "a trace in capitals": lambda leaf: _changed(leaf, trace="AB" * 16),
    "a trace of zeros": lambda leaf: _changed(leaf, trace="0" * 32),
    "a trace that is too long": lambda leaf: _changed(leaf, trace="ab" * 17),
    "a trace with a newline": lambda leaf: _changed(leaf, trace="ab" * 16 + "\n"),
    "a trace that is a list": lambda leaf: _changed(leaf, trace=["ab" * 16]),
    "a trace that is a number": lambda leaf: _changed(leaf, trace=7),
    "an empty trace": lambda leaf: _changed(leaf, trace=""),
    "an escaped newline in the log": lambda leaf: _changed(leaf, log="tenant/acme\nsystem"),
}


@pytest.mark.parametrize("forgery", FORGED)
def test_a_forged_leaf_is_refused_with_its_whole_batch(
    service: Service, client, people, worker: Worker, forgery: str
) -> None:
    batch = worker.batch([event for event in worker.request("acme") if isinstance(event, ResidencyOpened)] * 2)
    body = write_batch([], [batch.leaves[0], FORGED[forgery](batch.leaves[1])])
    refused = ship(client, people["worker"], worker, batch._replace(body=body))
    assert refused.status_code == 422 and refused.json()["type"].endswith(":refused-leaf"), refused.text
    assert refused.json()["leaf"] == 1 and leaf_count(service, worker) == 0
    assert b"labs" not in refused.content and b"secret" not in refused.content


def _sender(worker: Worker) -> Sender:
    return Sender(worker.name, worker.incarnation, OFFSET_US)


@pytest.mark.parametrize("forgery", FORGED)
def test_a_forged_leaf_is_named_wherever_it_is(forgery: str) -> None:
    worker = Worker()
    honest = worker.batch([event for event in worker.request("acme") if isinstance(event, ResidencyOpened)])
    late = [*honest.leaves * MANY, FORGED[forgery](honest.leaves[0]), *honest.leaves]
    with pytest.raises(ProblemError) as refused:
        read_batch(write_batch([], late), _sender(worker))
    assert refused.value.extra["leaf"] == MANY * len(honest.leaves)
    assert len(read_batch(write_batch([], honest.leaves * 2), _sender(worker)).batch.data) == 2


@pytest.mark.parametrize("cut", sorted(CUTS))
def test_leaves_are_compared_each_with_its_own_line(cut: str) -> None:
    """Lines whose text, put together, is that of as many canonical objects, but that are not one object each."""
    worker = Worker()
    first, second = worker.batch(worker.request("acme")).leaves[:2]
    read_batch(write_batch([], [first, second]), _sender(worker))
    with pytest.raises(ProblemError):
        read_batch(write_batch([], CUTS[cut](first, second)), _sender(worker))


def test_batches_together_are_the_batch_of_their_leaves() -> None:
    worker = Worker()
    now = worker.now_us
    decision = DecisionRecorded(now, "reuse", "permit", "labs", "acme", "internal", ("labs-reads-acme",), 1, "grant")
    lists = [[worker.started(), *worker.request("acme"), decision], worker.request("labs", None, 9)]
    traced = [event for event in worker.request("acme") if "trace" in event.__struct_fields__]
    lists.append([*worker.request("acme"), *(event._replace(trace="ab" * 16) for event in traced), decision])
    lists.append([*worker.request("acme"), *worker.request("labs", None, 9)] * MANY)
    lists.append([KeyEvent(now, None, "made", 1, "governor"), *worker.request("acme")])
    data = [worker.batch(made).leaves for made in lists]
    batches = [read_batch(write_batch([], lines), _sender(worker)).batch for lines in data]
    whole = read_leaves([line for lines in data for line in lines])
    assert _plain(merge_batches(batches)) == _plain(whole)
    lines = [line for each in data for line in each]
    for first, below in ((0, len(lines)), (0, 7), (3, 30), (len(lines) - 9, len(lines)), (5, 5)):
        part = part_of_batch(whole, first, below)
        assert _plain(part)[:2] == _plain(read_leaves(lines[first:below]))[:2]
        assert (part.hashes, part.founders) == (whole.hashes[first:below], whole.founders)


def _plain(batch: LeafBatch) -> Any:
    """A batch as lists, whatever sequences it was made of."""
    groups = {}
    for group in batch.groups:
        named = group.columns.items()
        columns = {key: list(values) for key, values in named if key != "trace" or any(values)}
        groups[group.kind] = (list(group.places), columns, dict(group.extents))
    return (
        [list(column) for column in batch[:9]],
        groups,
        [founder.offset_us for founder in batch.founders.values()],
        list(batch.hashes),
    )


def test_the_honest_twin_of_every_forgery_is_taken(service: Service, client, people, worker: Worker) -> None:
    """Control: the same leaves unchanged; a decision of two tenants; a key's event of the system log."""
    now = worker.now_us
    decision = DecisionRecorded(now, "reuse", "permit", "labs", "acme", "internal", ("labs-reads-acme",), 1, "grant")
    made = [worker.started(), *worker.request("acme"), decision, KeyEvent(now, None, "made", 1, "governor")]
    traced = [decision, *worker.request("acme")]
    made += [event._replace(trace="ab" * 16) for event in traced if "trace" in event.__struct_fields__]
    batch = worker.batch(made)
    assert ship(client, people["worker"], worker, batch).status_code == 200
    assert leaf_count(service, worker) == len(batch.leaves)


@pytest.mark.parametrize("origin", ["live\r\nSet-Cookie: a=b", ["generated"], None, "Generated"])
def test_an_origin_that_is_none_is_refused_and_one_of_old_has_none(client, people, worker: Worker, origin: Any) -> None:
    """What a worker says of itself is shown on every page, and sent in a header of every answer."""
    batch = worker.batch([started("worker")])
    leaf = orjson.loads(batch.leaves[0])

    def hand_in(body: dict[str, Any]) -> int:
        data = orjson.dumps(body, option=orjson.OPT_SORT_KEYS)
        sent = batch._replace(body=write_batch([], [data]))
        return int(ship(client, people["worker"], worker, sent).status_code)

    assert hand_in(leaf | {"origin": origin}) == 422
    assert hand_in({name: value for name, value in leaf.items() if name != "origin"}) < 300


@pytest.mark.parametrize(
    "names",
    [
        b"",
        b"{}",
        b"[[]]",
        b'[["a","b","c","d"]]',
        b'[["' + b"a" * 24 + b'","t","s",7]]',
        b'[["' + b"a" * 24 + b'","\\u0000","s",""]]',
        b'[["' + b"a" * 24 + b'","t","s","",7]]',
        b'[["' + b"a" * 24 + b'","t","s","","%s"]]' % (b"0" * 31),
        b'[["' + b"a" * 24 + b'","t","s","","%s"]]' % (b"g" * 32),
        b'[["' + b"a" * 32 + b'","t","s","","%s"]]' % (b"0" * 32),  # is not the one of this name
        b'[["' + b"a" * 24 + b'","t","s","",null,null]]',
        b'[["' + b"a" * 24 + b'","t","s","",null],["' + b"b" * 24 + b'","t","s",""]]',
        b'[["' + b"a" * 24 + b'","t","s",""]]',
        b'[["' + b"a" * 24 + b'","t","s","",null]]',
    ],
)
def test_malformed_names_are_refused(client, people, worker: Worker, names: bytes) -> None:
    path = f"{worker.path}/batches/1"
    answer = client(
        "PUT", path, people["worker"], content=names + b"\n", headers={"Content-Type": "application/x-ndjson"}
    )
    assert answer.status_code == 400


def test_a_name_that_its_secret_proves_is_taken(client, people, worker: Worker) -> None:
    secret = "0" * 32
    names = json.dumps([[committed_name(secret, "t", "s", ""), "t", "s", "", secret]]).encode()
    path = f"{worker.path}/batches/1"
    answer = client(
        "PUT", path, people["worker"], content=names + b"\n", headers={"Content-Type": "application/x-ndjson"}
    )
    assert answer.status_code == 200


def test_a_worker_reaches_no_other_workers_incarnation(client, people, worker: Worker) -> None:
    people.keys.setdefault("intruder", "") or people.add("intruder", Role.WORKER)
    key = people["intruder"]
    batch = worker.batch([worker.started()])
    absent = ship(client, key, Worker("x"), batch)
    foreign = ship(client, key, worker, batch)
    assert foreign.status_code == 404 and foreign.content == absent.content
    assert register(client, key, worker).status_code == 404
    assert client("PUT", f"{worker.path}/status", key, json={"status": {}}).status_code == 404


def test_a_new_incarnation_closes_the_dead_ones_custody_once(service: Service, client, people) -> None:
    name = "restarted"
    key = people.add(name, Role.WORKER)
    first, second = Worker(name), Worker(name)
    register(client, key, first)
    opened = [event for event in first.request("acme") if isinstance(event, ResidencyOpened)]
    ship(client, key, first, first.batch([first.started(), *opened]))
    for _ in range(2):
        assert register(client, key, second).status_code == 200

    def ended() -> Any:
        service.writer.flush()
        with service.reading() as connection:
            row = connection.execute(select(incarnations).where(incarnations.c.uuid == first.incarnation)).one()
        return row if row.end is not None else None

    lives = until(ended)  # it is closed behind the answer
    with service.reading() as connection:
        causes = connection.scalars(select(releases.c.cause).where(releases.c.incarnation == lives.id)).all()
    assert lives.end == "died" and causes == ["unproven: process death"]


# -- the client -------------------------------------------------------------------------------------------------------


def remote(server: Server, key: str, name: str, folder: Path) -> RemoteLedger:
    connection = ControlPlaneConnection(server.address, key)
    return RemoteLedger(connection, worker=name, clock=SystemClock(), spill_directory=folder, settings=QUICK)


def started(name: str) -> WorkerStarted:
    return WorkerStarted(SystemClock().now_us(), name, 10, 1, 4096, "cpu", "test")


def test_a_session_that_a_worker_asks_to_erase_has_a_row(
    service: Service, server: Server, people, tmp_path: Path
) -> None:
    ledger = remote(server, people["worker"], "worker", tmp_path / "spill")
    now = ledger._clock.now_us()
    opening = next(iter(Worker().request("acme", "erin")))._replace(at_us=now, session="chat-1")
    asked = ErasureRequested(now, "e-erin", "acme", "session", "erin", "chat-2", now + 10**9, "dpo")
    ledger.submit([started("worker"), opening, asked])
    assert ledger.flush(60)
    ledger.close()
    with service.reading() as reading:
        found = names_of(reading, "acme", "erin", service.subject_keys)
        rows = reading.execute(select(subjects).where(subjects.c.pseudonym.in_(found))).all()
    assert sum(bool(row.session) for row in rows) == 1, "control: a session that is only used has no row"


def test_erasures_reach_a_waiting_worker_at_once_and_until_it_answers(
    client, server: Server, people, worker: Worker
) -> None:
    ship(client, people["worker"], worker, worker.batch([worker.started(), *worker.request("acme", "user-7")]))
    with ControlPlaneConnection(server.address, people["worker"]) as connection:
        before = {item["erasure"] for item in connection.get("/v1/worker/erasures")["items"]}
        asked: list[str] = []

        def ask() -> None:
            time.sleep(0.3)
            body = {"tenant": "acme", "subject": "user-7"}
            with ControlPlaneConnection(server.address, people["tenant-admin@acme"]) as admin:
                asked.append(admin.post("/v1/erasures", body)["erasure"])

        thread = threading.Thread(target=ask)
        thread.start()
        begun = time.monotonic()
        found = connection.get("/v1/worker/erasures", wait=20, known=",".join(before) or None)["items"]
        waited = time.monotonic() - begun
        thread.join()
        order = next(item for item in found if item["erasure"] == asked[0])
        assert waited < 10 and order["subject_name"] == "user-7" and order["tenant"] == "acme"
        assert asked[0] in {item["erasure"] for item in connection.get("/v1/worker/erasures")["items"]}
    shown = client("GET", f"/v1/erasures/{asked[0]}", people["dpo"]).json()
    assert shown["outcome"] == "partial" and "worker" in shown["waiting"] and "user-7" not in str(shown)


# -- a server that dies under load ------------------------------------------------------------------------------------


@pytest.mark.system("a killed service loses a batch that it acknowledged")
def test_a_server_killed_under_load_loses_no_acknowledged_batch(tmp_path: Path) -> None:
    """kill -9 while two workers hand in; every batch that was answered is in the ledger, each leaf once."""
    folder = tmp_path / "service"
    folder.mkdir()
    program = PLACE / "service" / "service_process.py"
    acknowledged: dict[str, set[int]] = {}
    stop = threading.Event()

    def begin() -> subprocess.Popen[str]:
        process = subprocess.Popen([sys.executable, str(program), str(folder)], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None and process.stdout.readline().strip() == "ready"
        return process

    process = begin()
    keys = orjson.loads((folder / "keys.json").read_bytes())

    def work(name: str) -> None:
        worker = Worker(name)
        acknowledged[worker.incarnation] = set()
        waiting = [worker.batch([worker.started()])]
        registered = False
        while not stop.is_set() or waiting:
            try:
                with ControlPlaneConnection(f"unix:{folder}/api.sock", keys[name], timeout_seconds=5) as connection:
                    if not registered:
                        connection.put(worker.path, {"offset_us": OFFSET_US})
                        registered = True
                    while waiting or not stop.is_set():
                        if not waiting:
                            waiting.append(worker.batch(worker.request("acme")))
                        batch = waiting[0]
                        connection.put_bytes(f"{worker.path}/batches/{batch.first}", batch.body, "application/x-ndjson")
                        acknowledged[worker.incarnation].update(range(batch.first, batch.last + 1))
                        waiting.pop(0)
            except ServiceError:
                time.sleep(0.1)

    threads = [threading.Thread(target=work, args=(name,)) for name in ("w1", "w2")]
    for thread in threads:
        thread.start()
    for _ in range(KILLS):
        reached = sum(map(len, acknowledged.values()))
        while sum(map(len, acknowledged.values())) < reached + 60:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process = begin()
    stop.set()
    for thread in threads:
        thread.join(60)
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0
    engine = open_store(f"sqlite:///{folder}/ledger.db", read_only=True)
    with engine.connect() as connection:
        for incarnation, sequences in acknowledged.items():
            life = select(incarnations.c.id).where(incarnations.c.uuid == incarnation).scalar_subquery()
            rows = connection.scalars(select(events.c.sequence).where(events.c.incarnation == life)).all()
            assert len(rows) == len(set(rows)) and sequences == set(rows) and rows
        assert sum(map(len, acknowledged.values())) >= 60 * KILLS, "void: little was handed in"
        assert [gap for gap in gaps(connection) if gap.incarnation in acknowledged] == []
    engine.dispose()
