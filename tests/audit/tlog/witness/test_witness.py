"""The witness (W1-W3, M1, H1, L1, L2): what it signs, what it refuses with which status, that it never forks."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine

from kvcustody.audit.kinds import KeyEvent
from kvcustody.audit.leaf.merkle import TreeHead, leaf_hashes
from kvcustody.audit.reports.build_report import build_report, period
from kvcustody.audit.reports.parameters import ReportParameters
from kvcustody.audit.tlog.checkpoint import open_checkpoint
from kvcustody.audit.tlog.checkpoint_signer import CheckpointSigner
from kvcustody.audit.tlog.proofs import MemoryTiles, consistency_proof
from kvcustody.audit.tlog.root_log import root_checkpoint
from kvcustody.audit.tlog.signed_note import KeyKind, parse_signatures
from kvcustody.audit.tlog.signing_key import SigningKey, sign_checkpoint
from kvcustody.audit.tlog.witness.client import WitnessAddress, cosign
from kvcustody.audit.tlog.witness.cosign import CosignReply, Witness
from kvcustody.audit.tlog.witness.request import SIZE_TYPE, AddCheckpoint, parse_request
from kvcustody.audit.tlog.witness.server import WitnessServer
from kvcustody.audit.tlog.witness.state import WitnessError, WitnessMemory
from kvcustody.audit.tlog.witness.status import UNWITNESSED, witness_status
from kvcustody.audit.tlog.witness.submitter import WitnessSubmitter
from kvcustody.clock import SystemClock, VirtualClock
from kvcustody.errors import LedgerError

ORIGIN = "ledger.example"
NOW = 1_700_000_000


class Log:
    """A log that grows, and may lie."""

    def __init__(self, leaf: bytes = b"leaf") -> None:
        self.key = SigningKey.generate(ORIGIN)
        self.tiles = MemoryTiles(leaf_hashes([leaf + b"%d" % number for number in range(40)]))

    def note(self, size: int) -> bytes:
        from kvcustody.audit.tlog.proofs import tree_root

        return sign_checkpoint(root_checkpoint(ORIGIN, TreeHead(size, tree_root(self.tiles, size))), [self.key])

    def body(self, old: int, size: int) -> bytes:
        path = consistency_proof(self.tiles, old, size) if 0 < old < size else []
        return AddCheckpoint(old, tuple(path), self.note(size)).to_bytes()

    def prove(self, old: int, size: int) -> list[bytes]:
        return consistency_proof(self.tiles, old, size)


@pytest.fixture
def log() -> Log:
    return Log()


@pytest.fixture
def memory(tmp_path: Path, log: Log) -> WitnessMemory:
    made = WitnessMemory(tmp_path / "witness.db", create=True)
    made.trust([log.key.verifier])
    return made


@pytest.fixture
def witness(memory: WitnessMemory) -> Witness:
    return Witness(SigningKey.generate("witness.example", KeyKind.COSIGNATURE), memory, lambda: NOW)


@pytest.fixture
def server(witness: Witness, tmp_path: Path) -> Iterator[WitnessServer]:
    made = WitnessServer(witness, f"unix:{tmp_path / 'w.sock'}")
    made.start()
    yield made
    made.close()


def accepted(witness: Witness, answer: CosignReply, note: bytes, log: Log) -> None:
    assert answer.status == 200
    signed = open_checkpoint(
        note + answer.body, [log.key.verifier], witnesses=[witness.key.verifier], witness_threshold=1
    )
    assert signed.witnesses[0].at_seconds == NOW


def test_a_log_that_grows_is_signed_each_time(witness: Witness, memory: WitnessMemory, log: Log) -> None:
    held = 0
    for size in (1, 7, 8, 8, 31, 40):
        accepted(witness, witness.add_checkpoint(log.body(held, size)), log.note(size), log)
        held = size
        assert memory.head(ORIGIN).size == size


def test_statuses_are_those_of_the_specification(witness: Witness, memory: WitnessMemory, log: Log) -> None:
    assert witness.add_checkpoint(log.body(0, 10)).status == 200
    other, fork = Log(), Log(b"other")
    fork.key = log.key
    stranger = sign_checkpoint(
        root_checkpoint("elsewhere", log.tiles.frontier.head()), [SigningKey.generate("elsewhere")]
    )
    good = parse_request(log.body(10, 20))
    refused = {
        404: AddCheckpoint(0, (), stranger).to_bytes(),
        403: other.body(10, 20),  # the origin is right and the key is not
        400: b"old 010\n\n" + log.note(20),
        422: good._replace(path=good.path[:-1]).to_bytes(),
    }
    for status, body in refused.items():
        assert witness.add_checkpoint(body).status == status
    assert witness.add_checkpoint(AddCheckpoint(21, (), log.note(20)).to_bytes()).status == 400
    assert witness.add_checkpoint(log.body(5, 20)) == CosignReply(409, b"10\n", SIZE_TYPE)
    assert witness.add_checkpoint(fork.body(10, 10)).status == 409  # the same size and another root
    assert witness.add_checkpoint(fork.body(10, 20)).status == 422  # a fork cannot prove that it extends
    assert memory.head(ORIGIN).size == 10
    accepted(witness, witness.add_checkpoint(log.body(10, 20)), log.note(20), log)


def test_every_byte_of_a_request_counts(witness: Witness, log: Log) -> None:
    """No single-byte edit of a request is signed, except within signature lines of keys that are not trusted."""
    assert witness.add_checkpoint(log.body(0, 3)).status == 200
    body = log.body(3, 5)
    for at in range(len(body)):
        for bit in (1, 32):
            changed = body[:at] + bytes([body[at] ^ bit]) + body[at + 1 :]
            assert witness.add_checkpoint(changed).status in (400, 403, 404, 409, 422), (at, bit)
    assert witness.add_checkpoint(body).status == 200


def test_only_one_of_two_forks_is_ever_signed(witness: Witness, log: Log) -> None:
    """A hundred requests at once, half of them from a forked log with the same key: one history comes out."""
    fork = Log(b"other")
    fork.key = log.key
    bodies = [(log if number % 2 else fork).body(0, 1 + number % 20) for number in range(100)]
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(witness.add_checkpoint, bodies))
    signed = [number % 2 for number, answer in enumerate(answers) if answer.status == 200]
    assert len(set(signed)) == 1


def test_without_compare_and_set_forks_are_signed(witness: Witness, memory: WitnessMemory, log: Log) -> None:
    """Positive control: a witness that forgets signs both histories."""
    fork = Log(b"other")
    fork.key = log.key
    memory.advance = lambda *_: True  # type: ignore[method-assign]
    assert {witness.add_checkpoint(one.body(0, 9)).status for one in (log, fork)} == {200}


def test_a_restarted_witness_remembers(witness: Witness, tmp_path: Path, log: Log) -> None:
    assert witness.add_checkpoint(log.body(0, 12)).status == 200
    again = Witness(witness.key, WitnessMemory(tmp_path / "witness.db"), lambda: NOW)
    assert again.add_checkpoint(log.body(0, 12)).status == 409
    assert (tmp_path / "witness.db").stat().st_mode & 0o077 == 0


def test_a_client_learns_where_the_witness_is(server: WitnessServer, witness: Witness, log: Log) -> None:
    address = WitnessAddress(server.address, witness.key.verifier)
    assert cosign(address, log.note(9), 9, 0, log.prove).at_seconds == NOW
    made = cosign(address, log.note(30), 30, 4, log.prove)  # it has forgotten where it was
    note = log.note(30) + made.line.line().encode()
    assert open_checkpoint(note, [log.key.verifier], witnesses=[witness.key.verifier], witness_threshold=1)
    with pytest.raises(WitnessError, match="has seen `30`"):
        cosign(address, log.note(20), 20, 9, log.prove)


def test_a_client_believes_only_its_witness(server: WitnessServer, log: Log) -> None:
    other = SigningKey.generate("witness.example", KeyKind.COSIGNATURE)
    with pytest.raises(WitnessError, match="no line signed by its key"):
        cosign(WitnessAddress(server.address, other.verifier), log.note(9), 9, 0, log.prove)


def test_a_witness_over_tcp(witness: Witness, log: Log) -> None:
    server = WitnessServer(witness, "127.0.0.1:0")
    server.start()
    try:
        address = WitnessAddress(f"http://{server.address}", witness.key.verifier)
        assert cosign(address, log.note(9), 9, 0, log.prove).at_seconds == NOW
    finally:
        server.close()


def test_a_dead_or_silent_witness_costs_its_deadline_and_no_more(tmp_path: Path, log: Log) -> None:
    key = SigningKey.generate("witness.example", KeyKind.COSIGNATURE).verifier
    with pytest.raises(WitnessError, match="cannot be reached"):
        cosign(WitnessAddress(f"unix:{tmp_path / 'none'}", key), log.note(9), 9, 0, log.prove)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        began = time.monotonic()
        with pytest.raises(WitnessError, match="cannot be reached"):
            address = WitnessAddress(f"http://127.0.0.1:{silent.getsockname()[1]}", key)
            cosign(address, log.note(9), 9, 0, log.prove, timeout_seconds=0.3)
        assert time.monotonic() - began < 60


def test_a_request_that_never_ends_does_not_stop_the_others(server: WitnessServer, witness: Witness, log: Log) -> None:
    path = server.address.removeprefix("unix:")
    slow = socket.socket(socket.AF_UNIX)
    slow.connect(path)
    slow.sendall(b"POST /add-checkpoint HTTP/1.1\r\nContent-Length: 100000\r\n\r\nold 0\n")
    address = WitnessAddress(server.address, witness.key.verifier)
    assert cosign(address, log.note(9), 9, 0, log.prove).at_seconds == NOW
    slow.close()


@pytest.mark.parametrize(
    ("request_line", "status"),
    [
        (b"POST /add-checkpoint HTTP/1.1\r\n\r\n", b"411"),
        (b"POST /add-checkpoint HTTP/1.1\r\nContent-Length: 99999999\r\n\r\n", b"413"),
        (b"POST /other HTTP/1.1\r\nContent-Length: 0\r\n\r\n", b"404"),
        (b"GET / HTTP/1.1\r\n\r\n", b"404"),
        (b"GET /healthz HTTP/1.1\r\n\r\n", b"200"),
    ],
)
def test_what_is_not_a_request_is_refused(server: WitnessServer, request_line: bytes, status: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.connect(server.address.removeprefix("unix:"))
        made.sendall(request_line)
        assert made.recv(4096).split(b" ")[1] == status


def test_bytes_at_random_are_no_request() -> None:
    import random

    chance = random.Random(1)
    for _ in range(2000):
        with pytest.raises(LedgerError):
            parse_request(bytes(chance.choice(b"old 0123456789\n=+/A\x80") for _ in range(chance.randrange(60))))


def test_a_logs_key_cannot_be_a_witness(memory: WitnessMemory) -> None:
    with pytest.raises(WitnessError):
        Witness(SigningKey.generate("witness.example"), memory, lambda: NOW)


KILLED = """
import sys, time
from pathlib import Path
from kvcustody.audit.tlog.signing_key import read_signing_key
from kvcustody.audit.tlog.witness.state import WitnessMemory
from kvcustody.audit.tlog.witness.server import WitnessServer
from kvcustody.audit.tlog.witness.cosign import Witness
folder = Path(sys.argv[1])
key = read_signing_key(folder / "witness.key")
witness = Witness(key, WitnessMemory(folder / "witness.db"), lambda: int(time.time()))
server = WitnessServer(witness, "unix:" + str(folder / "w.sock"))
print("ready", flush=True)
server.serve()
"""


def test_kill_9_never_makes_it_sign_two_histories(tmp_path: Path, log: Log) -> None:
    """The client hammers a log and its fork while the process is killed again and again: one history is signed."""
    from kvcustody.audit.tlog.signing_key import create_signing_key

    fork = Log(b"other")
    fork.key = log.key
    key = create_signing_key(tmp_path / "witness.key", "witness.example", KeyKind.COSIGNATURE)
    WitnessMemory(tmp_path / "witness.db", create=True).trust([log.key.verifier])
    address = WitnessAddress(f"unix:{tmp_path / 'w.sock'}", key.verifier)
    signed: dict[str, int] = {"log": 0, "fork": 0}
    done = threading.Event()

    def hammer(name: str, one: Log) -> None:
        size = 1
        while not done.is_set():
            try:
                cosign(address, one.note(size), size, signed[name], one.prove, timeout_seconds=0.5)
                signed[name], size = size, min(40, size + 1)
            except WitnessError:
                time.sleep(0.002)

    threads = [threading.Thread(target=hammer, args=pair) for pair in (("log", log), ("fork", fork))]
    for thread in threads:
        thread.start()
    for _ in range(5):
        process = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        assert process.stdout and process.stdout.readline() == "ready\n"
        before, give_up = sum(signed.values()), time.monotonic() + 60
        while sum(signed.values()) == before and time.monotonic() < give_up:
            time.sleep(0.002)  # one of them is served now: killed in the midst of it
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()
    done.set()
    for thread in threads:
        thread.join()
    assert sorted(size > 0 for size in signed.values()) == [False, True]
    assert WitnessMemory(tmp_path / "witness.db").head(ORIGIN).size >= max(signed.values())


def test_signature_lines_are_what_a_witness_returns(witness: Witness, log: Log) -> None:
    [line] = parse_signatures(witness.add_checkpoint(log.body(0, 2)).body)
    assert (line.name, line.key_id) == ("witness.example", witness.key.verifier.key_id)


def test_a_dead_witness_delays_no_commit_and_is_seen(store: Engine, make_writer: Any, tmp_path: Path) -> None:
    """The submitter's thread alone waits for a witness that accepts connections and never answers."""
    key = SigningKey.generate("witness.example", KeyKind.COSIGNATURE).verifier
    signer = CheckpointSigner(store, [SigningKey.generate(ORIGIN)], memory=tmp_path / "last", clock=SystemClock())
    writer = make_writer(store)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        address = WitnessAddress(f"http://127.0.0.1:{silent.getsockname()[1]}", key)
        submitter = WitnessSubmitter(store, [address], interval_seconds=0.01, timeout_seconds=120)
        submitter.start()
        for number in range(30):
            writer.submit_durable(KeyEvent(1, "acme", "made", number, "operator"))
            signer.sign_once()
        assert not submitter.status()[0].failures, "whoever waited for the witness would have waited it out"
        silent.close()  # its caller is told at once
        until = time.monotonic() + 60
        while not submitter.status()[0].failures and time.monotonic() < until:
            time.sleep(0.01)
        submitter.close()
    assert submitter.status()[0].failures and "reached" in submitter.status()[0].problem
    with store.connect() as connection:
        status = witness_status(connection, SystemClock().utc_us())
    assert status.warning == UNWITNESSED and status.witnessed_size == 0 and status.unwitnessed_us > 0


def test_a_witness_that_remembers_more_shows_a_restored_ledger(
    store: Engine,
    make_writer: Any,
    server: WitnessServer,
    witness: Witness,
    memory: WitnessMemory,
    tmp_path: Path,
) -> None:
    """The ledger is put back to an old backup and signed again: the witness refuses, and the submitter says why."""
    key = SigningKey.generate(ORIGIN)
    memory.trust([key.verifier])
    memory.advance(ORIGIN, memory.head(ORIGIN), TreeHead(1000, bytes(32)))
    writer = make_writer(store)
    writer.submit_durable(KeyEvent(1, "acme", "made", 1, "operator"))
    CheckpointSigner(store, [key], memory=tmp_path / "last", clock=SystemClock()).sign_once()
    submitter = WitnessSubmitter(store, [WitnessAddress(server.address, witness.key.verifier)])
    with pytest.raises(WitnessError, match="has seen `1000`"):
        submitter.submit_once(submitter._addresses[0])


def test_status_and_report_say_how_old_the_witnesses_word_is(
    store: Engine,
    make_writer: Any,
    world: Any,
    server: WitnessServer,
    witness: Witness,
    memory: WitnessMemory,
    tmp_path: Path,
) -> None:
    """Witnessed once, and written on: the age is that of the witness's own time."""
    key = SigningKey.generate(ORIGIN)
    memory.trust([key.verifier])
    lived, writer, signed_checkpoints = world(1).run(60), make_writer(store), []
    for start, after_us in ((0, -5_000_000), (len(lived.events) // 2, 60_000_000)):
        writer.submit(lived.events[start : start + len(lived.events) // 2])
        assert writer.flush()
        clock = VirtualClock(utc_us=NOW * 1_000_000 + after_us)
        signed_checkpoints.append(CheckpointSigner(store, [key], memory=tmp_path / "last", clock=clock).sign_once())
        if not start:
            address = WitnessAddress(server.address, witness.key.verifier)
            assert WitnessSubmitter(store, [address]).submit_once(address) == signed_checkpoints[0].size
    with store.connect() as connection:
        status = witness_status(connection, NOW * 1_000_000 + 90_000_000)
        bounds = period(connection, signed_checkpoints[1].size, None, None)
        report = build_report(connection, ReportParameters("cc-fdp-rip", signed_checkpoints[1].size, *bounds))
    [seen] = status.witnesses
    assert (seen.name, seen.size, seen.age_us) == ("witness.example", signed_checkpoints[0].size, 90_000_000)
    assert status.warning == "no witness has signed newer records"
    told = report["boundary"].witnessed
    assert (told.witnesses, told.size, told.age_us) == (("witness.example",), signed_checkpoints[0].size, 60_000_000)
    assert "unwitnessed" in told.warning
